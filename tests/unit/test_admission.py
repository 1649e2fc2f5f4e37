import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from negamax.base.errors import InvalidRequestError, OverloadedError
from negamax.base.shared_numbers import SharedNumbers
from negamax.engine.client.admission import NUM_COLUMNS, Admission


def admission(
    *, running: int = 2, waiting: int = 3, tokens: int | None = 1000, **shared: Any
) -> Admission:
    sizes = {"max_running": running, "max_waiting": waiting, "max_waiting_tokens": tokens}
    return Admission(**sizes, pool_tokens=100, **shared)


def fill(queue: Admission, count: int, *, tokens: int = 10) -> None:
    for index in range(count):
        queue.check(1, tokens, now=0.0)
        queue.enter(f"s{index}", tokens)


def test_a_full_batch_and_queue_refuse_the_next_request() -> None:
    queue = admission()
    fill(queue, 5)
    with pytest.raises(OverloadedError) as refused:
        queue.check(1, 10, now=0.0)
    assert refused.value.code == "queue_full"
    queue.leave("s3", now=1.0)
    queue.check(1, 10, now=1.0)
    with pytest.raises(InvalidRequestError):
        admission().check(6, 10, now=0.0)


def test_tokens_count_only_while_they_wait() -> None:
    queue = admission(tokens=100)
    fill(queue, 2, tokens=50)
    with pytest.raises(OverloadedError) as refused:
        queue.check(1, 1, now=0.0)
    assert refused.value.code == "queue_tokens_full"
    queue.start("s0")
    queue.check(1, 50, now=0.0)
    assert queue.waiting_tokens == 50
    queue = admission(tokens=100)
    queue.check(1, 5000, now=0.0)
    queue.enter("long", 5000)
    with pytest.raises(OverloadedError):
        queue.check(1, 1, now=0.0)
    queue.start("long")
    queue.check(1, 5000, now=0.0)
    queue = admission(tokens=None)
    fill(queue, 2, tokens=200)
    with pytest.raises(OverloadedError):
        queue.check(1, 1, now=0.0)


def test_retry_after_is_the_time_the_queue_takes() -> None:
    queue = admission(running=2, waiting=1000, tokens=10**6)
    assert queue.retry_after(0.0) == 1.0  # The queue has measured no rate yet.
    for second in range(100):  # Two requests end per second.
        for part in "ab":
            queue.enter(f"{second}{part}", 1)
            queue.start(f"{second}{part}")
            queue.leave(f"{second}{part}", now=float(second))
    for index in range(60):
        queue.enter(f"w{index}", 1)
    assert 25 < queue.retry_after(99.0) < 35
    # No request has ended for an hour, so the answer is the largest delay, two minutes.
    assert queue.retry_after(99.0 + 3600) == 120.0
    queue = admission(waiting=100)
    for index in range(50):
        queue.enter(f"s{index}", 1)
        queue.leave(f"s{index}", now=1.0)
    queue.enter("waits", 1)
    assert queue.retry_after(1.0) == 1.0


ACTIONS = st.sampled_from(("enter", "start", "leave"))


@given(st.lists(st.tuples(ACTIONS, st.integers(0, 8), st.integers(1, 50)), max_size=80))
def test_counts_are_zero_when_all_have_left(steps: list[tuple[str, int, int]]) -> None:
    queue = admission()
    open_ids: set[str] = set()
    for action, number, tokens in steps:
        name = f"s{number}"
        if action == "enter" and name not in open_ids:
            queue.enter(name, tokens)
            open_ids.add(name)
        elif action == "start":
            queue.start(name)
        elif action == "leave":
            queue.leave(name, now=0.0)
            open_ids.discard(name)
        assert queue.num_open == len(open_ids)
    for name in open_ids:
        queue.leave(name, now=0.0)
    assert (queue.num_open, queue.num_waiting, queue.waiting_tokens) == (0, 0, 0)


