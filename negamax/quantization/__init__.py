"""Which modules of a checkpoint are stored in which format: one file per quantisation method."""
