"""Track a server process: open requests, draining, signals and the event loop's heartbeat."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

from negamax.base.errors import UnavailableError
from negamax.base.log import get_logger
from negamax.base.shared_numbers import SharedNumbers

logger = get_logger(__name__)

_POLL_SECONDS = 0.05
_PULSE_SECONDS = 0.25
_SILENT_SECONDS = 0.75  # If process 0's heartbeat is older, other server processes are not ready.


class Lifecycle:
    """The state of a server process. Only the event loop changes this object.

    This process's row of `numbers` begins with the number of open requests and the event loop lag.
    """

    NUM_COLUMNS = 2
    _OPEN, _LAG = range(NUM_COLUMNS)

    def __init__(
        self,
        *,
        drain_timeout: float,
        numbers: SharedNumbers | None = None,
        pulses: SharedNumbers | None = None,
        index: int = 0,
    ) -> None:
        """This process writes row `index` of `numbers` and of `pulses`."""
        self.is_draining = False
        self._numbers = numbers or SharedNumbers(self.NUM_COLUMNS)
        self._row = self._numbers.row(index)
        self._pulses = pulses or SharedNumbers(1)
        self._index = index
        self._drain_timeout = drain_timeout
        self._drain_end = 0.0  # monotonic time at which draining must end

    @property
    def num_open(self) -> int:
        """Number of open requests of this process, including background work but not probes."""
        return int(self._row[self._OPEN])

    @property
    def total_open(self) -> int:
        return int(self._numbers.total(self._OPEN))

    @property
    def worst_lag(self) -> float:
        """The largest event loop lag in seconds that any process measured at its last heartbeat."""
        return max(self._numbers.row(index)[self._LAG] for index in range(self._numbers.num_rows))

    def opened(self) -> None:
        self._row[self._OPEN] += 1

    def closed(self) -> None:
        self._row[self._OPEN] -= 1

    def check_accepting(self) -> None:
        """Raise `UnavailableError` while the server is stopping."""
        if self.is_draining:
            wait = max(1.0, self._drain_end - time.monotonic())
            raise UnavailableError(
                "the server is stopping", hint="use another one", code="draining", retry_after=wait
            )

    def check_leader(self) -> None:
        """Raise `UnavailableError` while the first process has no heartbeat."""
        pulse = self._pulses.row(0)[0]
        if self._index and pulse and time.monotonic() - pulse > _SILENT_SECONDS:
            message = "the first server process sends no heartbeat"
            raise UnavailableError(message, code="server_process_silent", retry_after=1.0)

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start `work`, which counts as an open request until it ends."""
        self.opened()
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self.closed())
        return task

    def begin_drain(self) -> None:
        if not self.is_draining:
            self.is_draining = True
            self._drain_end = time.monotonic() + self._drain_timeout

    async def drained(self, *, is_idle: Callable[[], bool]) -> bool:
        """Wait until `is_idle()` is true and no request is open. Return False at the timeout."""
        while self.num_open or not is_idle():
            if time.monotonic() >= self._drain_end:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True

    def start_pulse(self) -> asyncio.Task[None]:
        """Write the heartbeat and the lag of the event loop four times a second until cancelled.

        The first heartbeat is written at once, so that watchers notice a loop that never runs.
        """
        pulse = self._pulses.row(self._index)
        pulse[0] = time.monotonic()

        async def show() -> None:
            while True:
                pulse[0] = now = time.monotonic()
                await asyncio.sleep(_PULSE_SECONDS)
                self._row[self._LAG] = max(0.0, time.monotonic() - now - _PULSE_SECONDS)

        return asyncio.create_task(show())


class Signals:
    """Handles SIGINT, SIGTERM and SIGHUP. Only the event loop changes this object.

    The first SIGINT or SIGTERM cancels the start or drains the server. The second signal aborts
    requests, and the third signal ends the process at once. SIGHUP reloads the key and TLS files.
    After the process has lost its terminal, SIGHUP acts like SIGTERM.
    """

    def __init__(self) -> None:
        self._main = asyncio.current_task()
        self._drain: Callable[[], None] | None = None
        self._abort: Callable[[], Awaitable[None]] | None = None
        self._reload: Callable[[], None] | None = None
        self._aborting: asyncio.Future[None] | None = None
        self._count = 0
        # `_needs_terminal` is False under nohup, because nohup ignores SIGHUP.
        self._needs_terminal = (
            signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()
        )

    @contextlib.contextmanager
    def watched(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._received)
        loop.add_signal_handler(signal.SIGHUP, self._hung_up)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def hand_over(
        self,
        *,
        drain: Callable[[], None],
        abort: Callable[[], Awaitable[None]],
        reload: Callable[[], None],
    ) -> None:
        """Call `drain` at the first signal, `abort` at the second, and `reload` at SIGHUP."""
        self._drain, self._abort, self._reload = drain, abort, reload

    def _hung_up(self) -> None:
        if self._needs_terminal and not _has_terminal():
            self._received()
        elif self._reload is not None:
            self._reload()

    def _received(self) -> None:
        self._count += 1
        if self._count > 2:
            os._exit(1)  # After the third signal, exit at once, because shutdown may hang.
        if self._drain is None or self._abort is None:
            assert self._main is not None
            self._main.cancel()
        elif self._count == 1:
            logger.info(
                "draining: open requests are answered, and new requests are refused; a second "
                "signal ends the server at once"
            )
            self._drain()
        else:
            self._aborting = asyncio.ensure_future(self._abort())


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
