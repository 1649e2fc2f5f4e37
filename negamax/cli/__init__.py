"""The `negamax` command, with one file per sub-command."""
