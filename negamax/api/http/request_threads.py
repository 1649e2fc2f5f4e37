"""Threads for work on requests that takes long, which senders and sizes share by turns."""

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

# the tenant whose request the current task handles; "" where there is only one
SENDER = ContextVar("sender", default="")
# each takes turns with the event loop in holding Python's lock, or waits for a child of `Confined`
_NUM_THREADS = max(4, min(8, os.cpu_count() or 1))
_NUM_LARGE = _NUM_THREADS // 2  # of these threads, for large work
_LARGE_BYTES = 128 * 1024
INLINE_BYTES = 8192  # larger work is done in a thread

T = TypeVar("T")


async def run_off_loop(
    work: Callable[[], T], *, num_bytes: int, inline_bytes: int = INLINE_BYTES
) -> T:
    """Run `work` on about `num_bytes` of a request, in a thread above `inline_bytes`."""
    if num_bytes <= inline_bytes:
        return work()
    return await asyncio.wrap_future(_THREADS.submit(work, SENDER.get(), num_bytes=num_bytes))


@dataclass(slots=True, eq=False)
class _Turns:
    """Seconds that work of a sender, or of one of its sizes, took. Idle time earns no turns."""

    seconds: float = 0.0
    latest: float = 0.0  # the seconds of the part of it that began last
    num_waiting: int = 0
    num_running_large: int = 0

    def begin_waiting(self, least_seconds: float) -> None:
        if not self.num_waiting:
            self.seconds = max(self.seconds, least_seconds)
        self.num_waiting += 1


@dataclass(slots=True, eq=False)
class _Queue:
    """The waiting work of one sender and size. Guarded by the lock of its `RequestThreads`."""

    sender: _Turns
    size: _Turns
    is_large: bool
    most_running: int  # of the sender's large work
    waiting: deque[tuple[Future[Any], Callable[[], Any]]] = field(default_factory=deque)


class RequestThreads:
    """Runs work in threads. Next is the sender, and of its sizes the one, that took the least time.

    Large work leaves threads for small work, and that of a named sender one for large work of
    others. Threads may share it.
    """

    def __init__(self, *, num_threads: int = _NUM_THREADS, num_large: int = _NUM_LARGE) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="request")
        self._lock = threading.Lock()
        self._num_free = num_threads
        self._num_large = num_large
        self._num_running_large = 0
        self._all = _Turns()
        self._senders: dict[str, _Turns] = {}  # as many as there are keys
        self._queues: dict[tuple[str, int], _Queue] = {}
        self._waiting: list[_Queue] = []  # those that are not empty

    def submit(self, work: Callable[[], T], sender: str, *, num_bytes: int) -> "Future[T]":
        """Run `work` when it is the turn of `sender`, unless the future is cancelled before."""
        future: Future[T] = Future()
        is_large = num_bytes > _LARGE_BYTES
        size = num_bytes.bit_length() if is_large else 0
        most = max(1, self._num_large - bool(sender))
        with self._lock:
            turns = self._senders.setdefault(sender, _Turns())
            queue = self._queues.setdefault((sender, size), _Queue(turns, _Turns(), is_large, most))
            turns.begin_waiting(self._all.latest)
            queue.size.begin_waiting(turns.latest)
            if not queue.waiting:
                self._waiting.append(queue)
            queue.waiting.append((future, work))
            self._begin()
        return future

    def _begin(self) -> None:
        """Begin with what waits and finds a free thread. The caller holds the lock."""
        while self._num_free:
            ready = [queue for queue in self._waiting if self._may_begin(queue)]
            if not ready:
                return
            queue = min(ready, key=lambda queue: (queue.sender.seconds, queue.size.seconds))
            sender, size = queue.sender, queue.size
            self._all.latest = max(self._all.latest, sender.seconds)
            sender.latest = max(sender.latest, size.seconds)
            sender.num_waiting -= 1
            size.num_waiting -= 1
            self._num_free -= 1
            self._count_large(queue, 1)
            self._threads.submit(self._run, queue, *queue.waiting.popleft())
            if not queue.waiting:
                self._waiting.remove(queue)

    def _may_begin(self, queue: _Queue) -> bool:
        return not queue.is_large or (
            self._num_running_large < self._num_large
            and queue.sender.num_running_large < queue.most_running
        )

    def _count_large(self, queue: _Queue, change: int) -> None:
        if queue.is_large:
            self._num_running_large += change
            queue.sender.num_running_large += change

    def _run(self, queue: _Queue, future: "Future[Any]", work: Callable[[], Any]) -> None:
        start = time.monotonic()
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        finally:
            del future, work  # a cycle with the error would keep the request
            self._end(queue, time.monotonic() - start)

    def _end(self, queue: _Queue, seconds: float) -> None:
        with self._lock:
            queue.sender.seconds += seconds
            queue.size.seconds += seconds
            self._num_free += 1
            self._count_large(queue, -1)
            self._begin()


_THREADS = RequestThreads()
