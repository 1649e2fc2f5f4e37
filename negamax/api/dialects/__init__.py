"""Each client API has a folder with `schema` and `routes`, and some folders have `history`."""
