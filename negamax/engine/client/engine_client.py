"""A server process's side of its engines: admits requests, says which engine is to answer them,
and refuses what comes while none can.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from negamax.base.errors import EngineDeadError, UnavailableError
from negamax.base.shared_numbers import SharedNumbers
from negamax.engine import wire
from negamax.engine.client.admission import NUM_COLUMNS as QUEUE_COLUMNS
from negamax.engine.client.admission import Admission, prefill_tokens
from negamax.engine.client.connection import EngineChannel
from negamax.engine.client.open_request import NOBODY, Observer, OpenRequest, Owner
from negamax.engine.client.output import ChoiceStream, TextReader, admit
from negamax.engine.client.placement import (
    MAX_BLOCKS,
    NUM_COLUMNS,
    PrefixTable,
    ReplicaLoad,
    tags_of,
)
from negamax.engine.client.replica import Replica
from negamax.engine.core.source import locate
from negamax.options.engine import EngineOptions
from negamax.options.parallel import ParallelOptions
from negamax.scheduler.request import GenerateRequest, SamplingParams
from negamax.text.chat_template import ChatTemplate
from negamax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class SharedQueue:
    """What the server processes in front of the same engines know together."""

    numbers: SharedNumbers  # of `Admission`
    loads: SharedNumbers  # of `ReplicaLoad`
    prefixes: SharedNumbers  # of `PrefixTable`

    @classmethod
    def of(
        cls, num_replicas: int, *, num_servers: int = 1, folder: Path | None = None
    ) -> SharedQueue:
        """In files of `folder`; None: for one process."""

        def shared(name: str, num_columns: int, num_rows: int) -> SharedNumbers:
            path = None if folder is None else folder / name
            return SharedNumbers(num_columns, num_rows=num_rows, path=path)

        return cls(
            numbers=shared("queue", QUEUE_COLUMNS, num_servers),
            loads=shared("loads", NUM_COLUMNS * num_replicas, num_servers),
            prefixes=shared("prefixes", MAX_BLOCKS, num_replicas),
        )

    def clear(self, server: int) -> None:
        """Server process `server` is gone, and nothing of it is open."""
        self.numbers.clear(server)
        self.loads.clear(server)


class AsyncEngine:
    """The client of the engines of a server, and the requests they are serving for this process.
    Single writer: the event loop it was made on.

    Engines come and go; `supervisor` sees to that. Where several server processes share them, each
    has a client with an `index` of its own, and they count what is open together. A new request
    goes to the replica where it costs least (`placement`), unless it names one.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        index: int,
        queue: SharedQueue | None,
    ) -> None:
        """Use `AsyncEngine.create`."""
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.info: wire.ModelInfo  # what holds for every engine
        # why all of them stay dead
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        queue = queue or SharedQueue.of(options.num_replicas)
        self.admission = Admission(
            max_running=0,
            max_waiting=options.max_queued_requests,
            max_waiting_tokens=options.max_queued_tokens,
            pool_tokens=0,
            numbers=queue.numbers,
            index=index,
        )
        self.replicas = [
            Replica(
                replica,
                admission=self.admission,
                load=ReplicaLoad(queue.loads, replica=replica, index=index),
            )
            for replica in range(options.num_replicas)
        ]
        self._options = options
        self._index = index
        self._prefixes = PrefixTable(queue.prefixes)
        self._seeds = random.Random(options.seed + index)
        self._stopped: str | None = None  # why it takes no more requests

    @classmethod
    async def create(
        cls,
        options: EngineOptions,
        *,
        chat_template: Path | None = None,
        index: int = 0,
        queue: SharedQueue | None = None,
    ) -> AsyncEngine:
        """A client without an engine, which finds (and if need be downloads) the model's tokenizer
        and template.

        `chat_template` is a file that replaces the checkpoint's own; `queue` is shared by the
        clients of the same engines, and `index` is the row of this one. Errors: `ConfigError` and
        its kin.
        """
        source = await asyncio.to_thread(locate, options)
        return cls(
            options,
            tokenizer=await asyncio.to_thread(Tokenizer.from_folder, source.tokenizer_folder),
            chat_template=ChatTemplate.from_folder(source.tokenizer_folder, chat_template),
            index=index,
            queue=queue,
        )

    @property
    def alive(self) -> bool:
        """Whether requests can be served: an engine runs, and no end of it is known."""
        return self._stopped is None and any(replica.alive for replica in self.replicas)

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks of all replicas: a request may name one of them."""
        return self.info.data_parallel_size * len(self.replicas)

    def check_responsive(self) -> None:
        """Refuse while of every engine that runs, it or one of its ranks has sent no heartbeat
        in the last seconds: `UnavailableError`.
        """
        self.check_alive()
        silences = [replica.silence for replica in self.replicas if replica.alive]
        if None not in silences:
            raise UnavailableError(
                f"{silences[0]} sends no heartbeat", code="engine_silent", retry_after=1.0
            )

    @property
    def stats(self) -> wire.EngineStats:
        """The latest statistics of all replicas together, as each has them."""
        return wire.sum_of([replica.stats for replica in self.replicas])

    @property
    def parallel(self) -> ParallelOptions:
        """How the model is split over the engine's ranks."""
        return self._options.parallel

    @property
    def num_open(self) -> int:
        """Sequences that run or wait for this process."""
        return sum(len(replica.open) for replica in self.replicas)

    def check_alive(self) -> None:
        """Refuse while no engine runs: `UnavailableError`, with the time after which to come back,
        or `EngineDeadError` where none is to come.
        """
        if self._stopped is not None:
            raise EngineDeadError(self._stopped, code="engine_dead")
        if not any(replica.alive for replica in self.replicas):
            coming = [replica for replica in self.replicas if not replica.has_failed]
            reasons = [replica.unavailable() for replica in coming or self.replicas]
            raise min(reasons, key=lambda reason: reason.retry_after or 0.0)

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
        data_parallel_rank: int | None = None,
        deadline: float | None = None,
        observer: Observer | None = None,
        interval: int = 1,
        readers: Sequence[TextReader] | None = None,
        owner: Owner = NOBODY,
    ) -> OpenRequest:
        """Continue a prompt; the outputs of the `n` choices come interleaved as they are generated.
        Run it, or close it.

        `data_parallel_rank` is one of `num_ranks`, those of each replica behind each other; None:
        any. `deadline` is a `time.monotonic()`, `interval` the tokens that outputs should have,
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
        replica = rank = None
        if data_parallel_rank is not None:
            replica, rank = divmod(data_parallel_rank, self.info.data_parallel_size)
        requests = [
            GenerateRequest(
                request_id=wire.sequence_id(request_id, index, server=self._index),
                prompt_token_ids=prompt,
                sampling=choice,
                priority=priority,
                tenant=owner.tenant,
                cache_salt=cache_salt,
                data_parallel_rank=rank,
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
            replica=replica,
        )

    def enter(self, generation: OpenRequest, requests: Sequence[GenerateRequest]) -> Replica:
        """Take the sequences of a request in, which share a prompt: the replica they run on.
        Errors: `UnavailableError`, `OverloadedError`; engines may have died, and other requests may
        have come, since `generate`."""
        self.check_alive()
        first = requests[0]
        tokens = self.prefill_tokens(
            len(first.prompt_token_ids), first.sampling, num_choices=len(requests)
        )
        self.check_room(tokens, owner=generation.owner)
        replica, pending = self._place(first, named=generation.replica)
        replica.enter(generation, requests, tokens, pending=pending)
        return replica

    def abort(self, is_meant: Callable[[Owner], bool]) -> int:
        """End the open sequences that are meant, by their owners, with finish_reason "abort"; how
        many there are, without those that were told to end before.
        """
        return sum(replica.abort(is_meant) for replica in self.replicas if replica.alive)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix caches, but for what running requests hold. Errors: those of
        `check_alive`.
        """
        self.check_alive()
        for replica in self.replicas:
            replica.send(wire.ResetPrefixCache())
            self._prefixes.discard(replica.index)

    async def record_experts(self, action: wire.RecordAction) -> list[wire.ExpertDump]:
        """Begin or end to record how often each expert is chosen, or what each replica recorded.
        Errors: those of `check_alive`; `InvalidRequestError` where nothing is counted or recorded.
        """
        self.check_alive()
        asked = (replica.record_experts(action, server=self._index) for replica in self.replicas)
        return [dump for dump in await asyncio.gather(*asked) if dump is not None]

    def on_engine_ready(self, replica: int, channel: EngineChannel, info: wire.ModelInfo) -> None:
        """An engine is there."""
        self.replicas[replica].on_engine_ready(channel, info)
        num_blocks = info.num_kv_blocks * info.data_parallel_size
        self._prefixes.resize(replica, num_blocks=num_blocks)
        if self._index == 0:  # for all server processes
            self._prefixes.discard(replica)
        infos = [each.info for each in self.replicas if each.info is not None]
        self.info = msgspec.structs.replace(
            infos[0],
            max_model_len=min(each.max_model_len for each in infos),
            num_kv_blocks=min(each.num_kv_blocks for each in infos),
        )
        self._resize()

    def on_engine_lost(self, replica: int, reason: str, *, ready_in: float) -> None:
        """An engine is gone: its open requests end with `EngineDeadError`. Another one is expected
        in `ready_in` seconds.
        """
        self.replicas[replica].on_engine_lost(reason, ready_in=ready_in)
        self._resize()

    def on_engine_failed(self, replica: int, reason: str) -> None:
        """An engine stays dead."""
        self.replicas[replica].on_engine_failed(reason)
        if all(each.has_failed for each in self.replicas):
            self.failed.set_result(reason)

    def stop(self, reason: str = "the engine was stopped") -> None:
        """Take no more requests; every open one ends with `EngineDeadError`."""
        self._stopped = reason
        for replica in self.replicas:
            replica.fail_open(reason)

    def _resize(self) -> None:
        """Admit what the engines that run have room for."""
        infos = [
            replica.info for replica in self.replicas if replica.alive and replica.info is not None
        ]
        if infos:
            self.admission.resize(
                max_running=sum(info.max_num_seqs * info.data_parallel_size for info in infos),
                pool_tokens=sum(
                    info.num_kv_blocks * info.block_size * info.data_parallel_size for info in infos
                ),
            )

    def _place(self, request: GenerateRequest, *, named: int | None) -> tuple[Replica, int]:
        """Where a request costs least, or the replica it names, and how many tokens of its prompt
        that one has to compute, as far as is known here. Errors: `UnavailableError`,
        `EngineDeadError` for a named one that does not run.
        """
        if len(self.replicas) == 1:
            return self.replicas[0], 0  # there is nothing to compare
        running = [replica for replica in self.replicas if replica.alive]
        possible = [replica for replica in running if replica.silence is None] or running
        if named is not None:
            possible = [self.replicas[named]]
            if not possible[0].alive:
                raise possible[0].unavailable()
        num_tokens, info = len(request.prompt_token_ids), self.info
        tags = []
        if self._options.enable_prefix_caching:
            tags = tags_of(request, block_size=info.block_size)
        own = [
            num_tokens - info.block_size * self._prefixes.matches(tags, replica.index)
            for replica in possible
        ]
        costs = [
            replica.load.cost(tokens, num_ranks=info.data_parallel_size)
            for replica, tokens in zip(possible, own, strict=True)
        ]
        best = costs.index(min(costs))
        self._prefixes.add(tags, possible[best].index)
        return possible[best], own[best]
