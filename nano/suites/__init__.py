"""Generate the evaluation problems from seeds. One sixteenth of the problems is held out."""
