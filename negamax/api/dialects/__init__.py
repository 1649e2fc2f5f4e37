"""One folder per API dialect: `schema`, `routes`, and where it needs them `history` and others."""
