"""Whether the server takes requests: what is open, the way from SIGTERM to the end, and the beat of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

from negamax.base.errors import UnavailableError
from negamax.base.log import get_logger

logger = get_logger(__name__)

_POLL_SECONDS = 0.05
_PULSE_SECONDS = 0.5


class Lifecycle:
    """The server's state, shared by its parts. Single writer: the event loop."""

    def __init__(self, *, drain_timeout: float) -> None:
        self.is_draining = False
        self.num_open = 0  # requests that are being answered, also in the background; probes do not count
        self.loop_lag = 0.0  # seconds that the event loop was late at the last pulse
        self._drain_timeout = drain_timeout
        self._drain_end = 0.0  # monotonic

    def check_accepting(self) -> None:
        """Refuse while the server stops: `UnavailableError`."""
        if self.is_draining:
            wait = max(1.0, self._drain_end - time.monotonic())
            raise UnavailableError("the server is stopping", hint="ask another one", code="draining", retry_after=wait)

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start `work`, which counts as an open request from now until it ends."""
        self.num_open += 1
        task = asyncio.create_task(work)
        task.add_done_callback(self._background_ended)
        return task

    def begin_drain(self) -> None:
        """From now on requests are refused."""
        if not self.is_draining:
            self.is_draining = True
            self._drain_end = time.monotonic() + self._drain_timeout

    async def drained(self, *, is_idle: Callable[[], bool]) -> bool:
        """Wait until nothing is open and `is_idle`; False: the drain timeout came first."""
        while self.num_open or not is_idle():
            if time.monotonic() >= self._drain_end:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True

    async def pulse(self) -> None:
        """Measure how late the event loop is, twice a second, until cancelled."""
        while True:
            due = time.monotonic() + _PULSE_SECONDS
            await asyncio.sleep(_PULSE_SECONDS)
            self.loop_lag = max(0.0, time.monotonic() - due)

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        self.num_open -= 1


class Signals:
    """SIGINT and SIGTERM: the first one stops starting, or drains; the second one ends at once, the third without a word.

    Single writer: the event loop.
    """

    def __init__(self) -> None:
        self._main = asyncio.current_task()
        self._drain: Callable[[], None] | None = None
        self._abort: Callable[[], Awaitable[None]] | None = None
        self._aborting: asyncio.Future[None] | None = None
        self._count = 0

    @contextlib.contextmanager
    def watched(self) -> Generator[None, None, None]:
        """Handle the signals while inside."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._received)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def hand_over(self, *, drain: Callable[[], None], abort: Callable[[], Awaitable[None]]) -> None:
        """From now on the first signal calls `drain`, the second one `abort`."""
        self._drain, self._abort = drain, abort

    def _received(self) -> None:
        self._count += 1
        if self._count > 2:
            os._exit(1)  # asked three times: something hangs
        if self._drain is None or self._abort is None:
            assert self._main is not None
            self._main.cancel()
        elif self._count == 1:
            logger.info("draining: open requests are answered, new ones refused; a second signal ends at once")
            self._drain()
        else:
            self._aborting = asyncio.ensure_future(self._abort())
