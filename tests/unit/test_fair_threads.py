import threading
import time
from collections.abc import Callable

from negamax.engine.grammar.fair_threads import FairThreads


def tended(threads: FairThreads, check: Callable[[], bool], *, seconds: float = 120.0) -> bool:
    deadline = time.monotonic() + seconds
    while not check() and time.monotonic() < deadline:
        threads.tend()
        time.sleep(0.001)
    return check()


def test_a_stuck_thread_is_replaced_and_ends_after_its_task() -> None:
    threads = FairThreads(1, patience=0.05, most=3, name="test")
    release, done = threading.Event(), list[int]()
    threads.submit(lambda: done.append(-1) if release.wait(120) else None)
    for number in range(50):
        threads.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    assert tended(threads, lambda: len(done) == 50) and sorted(done) == list(range(50))
    release.set()
    assert tended(threads, lambda: done[-1] == -1 and threads._num_threads == 1)


def test_the_number_of_threads_is_bounded_and_waiting_tasks_run_later() -> None:
    threads = FairThreads(1, patience=0.0, most=3, name="test")
    release, done = threading.Event(), list[int]()
    for _ in range(3):
        threads.submit(lambda: done.append(0) if release.wait(120) else None)
    threads.submit(lambda: done.append(1))
    assert tended(threads, lambda: threads._num_threads == 3)
    assert not tended(threads, lambda: bool(done), seconds=0.1) and threads._num_threads == 3
    release.set()
    assert tended(threads, lambda: sorted(done) == [0, 0, 0, 1])
