"""Open the PyTorch store through which the ranks of one engine connect at start."""

import socket
import time
from datetime import timedelta

import torch.distributed as dist

from negamax.base.addresses import bind
from negamax.parallel.layout import ParallelLayout

_BACKLOG = 1024  # Maximum number of pending connections. Each rank opens several connections.
_POLL_SECONDS = 0.05


def open_store(rendezvous: str, layout: ParallelLayout, *, timeout_s: float) -> dist.Store:
    """Open a new store at `rendezvous`, which is a file or `tcp://ADDRESS:PORT`. Rank 0 listens
    only on ADDRESS, whereas a socket that PyTorch creates would listen on all addresses. Raises
    `OSError` on failure or after `timeout_s`.
    """
    if not rendezvous.startswith("tcp://"):
        return dist.FileStore(rendezvous, layout.world_size)
    address, _, port = rendezvous.removeprefix("tcp://").rpartition(":")
    host, is_master = address.strip("[]"), layout.rank == 0
    listener = _listen(host, int(port)) if is_master else None
    if listener is None:
        _wait_for(host, int(port), timeout_s)
    return dist.TCPStore(
        host,
        int(port),
        layout.world_size,
        is_master,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _listen(host: str, port: int) -> socket.socket:
    listener = bind(socket.AF_INET6 if ":" in host else socket.AF_INET, (host, port))
    listener.listen(_BACKLOG)
    return listener


def _wait_for(host: str, port: int, timeout_s: float) -> None:
    """Poll until rank 0 listens, because PyTorch's client would log each failed attempt."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_SECONDS)
