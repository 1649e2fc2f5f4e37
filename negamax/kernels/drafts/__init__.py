"""Count accepted draft tokens, and prepare the inputs of a draft model's passes."""
