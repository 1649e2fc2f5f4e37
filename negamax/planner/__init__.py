"""How a model may be split over given GPUs, what each split holds, and how fast it should be."""
