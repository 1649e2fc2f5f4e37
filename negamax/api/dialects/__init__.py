"""One folder per API dialect, with `schema` and `routes`; some have a `history` and more."""
