"""Every option of the engine and the server. Flags, environment variables, TOML and Python share
its name. These modules read no environment."""