def test_server_processes_share_one_queue() -> None:
    numbers = SharedNumbers(NUM_COLUMNS, num_rows=2)
    mine, theirs = (admission(tokens=100, numbers=numbers, index=index) for index in range(2))
    fill(mine, 2, tokens=10)
    for index in range(3):
        theirs.check(1, 20, now=0.0)
        theirs.enter(f"s{index}", 20)  # These ids belong to another process.
    assert (mine.num_open, theirs.num_open) == (5, 5)
    assert mine.waiting_tokens == 80
    with pytest.raises(OverloadedError, match="5 sequences"):
        mine.check(1, 1, now=0.0)
    theirs.start("s0")
    theirs.leave("s0", now=1.0)
    mine.check(1, 10, now=1.0)
    with pytest.raises(OverloadedError, match="60 prompt tokens"):
        mine.check(1, 41, now=1.0)
    numbers.clear(1)  # The other process has ended.
    assert (mine.num_open, mine.waiting_tokens) == (2, 20)
    mine.check(1, 41, now=1.0)


_numbers = itertools.count()


def fill_as(queue: Admission, tenant: str, count: int, *, tokens: int = 1) -> int:
    for taken in range(count):
        try:
            queue.check(1, tokens, now=0.0, sharer=tenant)
        except OverloadedError as refused:
            assert refused.code in ("queue_full", "queue_share_full")
            assert refused.retry_after is not None and refused.retry_after >= 1
            return taken
        queue.enter(f"{tenant}{next(_numbers)}", tokens, tenant=tenant)
    return count


def test_each_tenant_leaves_as_much_of_the_queue_free_as_it_holds() -> None:
    queue = admission(running=2, waiting=12, tokens=10**6)
    fill(queue, 2)
    queue.start("s0")
    queue.start("s1")
    assert fill_as(queue, "anna", 20) == 6
    assert fill_as(queue, "bert", 20) == 3
    assert fill_as(queue, "carl", 20) == 2
    with pytest.raises(OverloadedError) as refused:
        queue.check(1, 1, now=0.0, sharer="anna")
    assert refused.value.code == "queue_share_full"
    queue.check(1, 1, now=0.0)  # A tenant that is alone may use the rest of the queue.
    assert fill_as(queue, "dora", 20) == 1
    queue = admission(running=8, waiting=2, tokens=10**6)
    queue.check(9, 9, now=0.0, sharer="anna")
    with pytest.raises(InvalidRequestError, match="allowed: 9"):
        queue.check(10, 10, now=0.0, sharer="anna")
    assert fill_as(queue, "anna", 20) == 9
    assert fill_as(queue, "bert", 20) == 1
    queue = admission(running=2, waiting=100, tokens=100)
    assert fill_as(queue, "anna", 20, tokens=10) == 5
    assert fill_as(queue, "bert", 20, tokens=10) == 2
    queue.check(1, 30, now=0.0, sharer="carl")


@given(st.integers(1, 8), st.integers(2, 40), st.lists(st.integers(1, 12), min_size=1, max_size=30))
def test_one_tenant_never_fills_the_queue(running: int, waiting: int, sizes: list[int]) -> None:
    queue = admission(running=running, waiting=waiting, tokens=10**6)
    for number, size in enumerate(sizes):
        try:
            queue.check(size, size, now=0.0, sharer="anna")
        except (OverloadedError, InvalidRequestError):
            continue
        for choice in range(size):
            queue.enter(f"{number}/{choice}", 1, tenant="anna")
    queue.check(1, 1, now=0.0, sharer="bert")


def test_tenants_have_one_share_over_all_processes() -> None:
    numbers = SharedNumbers(NUM_COLUMNS, num_rows=2)
    sizes = {"running": 1, "waiting": 8, "tokens": 100}
    one, other = (admission(**sizes, numbers=numbers, index=index) for index in range(2))
    assert fill_as(one, "anna", 3) == 3
    assert fill_as(other, "anna", 20) == 2  # One of anna's five requests is about to run.
    numbers.clear(0)
    assert fill_as(other, "anna", 20) == 3
