"""Find ways to split a model over given GPUs, with the memory and predicted speed of each."""
