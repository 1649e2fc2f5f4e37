"""Stream to a client during an attack, to show how long the attack stalls the server.

Time in which a runnable process had no core does not count. Each attack is tried several times,
because a real effect occurs each time.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tests.e2e.conftest import Server, eventually
from tests.e2e.listening import process_tree
from tests.speed import slowness

T = TypeVar("T")
_TRIES = 6
_SHORT = 0.05  # seconds; gaps that are shorter are not examined


class BusyMachine:
    """Count the time for which a server and its client wait for a core.

    Only one thread may use the object.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._waited: dict[Path, int] = {}  # thread -> nanoseconds waited, also by ended threads

    def seconds(self) -> float:
        for pid in (os.getpid(), *process_tree(self._server.process.pid)):
            for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):  # The thread has ended.
                    self._waited[path] = int(path.read_text().split()[1])
        return sum(self._waited.values()) / 1e9


def unnoticed(
    server: Server,
    attack: Callable[[], T],
    *,
    gap: float,
    seconds: float = math.inf,
    client: Callable[[], httpx.Client] | None = None,
    **fields: Any,
) -> T:
    """Return `attack`'s result when a try neither stalls a client nor exceeds its time.

    `gap` limits the time between two events of a client with `fields`. `seconds` limits the
    attack's time on a core of 2025.
    """
    tries = []
    for _ in range(_TRIES):
        with ConcurrentClient(server, client=client, **fields) as other:
            machine = BusyMachine(server)
            started = time.monotonic() - machine.seconds()
            returned = attack()
            spent = time.monotonic() - machine.seconds() - started
        assert other.errors == []
        tries.append((other.longest_gap, spent))
        slower = slowness()
        if other.longest_gap < gap * slower and spent < seconds * slower:
            return returned
    raise AssertionError(f"gap of a concurrent client and duration, in seconds: {tries}")


class ConcurrentClient:
    """Stream endless text of a chat in a thread while a `with` block runs."""

    def __init__(
        self, server: Server, *, client: Callable[[], httpx.Client] | None = None, **fields: Any
    ) -> None:
        """`client` opens the connection (default: a direct one). `fields` extend the requests."""
        self._fields = fields
        self._server = server
        self._client = client or server.http
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._num_events = 0
        self._last = 0.0  # `time.monotonic` of the last event
        # waiting time of the machine, measured at most `_SHORT` before the last event
        self._busy = self._looked = 0.0
        self.longest_gap = 0.0  # seconds between two events
        self.errors: list[str] = []

    def __enter__(self) -> ConcurrentClient:
        self._machine = BusyMachine(self._server)
        self._thread.start()
        assert eventually(lambda: self._num_events >= 3), self.errors
        self.longest_gap = 0.0  # The time before the first event does not count as a gap.
        return self

    def _arrived(self) -> None:
        now = time.monotonic()
        gap = now - self._last
        if now - self._looked > _SHORT:
            before, self._busy, self._looked = self._busy, self._machine.seconds(), now
            gap -= self._busy - before
        if self._num_events:
            self.longest_gap = max(self.longest_gap, gap)
        self._last = now
        self._num_events += 1

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(120)

    def _run(self) -> None:
        question = {"role": "user", "content": "Tell me something."}
        body: dict[str, Any] = {"model": "nano", "messages": [question], "stream": True}
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        body |= {"max_tokens": 2000, "ignore_eos": True, **self._fields}
        with self._client() as client:
            while not self._stop.is_set():
                try:
                    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                        if answer.status_code != 200:
                            self.errors.append(f"HTTP {answer.status_code}")
                            return
                        for line in answer.iter_lines():
                            if line.startswith("data:"):
                                self._arrived()
                            if self._stop.is_set():
                                return
                except httpx.HTTPError as error:
                    self.errors.append(repr(error))
                    return
