"""Each API dialect has a folder with `schema` and `routes`, and some folders have `history`."""
