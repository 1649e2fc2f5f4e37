"""An innocent client beside an attack: a stream that shows how long the server stood still for
others.
"""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from types import TracebackType
from typing import Any

import httpx

from tests.e2e.conftest import Server


class Neighbour:
    """Streams a chat while a `with` block runs. Single writer: its thread.

    It asks for endless text again and again, so there is always a next token to wait for.
    """

    def __init__(self, server: Server, **fields: Any) -> None:
        """`fields` of its requests beside the usual ones."""
        self._fields = fields
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.arrivals: list[float] = []  # `time.monotonic` of every event
        self.errors: list[str] = []

    @property
    def longest_gap(self) -> float:
        """Seconds between two events, at most."""
        return max((later - earlier for earlier, later in pairwise(self.arrivals)), default=0.0)

    def __enter__(self) -> Neighbour:
        self._thread.start()
        deadline = time.monotonic() + 30
        while len(self.arrivals) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(self.arrivals) >= 3, self.errors
        self.arrivals[:] = [time.monotonic()]  # what the start took is no gap
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.arrivals.append(time.monotonic())  # a gap that is still open counts
        self._stop.set()
        self._thread.join(30)

    def _run(self) -> None:
        question = {"role": "user", "content": "Tell me something."}
        body = {
            "model": "nano",
            "messages": [question],
            "stream": True,
            "max_tokens": 2000,
            "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **self._fields,
        }
        with self._server.http() as client:
            while not self._stop.is_set():
                try:
                    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                        if answer.status_code != 200:
                            self.errors.append(f"HTTP {answer.status_code}")
                            return
                        for line in answer.iter_lines():
                            if self._stop.is_set():
                                return
                            if line.startswith("data:"):
                                self.arrivals.append(time.monotonic())
                except httpx.HTTPError as error:
                    self.errors.append(repr(error))
                    return
