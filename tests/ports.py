"""Ports for tests that must know one before it is used."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """A port that nobody gets by chance before it is used: the system gives higher ones to those
    that ask for none, and to connections.
    """
    while True:
        port = random.randrange(12_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
