from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from negamax.base.errors import (
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    RequestTimeoutError,
)
from negamax.engine.client.open_request import OpenRequest, OpenRequests, join_updates
from negamax.engine.client.output import ChoiceStream, RequestOutput
from negamax.engine.wire import AddRequest
from negamax.scheduler.request import GenerateRequest, SamplingParams
from negamax.scheduler.step import SequenceUpdate, TokenLogprobs
from tests.unit.test_stop_strings import INFO, TEXT, TOKENIZER

IDS = TOKENIZER.encode(TEXT)


def update(
    name: str,
    token_ids: list[int],
    *,
    end: str | None = None,
    logprobs: bool = False,
    **fields: Any,
) -> SequenceUpdate:
    entries = (
        [TokenLogprobs(token_id, -1.0, 1, [], []) for token_id in token_ids] if logprobs else None
    )
    return SequenceUpdate(
        name, token_ids, entries, None, end, 7 if end else None, 3, None, **fields
    )


class Engine:
    def __init__(self, *, refuses: Exception | None = None) -> None:
        self.open: set[str] = set()
        self.submitted: list[str] = []
        self.aborted: list[str] = []
        self._refuses = refuses

    def enter(self, request: OpenRequest) -> Engine:
        if self._refuses is not None:
            raise self._refuses
        self.open |= {sequence.request_id for sequence in request.requests}
        return self

    def send(self, *messages: AddRequest) -> None:
        self.submitted += [message.request.request_id for message in messages]

    def leave(self, sequence_ids: Sequence[str], *, abort: bool) -> None:
        known = [sequence_id for sequence_id in sequence_ids if sequence_id in self.open]
        self.open -= set(known)
        self.aborted += known if abort else []


class Watcher:
    def __init__(self) -> None:
        self.num_outputs = 0
        self.ends: list[BaseException | None] = []

    def started(self, at: float) -> None: ...

    def gained(self, output: RequestOutput) -> None:
        self.num_outputs += 1

    def ended(self, error: BaseException | None) -> None:
        self.ends.append(error)


def generation(
    engine: Engine,
    *,
    n: int = 1,
    stop: tuple[str, ...] = (),
    seconds: float | None = None,
    watcher: Watcher | None = None,
    interval: int = 1,
) -> OpenRequest:
    sampling = SamplingParams(stop=stop)
    requests = [
        GenerateRequest(request_id=f"r/{index}", prompt_token_ids=(1,), sampling=sampling)
        for index in range(n)
    ]
    streams = {
        request.request_id: ChoiceStream(
            TOKENIZER, sampling, info=INFO, request_id="r", index=index, num_prompt_tokens=1
        )
        for index, request in enumerate(requests)
    }
    deadline = None if seconds is None else time.monotonic() + seconds
    return OpenRequest(
        engine, requests, streams, deadline=deadline, observer=watcher, interval=interval
    )


def taking(outputs: list[RequestOutput]) -> Callable[[int, RequestOutput], None]:
    return lambda index, output: outputs.append(output)


def give(to: OpenRequest, *updates: SequenceUpdate) -> None:
    for one in updates:
        to.push(one)


def test_outputs_are_handed_on_at_once_in_order_and_once() -> None:
    async def run() -> None:
        engine, watcher, taken = Engine(), Watcher(), list[RequestOutput]()
        request = generation(engine, watcher=watcher)
        running = asyncio.create_task(request.run(taking(taken)))
        await asyncio.sleep(0)
        assert engine.submitted == ["r/0"]
        for position, token_id in enumerate(IDS):
            give(
                request,
                update("r/0", [token_id], end="length" if position == len(IDS) - 1 else None),
            )
            assert len(taken) == position + 1  # no task was woken
        await asyncio.wait_for(running, 120)
        assert "".join(output.text for output in taken) == TEXT
        assert (
            not engine.open
            and not engine.aborted
            and watcher.ends == [None]
            and watcher.num_outputs == len(IDS)
        )

    asyncio.run(run())


