import threading
from functools import partial

from negamax.api.http.request_threads import RequestThreads

SECONDS = 60.0
MiB = 2**20


def test_senders_and_sizes_take_turns_and_leave_threads_to_others() -> None:
    threads, may_end = RequestThreads(num_threads=3, num_large=2), threading.Event()
    order: list[str] = []
    block = partial(may_end.wait, SECONDS)
    sizes = {"a1": 4 * MiB, "a2": 4 * MiB, "a smaller": MiB, "b": 4 * MiB, "small": MiB // 16}
    first = threads.submit(block, "a", num_bytes=4 * MiB)
    begun = {
        name: threads.submit(partial(order.append, name), name[0], num_bytes=size)
        for name, size in sizes.items()
    }
    for name in ("b", "small"):  # Both run while the first task still blocks.
        begun[name].result(SECONDS)
    assert set(order) == {"b", "small"}
    assert threads.submit(partial(order.append, "no"), "a", num_bytes=MiB).cancel()
    may_end.set()
    assert first.result(SECONDS)
    for one in begun.values():
        one.result(SECONDS)
    assert order[2:] == ["a smaller", "a1", "a2"]
