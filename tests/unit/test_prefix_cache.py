from typing import Any

import pytest

from negamax.scheduler.blocks import BlockPool
from negamax.scheduler.prefix_cache import BlockHashes, match_prefix
from negamax.scheduler.step import SequenceUpdate, StepPlan
from tests.unit.plan_support import RankScheduler, list_admitted, make_result, make_scheduler


def chain(tokens: list[int], *, block_size: int = 2, salt: str = "") -> BlockHashes:
    return BlockHashes(tokens, block_size=block_size, salt=salt)


def filled_pool(num_blocks: int, hashes: list[bytes]) -> tuple[BlockPool, list[int]]:
    pool = BlockPool(num_blocks)
    block_ids = [pool.allocate() for _ in hashes]
    for block_id, block_hash in zip(block_ids, hashes, strict=True):
        pool.index(block_id, block_hash)
    return pool, block_ids


def test_blank_and_least_recently_released_blocks_are_taken_first() -> None:
    pool, cached = filled_pool(3, [b"a"])
    pool.release(cached)
    assert {pool.allocate(), pool.allocate()}.isdisjoint(cached)
    assert pool.find(b"a") == cached[0]
    assert pool.allocate() == cached[0]
    assert pool.find(b"a") is None and pool._block_hashes[cached[0]] is None
    pool, (old, new) = filled_pool(2, [b"old", b"new"])
    pool.release([old])
    pool.release([new])
    pool.share([old])  # The old block is used again, so that it is now the more recent one.
    pool.release([old])
    assert [pool.allocate(), pool.allocate()] == [new, old]
    pool, (first, second) = filled_pool(2, [b"same", b"same"])
    assert pool.find(b"same") == first and pool._block_hashes[second] is None
    pool.release([second])
    pool.release([first])
    assert [pool.allocate(), pool.allocate()] == [second, first]  # evict the useless copy first


def test_forgotten_blocks_are_blank_and_held_ones_stay_known() -> None:
    pool, (held, free) = filled_pool(3, [b"held", b"free"])
    pool.release([free])
    pool.evict()
    assert pool.find(b"free") is None and pool._block_hashes[free] is None
    assert pool.find(b"held") == held
    assert pool.num_free == 2
    again = [pool.allocate(), pool.allocate()]
    assert sorted(again) == sorted({0, 1, 2} - {held})
    pool.index(again[0], b"free")  # The same block hash may be indexed again.
    pool.release(again)
    assert pool.find(b"free") == again[0] and pool.num_free == 2


def test_hash_covers_the_salt_and_everything_before_the_block() -> None:
    assert chain([1, 2, 3, 4])[1] == chain([1, 2, 3, 4, 5, 6])[1]
    assert chain([1, 2, 3, 4])[1] != chain([9, 2, 3, 4])[1]
    assert chain([1, 2, 1, 2])[1] != chain([1, 2])[0]
    assert chain([1, 2])[0] != chain([2, 1])[0]
    assert chain([1, 2], salt="a")[0] == chain([1, 2], salt="a")[0]
    assert len({chain([1, 2], salt=salt)[0] for salt in ("", "a", "b", "\ud800")}) == 4
    names = chain([1, 2, 3, 4, 5, 6])
    pool, block_ids = filled_pool(3, [names[0], names[2]])
    assert match_prefix(pool, names, max_blocks=3) == block_ids[:1]
    assert match_prefix(pool, names, max_blocks=0) == []


# The tests below run the scheduler with block size 4.

PROMPT = list(range(10, 20))  # The prompt has two full blocks and two more tokens.


def admit_start(scheduler: RankScheduler, name: str, prompt: list[int], **fields: Any) -> int:
    """Run a request of one token. Return how many prompt tokens were cached."""
    scheduler.add(name, prompt, **{"max_tokens": 1, **fields})
    plan = scheduler.next_plan()
    (start,) = scheduler.starts[plan.step_id]
    scheduler.commit(plan)
    scheduler.run_all()
    return start


