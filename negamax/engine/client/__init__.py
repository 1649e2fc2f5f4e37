"""The server process's side of the engine: its client, connection and supervisor."""
