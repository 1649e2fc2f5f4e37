from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from negamax.base import errors
from negamax.engine.client.open_request import OpenRequest, OpenRequests, join_updates
from negamax.engine.client.output import RequestOutput, split_choices
from negamax.engine.wire import AddRequest
from negamax.scheduler.request import GenerateRequest, SamplingParams
from negamax.scheduler.step import SequenceUpdate, TokenLogprobs
from tests.unit.test_stop_strings import INFO, TEXT, TOKENIZER

IDS = TOKENIZER.encode(TEXT)


def update(
    name: str, token_ids: list[int], *, end: str | None = None, logprobs: bool = False
) -> SequenceUpdate:
    entries = [TokenLogprobs(token_id, -1.0, 1, [], []) for token_id in token_ids]
    reason = 7 if end else None
    return SequenceUpdate(name, token_ids, entries if logprobs else None, None, end, reason, 3)


class Engine:
    def __init__(self) -> None:
        self.open: set[str] = set()
        self.submitted: list[str] = []
        self.aborted: list[str] = []
        self.refusal: Exception | None = None

    def enter(self, request: OpenRequest) -> Engine:
        if self.refusal is not None:
            raise self.refusal
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


class Scene:
    """Run a request of `n` choices on a fake engine. `taken` holds the outputs passed on."""

    def __init__(
        self, *, n: int = 1, stop: tuple[str, ...] = (), seconds: float | None = None,
        interval: int = 1, take: Callable[[int, RequestOutput], object] | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.watcher, self.taken = Engine(), Watcher(), list[RequestOutput]()
        sampling = SamplingParams(n=n, stop=stop)
        prompt = GenerateRequest(request_id="r", prompt_token_ids=(1,), sampling=sampling)
        choices = split_choices(prompt, TOKENIZER, info=INFO, seeds=random.Random(0))
        deadline = None if seconds is None else time.monotonic() + seconds
        self.request = OpenRequest(
            self.engine, choices, deadline=deadline, observer=self.watcher, interval=interval
        )
        self._take = take or (lambda index, output: self.taken.append(output))

    async def run(self) -> None:
        self._running = asyncio.create_task(self.request.run(self._take))
        await asyncio.sleep(0)

    async def end(self) -> None:
        """Wait for the end of the request. Raises the error with which the request ended."""
        try:
            await asyncio.wait_for(self._running, 120)
        finally:
            assert not self.engine.open

    async def cancel(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    def give(self, token_ids: Sequence[int] = (), *, name: str = "r/0", **fields: Any) -> None:
        self.request.push(update(name, list(token_ids), **fields))

    def give_each(self, names: Sequence[str], act: Callable[[], None] = lambda: None) -> None:
        """Give the sequences `names` all tokens one by one, and call `act` after each token."""
        for position, token_id in enumerate(IDS):
            end = "length" if position == len(IDS) - 1 else None
            for name in names:
                self.give([token_id], name=name, end=end, logprobs=True)
            act()

    def text(self, index: int = 0) -> str:
        return "".join(output.text for output in self.taken if output.index == index)

    def token_ids(self, index: int = 0) -> list[int]:
        parts = [output for output in self.taken if output.index == index]
        return [token_id for output in parts for token_id in output.token_ids]


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


@in_loop
async def test_outputs_are_passed_on_at_once_in_order_and_once() -> None:
    scene = Scene()
    await scene.run()
    assert scene.engine.submitted == ["r/0"]
    numbers: list[int] = []
    scene.give_each(["r/0"], lambda: numbers.append(len(scene.taken)))
    assert numbers == [*range(1, len(IDS) + 1)]  # No task was woken for a token.
    await scene.end()
    assert scene.text() == TEXT and not scene.engine.aborted
    assert scene.watcher.ends == [None] and scene.watcher.num_outputs == len(IDS)
    scene = Scene()
    beginning = asyncio.create_task(scene.request.first_output())
    await asyncio.sleep(0)
    scene.give([IDS[0]])
    scene.give(IDS[1:], end="length")
    await asyncio.wait_for(beginning, 120)
    await scene.run()
    await scene.end()
    assert scene.text() == TEXT and scene.engine.submitted == ["r/0"]


@pytest.mark.parametrize("interval", [2, 7, 1000])
@in_loop
async def test_outputs_have_the_requested_number_of_tokens(interval: int) -> None:
    scene = Scene(n=2, interval=interval)
    await scene.run()
    scene.give_each(["r/0", "r/1"])
    await scene.end()
    for index in range(2):
        parts = [output for output in scene.taken if output.index == index]
        sizes = [len(output.token_ids) for output in parts]
        assert sizes[0] == 1 and set(sizes[1:-1]) <= {interval} and sizes[-1] <= interval
        assert scene.text(index) == TEXT and scene.token_ids(index) == IDS
        assert [entry.token_id for output in parts for entry in output.logprobs or ()] == IDS
        counts = [output.num_output_tokens for output in parts]
        assert counts == [sum(sizes[: i + 1]) for i in range(len(sizes))]
        assert parts[-1].finish_reason == "length"
    # The watcher counts tokens, not outputs.
    assert scene.watcher.num_outputs == 2 * len(IDS)


@pytest.mark.parametrize("seed", range(20))
@in_loop
async def test_pauses_join_updates_and_lose_nothing(seed: int) -> None:
    scene, rng = Scene(n=2), random.Random(seed)
    await scene.run()
    paused_at: list[int] = []  # number of outputs at the start of a pause

    def pause_at_random() -> None:
        assert not paused_at or len(scene.taken) == paused_at[0]
        if rng.random() < 0.3:
            (scene.request.resume if paused_at else scene.request.pause)()
            paused_at[:] = [] if paused_at else [len(scene.taken)]

    scene.give_each(["r/0", "r/1"], pause_at_random)
    scene.request.resume()
    await scene.end()
    for index in range(2):
        assert scene.text(index) == TEXT and scene.token_ids(index) == IDS


def test_backlog_is_one_update_per_sequence_with_all_its_tokens() -> None:
    prompt = [TokenLogprobs(5, -2.0, 1, [], [])]
    first = replace(update("a", [0], logprobs=True), prompt_logprobs=prompt)
    for token_id in range(1, 100_000):
        first = join_updates(first, update("a", [token_id], logprobs=True))
    first = join_updates(first, update("a", [-1], end="stop", logprobs=True))
    assert first.token_ids == [*range(100_000), -1] and first.prompt_logprobs == prompt
    assert [entry.token_id for entry in first.logprobs or ()] == first.token_ids
    assert (first.finish_reason, first.stop_reason, first.num_cached_tokens) == ("stop", 7, 3)


@in_loop
async def test_later_choices_are_sent_after_the_first_token_unless_aborted() -> None:
    scene = Scene(n=3)
    await scene.run()
    assert scene.engine.submitted == ["r/0"] and scene.engine.open == {"r/0", "r/1", "r/2"}
    scene.give([IDS[0]])
    assert scene.engine.submitted == ["r/0", "r/1", "r/2"]
    await scene.cancel()
    assert sorted(scene.engine.aborted) == ["r/0", "r/1", "r/2"] and not scene.engine.open
    scene = Scene(n=3)
    await scene.run()
    scene.request.abort()
    scene.give([IDS[0]])  # The engine sent this token before it received the abort.
    scene.give(end="abort")
    await scene.end()
    assert scene.engine.submitted == ["r/0"]
    assert [output.finish_reason for output in scene.taken] == ["abort", "abort", None, "abort"]


@in_loop
async def test_stop_string_ends_the_choice_in_the_engine_too() -> None:
    scene = Scene(stop=("ships that pass",))
    await scene.run()
    scene.give(IDS)
    scene.give(IDS)  # The engine sent these tokens before it received our abort.
    await scene.end()
    assert scene.text() == TEXT[: TEXT.index("ships that pass")]
    assert scene.engine.aborted == ["r/0"] and scene.taken[-1].finish_reason == "stop"


@in_loop
async def test_failures_follow_earlier_outputs() -> None:
    scene = Scene()
    await scene.run()
    scene.request.pause()
    scene.give([IDS[0]])
    scene.request.fail(errors.EngineDeadError("first"))
    scene.request.fail(errors.EngineDeadError("second"))
    assert not scene.taken
    scene.request.resume()
    with pytest.raises(errors.EngineDeadError, match="first"):
        await scene.end()
    assert len(scene.taken) == 1 and list(map(str, scene.watcher.ends)) == ["first"]
    scene = Scene(interval=100)
    await scene.run()
    for token_id in IDS[:5]:
        scene.give([token_id])
    assert len(scene.taken) == 1
    scene.request.fail(errors.EngineDeadError("gone"))
    with pytest.raises(errors.EngineDeadError):
        await scene.end()
    assert scene.token_ids() == IDS[:5]


@in_loop
async def test_deadlines_and_errors_of_the_user_end_a_request() -> None:
    def broken(index: int, output: RequestOutput) -> None:
        raise errors.EngineError("cannot be sent")

    scene = Scene(take=broken)
    await scene.run()
    # This call must not raise, since other requests have outputs in the same step.
    scene.give([IDS[0]])
    scene.give([IDS[1]])
    with pytest.raises(errors.EngineError, match="cannot be sent"):
        await scene.end()
    assert scene.engine.aborted == ["r/0"]
    scene = Scene(seconds=0.05)
    await scene.run()
    with pytest.raises(errors.RequestTimeoutError):
        await scene.end()
    assert scene.engine.aborted == ["r/0"]


REFUSAL = SequenceUpdate("r/0", [], None, None, "error", None, 0, "no such rule", True)


@pytest.mark.parametrize(
    ("error", "act"),
    [
        (errors.InvalidRequestError, lambda scene: scene.request.push(REFUSAL)),
        (errors.EngineDeadError, lambda scene: scene.request.fail(errors.EngineDeadError("gone"))),
        (errors.OverloadedError, None),
    ],
)
@in_loop
async def test_refusals_are_raised_before_the_first_output(
    error: type[Exception], act: Callable[[Scene], None] | None
) -> None:
    scene = Scene()
    if act is None:
        scene.engine.refusal = errors.OverloadedError("full")
    beginning = asyncio.create_task(scene.request.first_output())
    await asyncio.sleep(0)
    if act is not None:
        act(scene)
    with pytest.raises(error, match=r"no such rule|gone|full"):
        await asyncio.wait_for(beginning, 120)
    scene.request.close()
    assert not scene.engine.open


@in_loop
async def test_requests_answered_together_end_together() -> None:
    scenes, taken = [Scene(), Scene()], list[int]()
    both = OpenRequests([scene.request for scene in scenes])
    running = asyncio.create_task(both.run(lambda number, output: taken.append(number)))
    for _ in range(3):
        await asyncio.sleep(0)
    scenes[1].give(IDS, end="length")
    scenes[0].give([IDS[0]])
    assert taken == [1, 0]
    scenes[0].request.fail(errors.EngineDeadError("gone"))
    with pytest.raises(errors.EngineDeadError):
        await asyncio.wait_for(running, 120)
    assert [scene.engine.aborted for scene in scenes] == [["r/0"], []]
    assert not any(scene.engine.open for scene in scenes)
