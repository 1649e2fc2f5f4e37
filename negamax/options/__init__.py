"""Options of the engine and the server, the same in flags, environment, TOML and Python."""
