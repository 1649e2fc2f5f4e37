"""Updates that wait for a slow reader: joined, never lost, never more than one per sequence."""

from __future__ import annotations

import asyncio
import random

import pytest

from negamax.base.errors import EngineDeadError
from negamax.engine.mailbox import Mailbox
from negamax.scheduler.step import SequenceUpdate, TokenLogprobs


def update(name: str, token_ids: list[int], *, end: str | None = None, logprobs: bool = False) -> SequenceUpdate:
    entries = [TokenLogprobs(token_id, -1.0, 1, [], []) for token_id in token_ids] if logprobs else None
    return SequenceUpdate(name, token_ids, entries, None, end, 7 if end else None, 3, None)


def test_backlog_is_one_update_per_sequence_with_all_its_tokens() -> None:
    async def run() -> list[SequenceUpdate]:
        mailbox = Mailbox()
        for token_id in range(100_000):
            mailbox.put(update("a", [token_id], logprobs=True))
            mailbox.put(update("b", [token_id, token_id]))
        mailbox.put(update("a", [-1], end="stop", logprobs=True))
        return await mailbox.take()

    first, second = asyncio.run(run())
    assert first.token_ids == [*range(100_000), -1]
    assert first.logprobs is not None and [entry.token_id for entry in first.logprobs] == first.token_ids
    assert (first.finish_reason, first.stop_reason, first.num_cached_tokens) == ("stop", 7, 3)
    assert len(second.token_ids) == 200_000 and second.finish_reason is None


def test_prompt_logprobs_of_the_first_update_survive_the_last() -> None:
    async def run() -> list[SequenceUpdate]:
        mailbox = Mailbox()
        prompt = [TokenLogprobs(5, -2.0, 1, [], [])]
        mailbox.put(SequenceUpdate("a", [1], None, prompt, None, None, 0, None))
        mailbox.put(update("a", [2], end="length"))
        return await mailbox.take()

    (joined,) = asyncio.run(run())
    assert joined.prompt_logprobs is not None and joined.prompt_logprobs[0].token_id == 5
    assert joined.token_ids == [1, 2]


def test_reader_gets_everything_in_order_whenever_it_looks() -> None:
    async def run(rng: random.Random) -> list[int]:
        mailbox, seen = Mailbox(), list[int]()

        async def read() -> None:
            while True:
                for part in await mailbox.take():
                    seen.extend(part.token_ids)
                    if part.finish_reason is not None:
                        return
                for _ in range(rng.randint(0, 3)):
                    await asyncio.sleep(0)

        reader = asyncio.create_task(read())
        for token_id in range(500):
            mailbox.put(update("a", [token_id], end="stop" if token_id == 499 else None))
            for _ in range(rng.randint(0, 2)):
                await asyncio.sleep(0)
        await asyncio.wait_for(reader, 5)
        return seen

    for seed in range(20):
        assert asyncio.run(run(random.Random(seed))) == list(range(500))


def test_failure_comes_after_what_has_arrived_and_the_first_one_counts() -> None:
    async def run() -> None:
        mailbox = Mailbox()
        mailbox.put(update("a", [1]))
        mailbox.fail(EngineDeadError("first"))
        mailbox.fail(EngineDeadError("second"))
        assert [part.token_ids for part in await mailbox.take()] == [[1]]
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="first"):
                await mailbox.take()

    asyncio.run(run())


def test_failure_wakes_a_waiting_reader() -> None:
    async def run() -> None:
        mailbox = Mailbox()
        reader = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        mailbox.fail(EngineDeadError("gone"))
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(reader, 5)

    asyncio.run(run())
