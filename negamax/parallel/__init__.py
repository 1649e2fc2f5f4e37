"""Split a model over ranks (`layout`), and let the ranks communicate (`context`)."""
