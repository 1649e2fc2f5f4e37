"""Plans to split a model over given GPUs: memory and predicted speed of each split."""
