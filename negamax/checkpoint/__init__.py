"""Find, check, read and load checkpoints."""
