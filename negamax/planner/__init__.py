"""Find ways to split a model over given GPUs, and predict the memory and speed of each way."""
