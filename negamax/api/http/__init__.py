"""HTTP connections, request bodies, server-sent events, and the lifecycle of a server process."""
