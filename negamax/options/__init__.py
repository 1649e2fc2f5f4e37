"""Options of engine and server, each with one name in flags, environment, TOML and Python."""