def test_same_prompt_takes_blocks_of_committed_steps_from_the_cache() -> None:
    scheduler = make_scheduler()
    assert admit_start(scheduler, "a", PROMPT) == 0
    scheduler.add("b", PROMPT)
    plan = scheduler.next_plan()
    assert (scheduler.starts[plan.step_id], plan.num_scheduled) == ([8], [2])
    (update,) = scheduler.commit(plan)
    assert update.num_cached_tokens == 8
    assert (scheduler.prompt_tokens, scheduler.cached_prompt_tokens) == (20, 8)
    scheduler = make_scheduler()
    scheduler.add("a", PROMPT, max_tokens=1)
    first = scheduler.next_plan()
    scheduler.add("b", PROMPT)
    second = scheduler.next_plan()
    assert scheduler.starts[second.step_id] == [0]
    scheduler.commit(first)
    scheduler.commit(second)
    scheduler = make_scheduler(max_num_batched_tokens=6)
    scheduler.add("a", PROMPT)
    first = scheduler.next_plan()
    assert first.num_scheduled == [6]
    scheduler.commit(first)
    scheduler.end("a", "abort")
    assert admit_start(scheduler, "b", PROMPT) == 4


@pytest.mark.parametrize(
    ("num_blocks", "requests"),
    [
        # Full blocks are cached, but the last token always runs.
        (64, [(PROMPT[:8], {}, 0), (PROMPT[:8], {}, 4), (PROMPT[:9], {}, 8)]),
        (64, [(PROMPT[:4], {}, 0), (PROMPT[:5], {}, 4)]),
        # Of 10 + 8 tokens the last one never runs, so 17 have KV cells.
        (64, [(PROMPT, {"max_tokens": 8}, 0), ([*PROMPT, *[7] * 8, 30], {}, 16)]),
        (
            64,
            [
                (PROMPT, {"cache_salt": "alice"}, 0),
                (PROMPT, {"cache_salt": "bob"}, 0),
                (PROMPT, {}, 0),
                (PROMPT, {"cache_salt": "alice"}, 8),
                (PROMPT, {"prompt_logprobs": 0}, 0),  # The whole prompt runs.
            ],
        ),
        # The second request evicts the last of four cached blocks.
        (4, [(list(range(10, 26)), {}, 0), (list(range(50, 58)), {}, 0),
             (list(range(10, 25)), {}, 8)]),
    ],
    ids=["full blocks", "one block", "generated tokens", "salts and logprobs", "evicted tail"],
)  # fmt: skip
def test_tokens_from_the_cache(num_blocks: int, requests: list[Any]) -> None:
    scheduler = make_scheduler(num_blocks=num_blocks)
    for number, (prompt, fields, cached) in enumerate(requests):
        assert admit_start(scheduler, f"r{number}", prompt, **fields) == cached
    scheduler = make_scheduler(enable_prefix_caching=False)
    assert [admit_start(scheduler, name, PROMPT) for name in "ab"] == [0, 0]


@pytest.mark.parametrize("how", ["fail", "error", "abort"])
def test_blocks_of_a_step_that_went_wrong_never_enter_the_cache(how: str) -> None:
    scheduler = make_scheduler()
    scheduler.add("a", PROMPT)
    plan = scheduler.next_plan()
    if how == "fail":
        scheduler.fail(plan, "lost")
    elif how == "error":
        scheduler.commit(plan, make_result(plan, errors={0: "bad row"}))
    else:
        scheduler.end("a", "abort")
        scheduler.commit(plan)
    assert admit_start(scheduler, "b", PROMPT) == 0


def test_blocks_shared_with_a_running_request_cost_nothing() -> None:
    scheduler = make_scheduler(num_blocks=5)
    scheduler.add("a", PROMPT[:9], max_tokens=3)  # three blocks
    scheduler.commit(scheduler.next_plan())
    scheduler.add("b", PROMPT[:9], max_tokens=3)  # The request takes one of the two free blocks.
    assert scheduler.starts[scheduler.next_plan().step_id] == [9, 8]
    scheduler = make_scheduler(num_blocks=6)
    for name in "ab":
        scheduler.add(name, PROMPT[:9], max_tokens=3)
    first = scheduler.next_plan()
    assert len(first.new_rows) == 1  # Three blocks and a spare one are not free.
    scheduler.commit(first)
    assert scheduler.starts[scheduler.next_plan().step_id] == [9, 8]


def test_cached_blocks_that_a_request_needs_are_taken_not_evicted() -> None:
    scheduler = make_scheduler(num_blocks=4)
    admit_start(scheduler, "a", list(range(10, 18)))  # The cache holds the two older blocks.
    admit_start(scheduler, "b", list(range(50, 58)))  # Two more are cached; no block is blank.
    scheduler.add("c", list(range(10, 19)))
    plan = scheduler.next_plan()
    assert scheduler.starts[plan.step_id] == [8] and len(set(plan.new_rows[0].block_ids)) == 3
    scheduler = make_scheduler(num_blocks=6)
    admit_start(scheduler, "a", list(range(10, 22)))  # Three blocks are cached and free.
    scheduler.add("b", list(range(60, 69)), max_tokens=4)  # three blocks
    first = scheduler.next_plan()
    # The request needs three cached blocks and one new block, but three blocks are free.
    scheduler.add("c", list(range(10, 23)), max_tokens=4)
    second = scheduler.next_plan()
    assert second.new_rows == []
    scheduler.commit(first)
    scheduler.commit(second)
    scheduler.run_all()
    assert scheduler.num_free_blocks == 6


