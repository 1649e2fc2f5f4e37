"""Run long work on requests in threads, which share their time among senders and size classes."""

import asyncio
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

# The tenant whose request the current task handles; "" if there is only one tenant.
SENDER = ContextVar("sender", default="")
# A few threads are enough: they share the GIL, or wait for child processes (`Confined`).
_NUM_THREADS = max(4, min(8, os.cpu_count() or 1))
_NUM_LARGE = _NUM_THREADS // 2  # Maximum number of threads that run large work at once.
_SIZES = (128 * 1024, 2**20)  # Limits in bytes above which work is large, or very large.
INLINE_BYTES = 8192  # Larger work runs in a thread.

T = TypeVar("T")


async def run_off_loop(
    work: Callable[[], T], *, num_bytes: int, inline_bytes: int = INLINE_BYTES
) -> T:
    """Run `work`, in a thread if it processes more than `inline_bytes` bytes of a request."""
    if num_bytes <= inline_bytes:
        return work()
    return await asyncio.wrap_future(_THREADS.submit(work, SENDER.get(), num_bytes=num_bytes))


@dataclass(slots=True, eq=False)
class _Flow:
    """The waiting work of one sender and size class, and the seconds that such work has taken."""

    sender: str
    size: int  # Size class: 0 is small, 1 large, 2 very large.
    seconds: float = 0.0
    waiting: deque[tuple[Future[Any], Callable[[], Any]]] = field(default_factory=deque)


class RequestThreads:
    """Runs work in threads, first for the sender and size class that used the least time.

    Large work leaves threads free for small work. Large work of one tenant leaves a thread free for
    large work of other senders. Any thread may call `submit`.
    """

    def __init__(self, *, num_threads: int = _NUM_THREADS, num_large: int = _NUM_LARGE) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="request")
        self._lock = threading.Lock()
        self._num_free = num_threads
        self._num_large = num_large
        self._large = Counter[str]()  # sender -> number of the sender's large tasks in progress
        self._flows: dict[tuple[str, int], _Flow] = {}  # (sender, size class) -> flow
        self._waiting: list[_Flow] = []  # Flows with waiting work.
        self._latest = 0.0  # largest `_Flow.seconds` at the start of any work so far

    def submit(self, work: Callable[[], T], sender: str, *, num_bytes: int) -> "Future[T]":
        """Queue `work` of `sender`, and return its future. Cancelled work is not run."""
        future: Future[T] = Future()
        key = sender, sum(num_bytes > limit for limit in _SIZES)
        with self._lock:
            flow = self._flows.setdefault(key, _Flow(*key))
            if not flow.waiting:
                flow.seconds = max(flow.seconds, self._latest)  # An idle flow gains no priority.
                self._waiting.append(flow)
            flow.waiting.append((future, work))
            self._begin()
        return future

    def _begin(self) -> None:
        """Start waiting work while threads are free. The caller holds the lock."""
        while self._num_free and (ready := [*filter(self._may_begin, self._waiting)]):
            flow = min(ready, key=lambda flow: flow.seconds)
            self._latest = max(self._latest, flow.seconds)
            self._num_free -= 1
            self._large[flow.sender] += flow.size > 0
            self._threads.submit(self._run, flow, *flow.waiting.popleft())
            if not flow.waiting:
                self._waiting.remove(flow)

    def _may_begin(self, flow: _Flow) -> bool:
        most = max(1, self._num_large - bool(flow.sender))
        is_full = self._large.total() >= self._num_large or self._large[flow.sender] >= most
        return flow.size == 0 or not is_full

    def _run(self, flow: _Flow, future: "Future[Any]", work: Callable[[], Any]) -> None:
        start = time.monotonic()
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        del future, work  # A reference cycle through the error would keep the request in memory.
        with self._lock:
            flow.seconds += time.monotonic() - start
            self._num_free += 1
            self._large[flow.sender] -= flow.size > 0
            self._begin()


_THREADS = RequestThreads()