@pytest.mark.parametrize("interval", [2, 3, 7, 1000])
def test_outputs_have_the_requested_number_of_tokens(interval: int) -> None:
    async def run() -> None:
        engine, watcher, taken = Engine(), Watcher(), list[RequestOutput]()
        request = generation(engine, n=2, watcher=watcher, interval=interval)
        running = asyncio.create_task(request.run(taking(taken)))
        await asyncio.sleep(0)
        for position, token_id in enumerate(IDS):
            end = "length" if position == len(IDS) - 1 else None
            updates = [update(name, [token_id], end=end, logprobs=True) for name in ("r/0", "r/1")]
            give(request, *updates)
        await asyncio.wait_for(running, 120)
        for index in range(2):
            parts = [output for output in taken if output.index == index]
            sizes = [len(output.token_ids) for output in parts]
            assert sizes[0] == 1 and set(sizes[1:-1]) <= {interval} and sizes[-1] <= interval
            assert "".join(output.text for output in parts) == TEXT
            assert [token_id for output in parts for token_id in output.token_ids] == IDS
            assert [entry.token_id for output in parts for entry in output.logprobs or ()] == IDS
            counts = [output.num_output_tokens for output in parts]
            assert (
                counts == [sum(sizes[: i + 1]) for i in range(len(sizes))]
                and parts[-1].finish_reason == "length"
            )
        # times are those of the tokens, not of the outputs
        assert watcher.num_outputs == 2 * len(IDS) and not engine.open

    asyncio.run(run())


def test_joined_outputs_are_handed_on_before_an_error() -> None:
    async def run() -> None:
        taken = list[RequestOutput]()
        request = generation(Engine(), interval=100)
        running = asyncio.create_task(request.run(taking(taken)))
        await asyncio.sleep(0)
        for token_id in IDS[:5]:
            give(request, update("r/0", [token_id]))
        assert len(taken) == 1
        request.fail(EngineDeadError("gone"))
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(running, 120)
        assert [token_id for output in taken for token_id in output.token_ids] == IDS[:5]

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(20))
def test_pauses_join_what_arrives_and_lose_nothing(seed: int) -> None:
    async def run(rng: random.Random) -> None:
        engine, taken = Engine(), list[RequestOutput]()
        request = generation(engine, n=2)
        running = asyncio.create_task(request.run(taking(taken)))
        await asyncio.sleep(0)
        is_paused = False
        for position, token_id in enumerate(IDS):
            end = "length" if position == len(IDS) - 1 else None
            before = len(taken)
            give(request, update("r/0", [token_id], end=end), update("r/1", [token_id], end=end))
            assert len(taken) - before == (0 if is_paused else 2)
            if rng.random() < 0.3:
                is_paused = not is_paused
                (request.pause if is_paused else request.resume)()
        request.resume()
        await asyncio.wait_for(running, 120)
        for index in range(2):
            parts = [output for output in taken if output.index == index]
            assert "".join(output.text for output in parts) == TEXT
            assert [token_id for output in parts for token_id in output.token_ids] == IDS

    asyncio.run(run(random.Random(seed)))


def test_backlog_is_one_update_per_sequence_with_all_its_tokens() -> None:
    first = update("a", [0], logprobs=True)
    for token_id in range(1, 100_000):
        first = join_updates(first, update("a", [token_id], logprobs=True))
    first = join_updates(first, update("a", [-1], end="stop", logprobs=True))
    assert first.token_ids == [*range(100_000), -1]
    assert (
        first.logprobs is not None
        and [entry.token_id for entry in first.logprobs] == first.token_ids
    )
    assert (first.finish_reason, first.stop_reason, first.num_cached_tokens) == ("stop", 7, 3)


def test_prompt_logprobs_of_the_first_update_survive_the_last() -> None:
    prompt = [TokenLogprobs(5, -2.0, 1, [], [])]
    both = join_updates(
        SequenceUpdate("a", [1], None, prompt, None, None, 0, None), update("a", [2], end="length")
    )
    assert both.prompt_logprobs is not None and both.prompt_logprobs[0].token_id == 5
    assert both.token_ids == [1, 2]


def test_later_choices_are_sent_after_the_first_token() -> None:
    async def run() -> None:
        engine = Engine()
        request = generation(engine, n=3)
        running = asyncio.create_task(request.run(lambda index, output: None))
        await asyncio.sleep(0)
        assert engine.submitted == ["r/0"] and engine.open == {"r/0", "r/1", "r/2"}
        give(request, update("r/0", [IDS[0]]))
        assert engine.submitted == ["r/0", "r/1", "r/2"]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert sorted(engine.aborted) == ["r/0", "r/1", "r/2"] and not engine.open

    asyncio.run(run())


def test_later_choices_of_an_aborted_request_are_never_sent() -> None:
    async def run() -> None:
        engine, taken = Engine(), list[RequestOutput]()
        request = generation(engine, n=3)
        running = asyncio.create_task(request.run(taking(taken)))
        await asyncio.sleep(0)
        request.abort()
        give(request, update("r/0", [IDS[0]]))  # crossed with the abort
        give(request, SequenceUpdate("r/0", [], finish_reason="abort"))
        await asyncio.wait_for(running, 120)
        assert engine.submitted == ["r/0"] and not engine.open
        assert [output.finish_reason for output in taken] == ["abort", "abort", None, "abort"]

    asyncio.run(run())


