"""Seeded generators of the evaluation problems, one sixteenth of them kept out of training."""
