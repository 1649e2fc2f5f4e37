"""`negamax convert`: convert checkpoints between weight formats, one layer at a time."""
