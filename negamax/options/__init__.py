"""Options of engine and server. Flags, environment variables, TOML and Python share their names."""
