"""Each API dialect has a folder with `schema`, `routes` and, for some, `history`."""
