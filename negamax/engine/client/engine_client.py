"""A server process's side of the engine: admits requests and hands out their results, through the
engine's deaths.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from negamax.base.errors import EngineDeadError, UnavailableError
from negamax.base.shared_numbers import SharedNumbers
from negamax.config.options import EngineOptions
from negamax.config.parallel import ParallelOptions
from negamax.engine import wire
from negamax.engine.client.admission import Admission, prefill_tokens
from negamax.engine.client.connection import EngineChannel
from negamax.engine.client.open_request import NOBODY, Observer, OpenRequest, Owner, joined
from negamax.engine.client.output import ChoiceStream, TextReader, admit
from negamax.engine.core.source import locate
from negamax.scheduler.request import GenerateRequest, SamplingParams
from negamax.scheduler.step import SequenceUpdate
from negamax.text.chat_template import ChatTemplate
from negamax.text.tokenizer import Tokenizer

_NO_STATS = wire.EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0)
_RESPONSIVE_SECONDS = 0.7  # without a sign of life: some beats


class AsyncEngine:
    """The client of an engine process, and the requests it is serving for this process. Single
    writer: the event loop it was made on.

    The engine comes and goes; `supervisor` sees to that. Where several server processes share it,
    each has a client with an `index` of its own, and they count what is open together.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        index: int,
        numbers: SharedNumbers | None,
    ) -> None:
        """Use `AsyncEngine.create`."""
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.info: wire.ModelInfo
        self.admission: Admission
        self.restart_count = 0
        # why it stays dead
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.past_stats: list[wire.EngineStats] = []  # the last ones of engines that died
        # gets the number of tokens of each step
        self.on_steps: Callable[[list[int]], None] | None = None
        self._options = options
        self._index = index
        self._numbers = numbers
        self._channel: EngineChannel | None = None
        self._open: dict[str, OpenRequest] = {}  # by sequence id
        self._seeds = random.Random(options.seed + index)
        self._death = "the engine is not running"
        self._was_ready = False
        self._next_ready = 0.0  # monotonic: when a start that is under way should be over
        self._is_stopped = False

    @classmethod
    async def create(
        cls,
        options: EngineOptions,
        *,
        chat_template: Path | None = None,
        index: int = 0,
        numbers: SharedNumbers | None = None,
    ) -> AsyncEngine:
        """A client without an engine, which finds (and if need be downloads) the model's tokenizer
        and template.

        `chat_template` is a file that replaces the checkpoint's own; `numbers` are shared by the
        clients of one engine (`admission.NUM_COLUMNS`), and `index` is the row of this one. Errors:
        `ConfigError` and its kin.
        """
        source = await asyncio.to_thread(locate, options)
        return cls(
            options,
            tokenizer=await asyncio.to_thread(Tokenizer.from_folder, source.tokenizer_folder),
            chat_template=ChatTemplate.from_folder(source.tokenizer_folder, chat_template),
            index=index,
            numbers=numbers,
        )

    @property
    def alive(self) -> bool:
        """Whether requests can be served: the engine runs, and no end of it is known."""
        return self._channel is not None and self._channel.is_open and not self._is_stopped

    def check_responsive(self) -> None:
        """Refuse while the engine or one of its ranks has given no sign of life in the last
        seconds: `UnavailableError`.
        """
        self.check_alive()
        assert self._channel is not None
        silent = None
        if time.monotonic() - self._channel.last_beat >= _RESPONSIVE_SECONDS:
            silent = "the engine"
        elif self._channel.rank_silence >= _RESPONSIVE_SECONDS:
            silent = f"rank {self._channel.rank}"
        if silent is not None:
            raise UnavailableError(
                f"{silent} gives no sign of life", code="engine_silent", retry_after=1.0
            )

    @property
    def stats(self) -> wire.EngineStats:
        """The latest statistics; all zero while no engine runs."""
        return (
            self._channel.stats if self.alive and self._channel is not None else None
        ) or _NO_STATS

    @property
    def parallel(self) -> ParallelOptions:
        """How the model is split over the engine's ranks."""
        return self._options.parallel

    @property
    def num_open(self) -> int:
        """Sequences that run or wait for this process."""
        return len(self._open)

    def open_requests(self) -> list[GenerateRequest]:
        """The sequences that run or wait for this process."""
        return [
            request
            for generation in dict.fromkeys(self._open.values())
            for request in generation.requests
            if request.request_id in self._open
        ]

    def check_alive(self) -> None:
        """Refuse while no engine runs: `UnavailableError`, with the time after which to come
        back.
        """
        if self.alive:
            return
        if self._is_stopped or self.failed.done():
            raise EngineDeadError(self._death, code="engine_dead")
        wait = max(1.0, self._next_ready - time.monotonic())
        raise UnavailableError(
            f"{self._death}; it is being started again", code="engine_restarting", retry_after=wait
        )

    def check_room(self, tokens: Sequence[int], *, owner: Owner) -> None:
        """Refuse sequences with so many prompt tokens each: `InvalidRequestError` where they never
        fit, `OverloadedError` where they do not fit now."""
        sharer = owner.tenant if owner.shares_queue else None
        self.admission.check(len(tokens), sum(tokens), now=time.monotonic(), sharer=sharer)

    def prefill_tokens(
        self, num_prompt_tokens: int, sampling: SamplingParams, *, num_choices: int
    ) -> list[int]:
        """The prompt tokens that each of so many choices has to compute."""
        shares_prompt = self._options.enable_prefix_caching and sampling.prompt_logprobs is None
        return prefill_tokens(num_prompt_tokens, num_choices, shares_prompt=shares_prompt)

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        deadline: float | None = None,
        observer: Observer | None = None,
        interval: int = 1,
        readers: Sequence[TextReader] | None = None,
        owner: Owner = NOBODY,
    ) -> OpenRequest:
        """Continue a prompt; the outputs of the `n` choices come interleaved as they are generated.
        Run it, or close it.

        `deadline` is a `time.monotonic()`, `interval` the tokens that outputs should have,
        `readers` those of the choices that say where stop strings count (left out: everywhere).
        Errors: `InvalidRequestError`, `ContextLengthError`, `OverloadedError`, `UnavailableError`;
        of what it raises later `OpenRequest` tells.
        """
        self.check_alive()
        sampling = admit(prompt_token_ids, sampling, info=self.info)
        tokens = self.prefill_tokens(len(prompt_token_ids), sampling, num_choices=sampling.n)
        self.check_room(tokens, owner=owner)
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        choices = [sampling.of_choice(index, seed=seed) for index in range(sampling.n)]
        prompt = tuple(prompt_token_ids)
        requests = [
            GenerateRequest(
                request_id=wire.sequence_id(request_id, index, server=self._index),
                prompt_token_ids=prompt,
                sampling=choice,
                priority=priority,
                tenant=owner.tenant,
                cache_salt=cache_salt,
            )
            for index, choice in enumerate(choices)
        ]
        streams = {
            request.request_id: ChoiceStream(
                self.tokenizer,
                request.sampling,
                info=self.info,
                request_id=request_id,
                index=index,
                num_prompt_tokens=len(prompt),
                reader=None if readers is None else readers[index],
            )
            for index, request in enumerate(requests)
        }
        return OpenRequest(
            self,
            requests,
            streams,
            deadline=deadline,
            observer=observer,
            interval=interval,
            owner=owner,
        )

    def enter(self, generation: OpenRequest, requests: Sequence[GenerateRequest]) -> None:
        """Take the sequences of a request in, which share a prompt. Errors: `UnavailableError`,
        `OverloadedError`; the engine may have died, and other requests may have come, since
        `generate`."""
        self.check_alive()
        owner, first = generation.owner, requests[0]
        tokens = self.prefill_tokens(
            len(first.prompt_token_ids), first.sampling, num_choices=len(requests)
        )
        self.check_room(tokens, owner=owner)
        for request, num_tokens in zip(requests, tokens, strict=True):
            self._open[request.request_id] = generation
            self.admission.enter(request.request_id, num_tokens, tenant=owner.tenant)

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Send sequences that were taken in to the engine."""
        for request in requests:
            assert self._channel is not None
            self._channel.send(wire.AddRequest(request))

    def leave(self, sequence_ids: Sequence[str], *, abort: bool) -> None:
        """Sequences that are over here; `abort`: the engine must be told."""
        now = time.monotonic()
        known = [
            sequence_id
            for sequence_id in sequence_ids
            if self._open.pop(sequence_id, None) is not None
        ]
        for sequence_id in known:
            self.admission.leave(sequence_id, now=now)
        if abort and known and self._channel is not None:
            self._channel.send(wire.AbortRequests(known))

    def abort(self, is_meant: Callable[[Owner], bool]) -> int:
        """End the open sequences that are meant, by their owners, with finish_reason "abort"; how
        many there are, without those that were told to end before.
        """
        meant = {
            sequence_id: generation
            for sequence_id, generation in self._open.items()
            if not generation.is_told_to_end and is_meant(generation.owner)
        }
        if meant and self._channel is not None:
            self._channel.send(wire.AbortRequests(list(meant)))
            for generation in dict.fromkeys(meant.values()):
                generation.abort()
        return len(meant)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, but for what running requests hold. Errors: those of
        `check_alive`.
        """
        self.check_alive()
        assert self._channel is not None
        self._channel.send(wire.ResetPrefixCache())

    def on_engine_ready(self, channel: EngineChannel, info: wire.ModelInfo) -> None:
        """An engine is there."""
        self.info = info
        self.admission = Admission(
            max_running=info.max_num_seqs,
            max_waiting=self._options.max_queued_requests,
            max_waiting_tokens=self._options.max_queued_tokens,
            pool_tokens=info.num_kv_blocks * info.block_size,
            numbers=self._numbers,
            index=self._index,
        )
        self._channel = channel
        self.restart_count += self._was_ready
        self._was_ready = True

    def on_engine_lost(self, reason: str, *, ready_in: float) -> None:
        """The engine is gone: every open request ends with `EngineDeadError`. Another one is
        expected in `ready_in` seconds.
        """
        self._death = reason
        self._next_ready = time.monotonic() + ready_in
        if self._channel is not None and self._channel.stats is not None:
            self.past_stats.append(self._channel.stats)
        self._channel = None
        self._fail_open()

    def on_engine_failed(self, reason: str) -> None:
        """The engine stays dead."""
        self.failed.set_result(reason)

    def stop(self, reason: str = "the engine was stopped") -> None:
        """Take no more requests; every open one ends with `EngineDeadError`."""
        self._is_stopped = True
        self._death = reason
        self._fail_open()

    def receive(self, steps: Sequence[wire.StepOutputs]) -> None:
        """Take the steps that have arrived together; each sequence gets what they brought it in one
        go.
        """
        for step in steps:
            for sequence_id, at in step.admitted:
                generation = self._open.get(sequence_id)
                if generation is not None:
                    self.admission.start(sequence_id)
                    generation.started(at)
            if self.on_steps is not None:
                self.on_steps(step.step_tokens)
        for update in steps[0].updates if len(steps) == 1 else _merged(steps):
            generation = self._open.get(update.request_id)
            if generation is not None:
                generation.push(update)

    def _fail_open(self) -> None:
        """End every open request: the engine is gone."""
        open_requests, self._open = self._open, {}
        now = time.monotonic()
        for sequence_id in open_requests:
            self.admission.leave(sequence_id, now=now)
        for generation in dict.fromkeys(open_requests.values()):
            generation.fail(EngineDeadError(self._death, code="engine_dead"))


def _merged(steps: Sequence[wire.StepOutputs]) -> Iterable[SequenceUpdate]:
    """One update for each sequence."""
    merged: dict[str, SequenceUpdate] = {}
    for step in steps:
        for update in step.updates:
            earlier = merged.get(update.request_id)
            merged[update.request_id] = update if earlier is None else joined(earlier, update)
    return merged.values()
