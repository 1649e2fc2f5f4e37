"""The engine: its step loop, its processes, and the clients that send requests to it."""
