"""Admit requests in a server process, and choose an engine for each request."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from negamax.base.errors import EngineDeadError, UnavailableError
from negamax.base.log import get_logger
from negamax.base.shared_numbers import SharedNumbers
from negamax.engine import wire
from negamax.engine.client.admission import NUM_COLUMNS as QUEUE_COLUMNS
from negamax.engine.client.admission import Admission
from negamax.engine.client.connection import EngineChannel
from negamax.engine.client.open_request import NOBODY, Observer, OpenRequest, Owner
from negamax.engine.client.output import TextReader, admit, split_choices
from negamax.engine.client.placement import (
    MAX_BLOCKS,
    NUM_COLUMNS,
    TAG_SHIFT,
    PrefixTable,
    ReplicaLoad,
    choose_replica,
    hash_blocks,
)
from negamax.engine.client.replica import Replica
from negamax.engine.core.source import locate
from negamax.options.engine import EngineOptions
from negamax.scheduler.request import GenerateRequest, ImageInput, RemotePrompt, SamplingParams
from negamax.text.chat_template import ChatTemplate
from negamax.text.tokenizer import Tokenizer

logger = get_logger(__name__)


@dataclass(frozen=True)
class SharedQueue:
    """Tables of numbers that all server processes of a server share."""

    numbers: SharedNumbers  # Numbers of open and waiting sequences, for `Admission`.
    loads: SharedNumbers  # Load of each replica, for `ReplicaLoad`.
    prefixes: SharedNumbers  # Hashes of the prompt blocks sent to each replica, for `PrefixTable`.

    @classmethod
    def of(
        cls, num_replicas: int, *, num_servers: int = 1, folder: Path | None = None
    ) -> "SharedQueue":
        """If `folder` is set, share the tables through files; else only this process uses them."""

        def shared(name: str, num_columns: int, num_rows: int) -> SharedNumbers:
            path = None if folder is None else folder / name
            return SharedNumbers(num_columns, num_rows=num_rows, path=path)

        return cls(
            numbers=shared("queue", QUEUE_COLUMNS, num_servers),
            loads=shared("loads", NUM_COLUMNS * num_replicas, num_servers),
            prefixes=shared("prefixes", MAX_BLOCKS, num_replicas),
        )

    def clear(self, server: int) -> None:
        self.numbers.clear(server)
        self.loads.clear(server)


class AsyncEngine:
    """The engines of a server, and the requests that this process sends to the engines.

    Several server processes, each with an `index`, may share the engines. A request without a named
    replica goes to the replica with the lowest cost. Only the event loop may use an instance.
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
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.info: wire.ModelInfo  # Model properties; each limit is the smallest of all engines.
        # `failed` receives a reason when all engines are dead and will not be restarted.
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
        self.parallel = options.parallel
        self._options = options
        self._index = index
        self._prefixes = PrefixTable(queue.prefixes)
        self._seeds = random.Random(options.seed + index)
        self._stopped: str | None = None  # Reason why requests are no longer accepted.

    @classmethod
    async def create(
        cls,
        options: EngineOptions,
        *,
        chat_template: Path | None = None,
        index: int = 0,
        queue: SharedQueue | None = None,
    ) -> "AsyncEngine":
        """Create a client without engines. Find or download the model's tokenizer and template.

        The file `chat_template` replaces the checkpoint's template. All server processes share
        `queue`. This process writes row `index` of each table in `queue`. Raises `ConfigError`.
        """
        source = await asyncio.to_thread(locate, options)
        template = ChatTemplate.from_folder(source.tokenizer_folder, chat_template)
        if template is None and index == 0:
            logger.warning(
                "%s has no chat template, so chats are refused; set one with --chat-template FILE",
                source.name,
            )
        return cls(
            options,
            tokenizer=await asyncio.to_thread(Tokenizer.from_folder, source.tokenizer_folder),
            chat_template=template,
            index=index,
            queue=queue,
        )

    @property
    def alive(self) -> bool:
        return self._stopped is None and any(replica.alive for replica in self.replicas)

    @property
    def num_ranks(self) -> int:
        """Return the number of data-parallel ranks of all replicas. A request may select a rank."""
        return self.info.data_parallel_size * len(self.replicas)

    def check_responsive(self) -> None:
        """Raise `UnavailableError` if every running engine, or a rank of it, sends no heartbeat."""
        self.check_alive()
        silences = [replica.silence for replica in self.replicas if replica.alive]
        if None not in silences:
            raise UnavailableError(
                f"{silences[0]} sends no heartbeat", code="engine_silent", retry_after=1.0
            )

    @property
    def stats(self) -> wire.EngineStats:
        return wire.sum_stats([replica.stats for replica in self.replicas])

    @property
    def num_open(self) -> int:
        return sum(len(replica.open) for replica in self.replicas)

    def check_alive(self) -> None:
        """Raise `UnavailableError` if no engine runs, or `EngineDeadError` if none will restart."""
        if self._stopped is not None:
            raise EngineDeadError(self._stopped, code="engine_dead")
        if not any(replica.alive for replica in self.replicas):
            coming = [replica for replica in self.replicas if not replica.has_failed]
            reasons = [replica.unavailable() for replica in coming or self.replicas]
            raise min(reasons, key=lambda reason: reason.retry_after or 0.0)

    def check_room(self, tokens: Sequence[int], *, owner: Owner) -> None:
        """Check that the queue has room for sequences with `tokens[i]` prompt tokens."""
        sharer = owner.tenant if owner.shares_queue else None
        self.admission.check(len(tokens), sum(tokens), now=time.monotonic(), sharer=sharer)

    def prefill_tokens(
        self, num_prompt_tokens: int, sampling: SamplingParams, *, num_choices: int
    ) -> list[int]:
        """Return how many prompt tokens each choice computes."""
        shares_prompt = self._options.enable_prefix_caching and sampling.prompt_logprobs is None
        others = 1 if shares_prompt else num_prompt_tokens  # 1: later choices use KV of choice 0.
        return [num_prompt_tokens, *[others] * (num_choices - 1)]

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
        lease_id: str = "",
        remote: RemotePrompt | None = None,
        images: Sequence[ImageInput] = (),
    ) -> OpenRequest:
        """Admit a request to continue a prompt. The caller must run or close the `OpenRequest`.

        The outputs of the `n` choices arrive interleaved. All outputs except a choice's first and
        last have at least `interval` tokens. `data_parallel_rank` is an index of the ranks of all
        replicas, or None for any rank. `deadline` is in monotonic seconds. `readers` may contain a
        reader per choice, which finds stop strings. Without readers, a stop string anywhere ends a
        choice. `lease_id`, `remote` and `images` are fields of `GenerateRequest`. Raises
        `InvalidRequestError`, `ContextLengthError`, `OverloadedError` or `UnavailableError`.
        """
        self.check_alive()
        sampling = admit(prompt_token_ids, sampling, info=self.info, images=images)
        tokens = self.prefill_tokens(len(prompt_token_ids), sampling, num_choices=sampling.n)
        self.check_room(tokens, owner=owner)
        replica = rank = None
        if data_parallel_rank is not None:
            replica, rank = divmod(data_parallel_rank, self.info.data_parallel_size)
        prompt = GenerateRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt_token_ids),
            sampling=sampling,
            priority=priority,
            tenant=owner.tenant,
            cache_salt=cache_salt,
            data_parallel_rank=rank,
            lease_id=lease_id,
            remote=remote,
            images=list(images),
        )
        choices = split_choices(
            prompt,
            self.tokenizer,
            info=self.info,
            seeds=self._seeds,
            readers=readers,
            server=self._index,
        )
        return OpenRequest(
            self,
            choices,
            deadline=deadline,
            observer=observer,
            interval=interval,
            owner=owner,
            replica_index=replica,
        )

    def enter(self, request: OpenRequest) -> Replica:
        """Choose a replica, and register `request` with it. Raises the errors of `generate`."""
        self.check_alive()
        first = request.requests[0]
        tokens = self.prefill_tokens(
            len(first.prompt_token_ids), first.sampling, num_choices=len(request.requests)
        )
        self.check_room(tokens, owner=request.owner)
        replica, pending = self._place(first, named=request.replica_index)
        replica.enter(request, tokens, pending=pending)
        return replica

    def abort(self, is_meant: Callable[[Owner], bool]) -> int:
        """Abort the open sequences of owners that `is_meant` accepts, and count the sequences."""
        return sum(replica.abort(is_meant) for replica in self.replicas if replica.alive)

    def reset_prefix_cache(self) -> None:
        """Remove unused blocks from all prefix caches. Raises the errors of `check_alive`."""
        self.check_alive()
        for replica in self.replicas:
            replica.send(wire.ResetPrefixCache())
            self._prefixes.discard(replica.index)

    async def record_experts(self, action: wire.RecordAction) -> list[wire.ExpertDump]:
        """Start, stop or dump a recording of expert counts. Raises `InvalidRequestError`."""
        self.check_alive()

        def make(number: int) -> wire.Record:
            return wire.RecordExperts(self._index, number, action)

        dumps = await asyncio.gather(*(replica.record(make) for replica in self.replicas))
        return [dump for dump in dumps if dump is not None]

    async def record_trace(self, path: str | None, *, num_steps: int = 0) -> None:
        """Let each rank of each replica record its next steps in a trace file whose name starts
        with `path`. If `path` is None, write the started trace. Raises `InvalidRequestError`.
        """
        self.check_alive()

        def make(replica: int, number: int) -> wire.Record:
            own = path and f"{path}-replica{replica}"
            return wire.RecordTrace(self._index, number, own, num_steps)

        asked = (replica.record(partial(make, replica.index)) for replica in self.replicas)
        await asyncio.gather(*asked)

    def on_engine_ready(self, replica: int, channel: EngineChannel, info: wire.ModelInfo) -> None:
        self.replicas[replica].on_engine_ready(channel, info)
        self._prefixes.resize(replica, num_blocks=info.num_kv_blocks * info.data_parallel_size)
        if self._index == 0:  # The first server process clears the shared table.
            self._prefixes.discard(replica)
        infos = [each.info for each in self.replicas if each.info is not None]
        self.info = msgspec.structs.replace(
            infos[0],
            max_model_len=min(each.max_model_len for each in infos),
            num_kv_blocks=min(each.num_kv_blocks for each in infos),
        )
        self._resize()

    def on_engine_lost(self, replica: int, reason: str, *, ready_in: float) -> None:
        """End the open requests of a lost engine. A new engine should be ready in `ready_in` s."""
        self.replicas[replica].on_engine_lost(reason, ready_in=ready_in)
        self._resize()

    def on_engine_failed(self, replica: int, reason: str) -> None:
        self.replicas[replica].on_engine_failed(reason)
        if all(each.has_failed for each in self.replicas):
            self.failed.set_result(reason)

    def stop(self, reason: str = "the engine was stopped") -> None:
        """Refuse new requests, and end every open request with `EngineDeadError`."""
        self._stopped = reason
        for replica in self.replicas:
            replica.fail_open(reason)

    def _resize(self) -> None:
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
        """Return a replica, and the number of prompt tokens that the replica probably computes.

        If `named` is None, the replica with the lowest cost for the request is returned. Raises
        `UnavailableError` or `EngineDeadError` if the named replica does not run.
        """
        if len(self.replicas) == 1:
            return self.replicas[0], 0  # A single replica needs no comparison of costs.
        running = [replica for replica in self.replicas if replica.alive]
        possible = [replica for replica in running if replica.silence is None] or running
        if named is not None:
            possible = [self.replicas[named]]
            if not possible[0].alive:
                raise possible[0].unavailable()
        prompt, size, tags = request.prompt_token_ids, self.info.block_size, list[int]()
        if self._options.enable_prefix_caching:
            hashes = hash_blocks(prompt, block_size=size, salt=request.cache_salt)
            tags = [each >> TAG_SHIFT for each in hashes]
        best, own = choose_replica(
            [replica.load for replica in possible],
            cached=[size * self._prefixes.matches(tags, replica.index) for replica in possible],
            num_tokens=len(prompt),
            num_ranks=self.info.data_parallel_size,
        )
        self._prefixes.add(tags, possible[best].index)
        return possible[best], own
