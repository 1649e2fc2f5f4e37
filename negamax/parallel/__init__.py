"""Assign parts of a model to ranks (`layout`), and let the ranks communicate (`context`)."""
