"""Connections, bodies, server-sent events and the life of a server process."""
