import contextlib
import random
import socket


def free_port() -> int:
    """Return a free port below the range from which the system assigns ports."""
    while True:
        port = random.randrange(12_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
