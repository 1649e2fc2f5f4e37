"""Generate the evaluation problems from seeds. One sixteenth of them is held out from training."""
