"""A thread pool that replaces threads stuck in a task."""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue


class FairThreads:
    """Runs tasks in order; slow ones delay no others. Single writer: the submitting thread."""

    def __init__(self, size: int, *, patience: float, most: int, name: str) -> None:
        """Replace a thread that runs a task for `patience` seconds, up to `most` threads."""
        self._size = size
        self._patience = patience
        self._most = most
        self._name = name
        self._tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._started: dict[int, float] = {}  # monotonic seconds, by busy thread
        self._num_threads = 0
        self._lock = threading.Lock()
        for _ in range(size):
            self._start_thread()

    def submit(self, task: Callable[[], None]) -> None:
        """Run `task`, which must not raise, in one of the threads."""
        self._tasks.put(task)

    def tend(self) -> None:
        """Replace stuck threads if tasks wait. Call it repeatedly while there is work."""
        if self._tasks.empty():
            return
        now = time.monotonic()
        num_stuck = sum(now - started > self._patience for started in list(self._started.values()))
        while self._num_threads - num_stuck < self._size and self._num_threads < self._most:
            self._start_thread()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        thread.start()
        with self._lock:
            self._num_threads += 1

    def _work(self) -> None:
        thread_id = threading.get_ident()
        while True:
            task = self._tasks.get()
            started = self._started[thread_id] = time.monotonic()
            task()
            del self._started[thread_id]
            if time.monotonic() - started > self._patience:
                with self._lock:
                    if self._num_threads > self._size:  # it has been replaced
                        self._num_threads -= 1
                        return
