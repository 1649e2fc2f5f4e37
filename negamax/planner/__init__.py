"""Find the ways to split a model over given GPUs, and predict their memory and speed."""
