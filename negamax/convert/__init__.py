"""`negamax convert`: checkpoints from one weight format to another, a layer at a time."""