# --- preemption ----------------------------------------------------------------------------------


def make_tight(num_blocks: int, *, prefix_cache: bool = False) -> RankScheduler:
    """Make a pool of few blocks, and requests "a" and "b" of two blocks that soon need more."""
    scheduler = make_scheduler(
        max_model_len=64, num_blocks=num_blocks, enable_prefix_caching=prefix_cache
    )
    scheduler.add_all(a=8, b=8)
    return scheduler


def run_until_preemption(scheduler: RankScheduler) -> StepPlan:
    while True:
        plan = scheduler.next_plan()
        if scheduler.preemption_count:
            return plan
        scheduler.commit(plan)


@pytest.mark.parametrize(
    ("priorities", "left"),
    [((0, 0, 0), "ab"), ((0, 1, 0), "ac"), ((2, 1, 1), "bc"), ((0, 2, 1), "ac")],
)
def test_preempts_by_priority_then_arrival(priorities: tuple[int, ...], left: str) -> None:
    scheduler = make_scheduler(max_model_len=64, num_blocks=9, enable_prefix_caching=False)
    for name, priority in zip("abc", priorities, strict=True):
        # Each request takes 2 blocks, a third in step 2 and a fourth in step 6.
        scheduler.add(name, 8, priority=priority)
    plan = scheduler.next_plan()
    slots = dict(zip(list_admitted(plan), (row.slot for row in plan.new_rows), strict=True))
    scheduler.commit(plan)
    assert sorted(run_until_preemption(scheduler).slots) == sorted(slots[name] for name in left)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_better_requests_are_not_preempted() -> None:
    scheduler = make_scheduler(num_blocks=6, enable_prefix_caching=False)
    scheduler.add("a", 8, priority=1)
    scheduler.step()
    scheduler.add("b", 8)
    assert run_until_preemption(scheduler).slots == [1]
    scheduler = make_scheduler(num_blocks=4, enable_prefix_caching=False)
    scheduler.add("a", 4, max_tokens=5)  # Request a takes the last block in step 2.
    scheduler.add("b", 5, max_tokens=8)  # Request b needs one more block in step 5.
    plans = []
    for _ in range(6):
        plans.append(scheduler.next_plan())
        scheduler.commit(plans[-1])
    assert [plan.slots for plan in plans] == [[0, 1]] * 4 + [[0], [1]]
    assert scheduler.starts[plans[5].step_id] == [8] and scheduler.preemption_count == 0


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preempted_request_waits_for_its_tokens_in_flight(prefix_cache: bool) -> None:
    scheduler = make_tight(6, prefix_cache=prefix_cache)
    plans = scheduler.next_plans(6)
    scheduler.end("a", "abort")  # enough room
    assert scheduler.plan() is None
    for plan in plans[:4]:
        scheduler.commit(plan)
    assert scheduler.plan() is None
    scheduler.commit(plans[4])  # This step is the last one of the preempted request.
    (row,) = scheduler.next_plan().new_rows
    assert len(row.token_ids) == 13


def test_preempted_request_precedes_later_ones_and_uses_its_cached_blocks() -> None:
    scheduler = make_tight(6)
    scheduler.add("c", 8)  # The pool is too small for this request from the start.
    scheduler.commit(run_until_preemption(scheduler))
    order = ""
    while scheduler.has_unfinished:
        plan = scheduler.next_plan()
        order += list_admitted(plan)
        scheduler.commit(plan)
    assert order == "bc"
    scheduler = make_tight(6, prefix_cache=True)
    scheduler.commit(run_until_preemption(scheduler))
    starts: list[int] = []
    updates: list[SequenceUpdate] = []
    while scheduler.has_unfinished:
        plan = scheduler.next_plan()
        starts += scheduler.starts[plan.step_id] if plan.new_rows else []
        updates += scheduler.commit(plan)
    assert starts == [8]
    # The number of cached tokens is that of the first admission.
    assert updates[-1].request_id == "b" and updates[-1].num_cached_tokens == 0
    assert (scheduler.prompt_tokens, scheduler.cached_prompt_tokens) == (16, 0)
