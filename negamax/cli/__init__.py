"""The `negamax` command: thin sub-commands, one file each."""