def test_a_stop_string_ends_the_choice_in_the_engine_too() -> None:
    async def run() -> None:
        engine, taken = Engine(), list[RequestOutput]()
        request = generation(engine, stop=("ships that pass",))
        running = asyncio.create_task(request.run(taking(taken)))
        await asyncio.sleep(0)
        give(request, update("r/0", list(IDS)))
        give(request, update("r/0", list(IDS)))  # crossed with our abort
        await asyncio.wait_for(running, 120)
        assert "".join(output.text for output in taken) == TEXT[: TEXT.index("ships that pass")]
        assert engine.aborted == ["r/0"] and taken[-1].finish_reason == "stop"

    asyncio.run(run())


def test_a_failure_follows_earlier_outputs_and_the_first_one_counts() -> None:
    async def run() -> None:
        engine, watcher, taken = Engine(), Watcher(), list[RequestOutput]()
        request = generation(engine, watcher=watcher)
        running = asyncio.create_task(request.run(taking(taken)))
        await asyncio.sleep(0)
        request.pause()
        give(request, update("r/0", [IDS[0]]))
        request.fail(EngineDeadError("first"))
        request.fail(EngineDeadError("second"))
        assert not taken
        request.resume()
        with pytest.raises(EngineDeadError, match="first"):
            await asyncio.wait_for(running, 120)
        assert len(taken) == 1 and str(watcher.ends[0]) == "first" and len(watcher.ends) == 1

    asyncio.run(run())


def test_deadline_ends_what_runs() -> None:
    async def run() -> None:
        engine = Engine()
        with pytest.raises(RequestTimeoutError):
            await asyncio.wait_for(
                generation(engine, seconds=0.05).run(lambda index, output: None), 120
            )
        assert engine.aborted == ["r/0"] and not engine.open

    asyncio.run(run())


def test_an_error_of_the_user_ends_its_own_request() -> None:
    async def run() -> None:
        engine = Engine()
        request = generation(engine)

        def broken(index: int, output: RequestOutput) -> None:
            raise EngineError("cannot be told")

        running = asyncio.create_task(request.run(broken))
        await asyncio.sleep(0)
        # must not raise here: others have outputs in the same step
        give(request, update("r/0", [IDS[0]]))
        give(request, update("r/0", [IDS[1]]))
        with pytest.raises(EngineError, match="cannot be told"):
            await asyncio.wait_for(running, 120)
        assert engine.aborted == ["r/0"]

    asyncio.run(run())


def test_refusals_are_raised_before_the_first_output() -> None:
    async def begins(engine: Engine, act: Callable[[OpenRequest], None]) -> None:
        request = generation(engine)
        beginning = asyncio.create_task(request.first_output())
        await asyncio.sleep(0)
        act(request)
        try:
            await asyncio.wait_for(beginning, 120)
        finally:
            request.close()
            assert not engine.open

    refusal = SequenceUpdate("r/0", [], None, None, "error", None, 0, "no such rule", True)
    with pytest.raises(InvalidRequestError, match="no such rule"):
        asyncio.run(begins(Engine(), lambda request: give(request, refusal)))
    with pytest.raises(EngineDeadError):
        asyncio.run(begins(Engine(), lambda request: request.fail(EngineDeadError("gone"))))
    with pytest.raises(OverloadedError):
        asyncio.run(begins(Engine(refuses=OverloadedError("full")), lambda request: None))


def test_outputs_before_run_are_kept() -> None:
    async def run() -> None:
        engine, taken = Engine(), list[RequestOutput]()
        request = generation(engine)
        beginning = asyncio.create_task(request.first_output())
        await asyncio.sleep(0)
        give(request, update("r/0", [IDS[0]]), update("r/0", list(IDS[1:]), end="length"))
        await asyncio.wait_for(beginning, 120)
        await asyncio.wait_for(request.run(taking(taken)), 120)
        assert "".join(output.text for output in taken) == TEXT and engine.submitted == ["r/0"]

    asyncio.run(run())


def test_requests_answered_together_end_together() -> None:
    async def run() -> None:
        engines, taken = [Engine(), Engine()], list[tuple[int, str]]()
        parts = [generation(engine) for engine in engines]
        both = OpenRequests(parts)
        running = asyncio.create_task(
            both.run(lambda number, output: taken.append((number, output.text)))
        )
        for _ in range(3):
            await asyncio.sleep(0)
        give(parts[1], update("r/0", list(IDS), end="length"))
        give(parts[0], update("r/0", [IDS[0]]))
        assert [number for number, _ in taken] == [1, 0]
        parts[0].fail(EngineDeadError("gone"))
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(running, 120)
        assert engines[0].aborted == ["r/0"] and engines[1].aborted == []
        assert not engines[0].open and not engines[1].open

    asyncio.run(run())
