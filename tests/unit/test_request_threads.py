import threading
from concurrent.futures import Future
from functools import partial

from negamax.api.http.request_threads import RequestThreads

SECONDS = 60.0


def test_senders_take_turns_and_large_work_leaves_a_thread_for_small() -> None:
    threads = RequestThreads(num_threads=2, num_large=1)
    order: list[str] = []
    has_begun, may_end = threading.Event(), threading.Event()

    def block() -> None:
        has_begun.set()
        assert may_end.wait(SECONDS)

    def submit(name: str, num_bytes: int) -> "Future[None]":
        return threads.submit(partial(order.append, name), name[0], num_bytes=num_bytes)

    first = threads.submit(block, "a", num_bytes=2**22)
    large = [submit("a1", 2**22), submit("a2", 2**22), submit("a smaller", 2**20)]
    large += [submit("b1", 2**22)]
    assert submit("c", 2**22).cancel() and has_begun.wait(SECONDS)
    submit("a small", 2**10).result(SECONDS)
    may_end.set()
    for work in (first, *large):
        work.result(SECONDS)
    assert order == ["a small", "b1", "a smaller", "a1", "a2"]


def test_a_sender_leaves_a_thread_for_large_work_of_others() -> None:
    threads, may_end = RequestThreads(num_threads=3, num_large=2), threading.Event()
    wait = partial(may_end.wait, SECONDS)
    held = [threads.submit(wait, "a", num_bytes=2**22) for _ in range(2)]
    assert threads.submit(dict, "b", num_bytes=2**22).result(SECONDS) == {}
    may_end.set()
    assert all(one.result(SECONDS) for one in held)
