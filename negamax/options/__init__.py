"""Options of the engine and the server, with equal names in flags, variables, TOML and Python."""
