"""Messages between server processes and the engine process, as MessagePack."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from negamax.base.supervision import ParentPulse
from negamax.config.generation import SamplingDefaults
from negamax.config.vision import VisionSpec
from negamax.options.engine import EngineOptions
from negamax.options.speculation import SpeculationConfig
from negamax.scheduler.request import GenerateRequest
from negamax.scheduler.step import SequenceUpdate

BEAT_SECONDS = 0.2  # between two heartbeats


@dataclass(frozen=True)
class EngineAddress:
    """The sockets of an engine process, two for each server process, in a private folder."""

    folder: str

    def requests(self, server: int) -> str:
        return f"ipc://{self.folder}/requests-{server}"

    def outputs(self, server: int) -> str:
        return f"ipc://{self.folder}/outputs-{server}"


class TransferInfo(msgspec.Struct, frozen=True):
    """How an engine exchanges prompts with others."""

    engine_id: str  # new at each start
    role: str  # of `options.transfer.ROLES`
    host: str
    port: int
    num_ranks: int
    allowed_hosts: tuple[str, ...]  # that requests may name, as `allows_host` takes them


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a started engine that the front end needs."""

    model: str  # folder, hub id or embedded name, as given
    served_model_name: str
    architecture: str  # architecture in config.json
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    sampling_defaults: SamplingDefaults
    max_logprobs: int
    max_num_seqs: int
    block_size: int  # tokens per KV block
    num_kv_blocks: int  # per data-parallel rank, like max_num_seqs
    device: str
    dtype: str
    data_parallel_size: int = 1
    memory: str = ""  # GPU memory of cache and graphs, for people
    speculation: SpeculationConfig | None = None
    host_block_bytes: int = 0  # of a KV block in main memory, on all ranks that share its number
    shape: dict[str, Any] = {}  # the serving shape (`engine.shape`)
    transfer: TransferInfo | None = None  # None: all prompts are computed here
    vision: VisionSpec | None = None  # of the loaded tower; None: requests have no images


class ExpertStats(msgspec.Struct, frozen=True, array_like=True):
    # of recent steps: mean tokens per rank over those of the busiest one, each summed over layers
    balancedness: float = 1.0
    num_rebalances: int = 0  # complete, with moved experts
    num_moved: int = 0  # experts moved between slots

    @classmethod
    def of(cls, parts: "Sequence[ExpertStats]") -> "ExpertStats":
        """Sum several engines; balancedness is that of the least balanced one."""
        return cls(
            min(part.balancedness for part in parts),
            sum(part.num_rebalances for part in parts),
            sum(part.num_moved for part in parts),
        )


class RankStats(msgspec.Struct, frozen=True, array_like=True):
    """A data-parallel rank after a step. Counters rise from the start."""

    num_running: int
    num_waiting: int
    num_kv_blocks: int
    num_free_kv_blocks: int  # without a live sequence, cached ones included
    step_count: int
    preemption_count: int
    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    num_drafts: int = 0  # speculation: proposals,
    num_draft_tokens: int = 0  # draft tokens,
    num_accepted_tokens: int = 0  # accepted draft tokens,
    accepted_per_position: tuple[int, ...] = ()  # and those by position
    num_host_blocks: int = 0  # KV blocks in main memory,
    num_used_host_blocks: int = 0  # those with content,
    num_host_queries: int = 0  # tokens that were looked up there,
    num_host_hits: int = 0  # tokens that were found,
    num_host_stores: int = 0  # blocks copied there,
    num_host_loads: int = 0  # back,
    num_host_evictions: int = 0  # and those that made room
    num_file_blocks: int = 0  # KV blocks that files hold,
    num_used_file_blocks: int = 0  # those with content,
    num_file_reads: int = 0  # blocks that were read,
    num_file_writes: int = 0  # and written
    num_file_bytes_read: int = 0
    num_file_bytes_written: int = 0
    num_file_evictions: int = 0  # files deleted to keep the bound
    num_file_errors: int = 0  # damaged files, and errors of the system
    num_kv_event_batches: int = 0  # events of the prefix cache: batches sent,
    num_dropped_kv_events: int = 0  # and steps whose changes were dropped
    num_remote_prefills: int = 0  # requests whose prompts came from other engines,
    num_failed_prefills: int = 0  # those whose prompts did not arrive,
    num_local_prefills: int = 0  # those that named no other engine,
    num_pulled_blocks: int = 0  # KV blocks read from other engines,
    num_expired_leases: int = 0  # prompts for other engines that none has read,
    num_leases: int = 0  # and those that are kept for them


class EngineStats(RankStats, frozen=True, array_like=True):
    """All data-parallel ranks of an engine together."""

    device_seconds: float = 0.0  # GPU time in steps
    idle_seconds: float = 0.0  # GPU time between steps
    prefill_tokens: int = 0  # computed prompt tokens, in rows of more than one
    experts: ExpertStats | None = None  # None: not counted
    at: float = 0.0  # monotonic seconds: steps and heartbeats use different sockets
    ranks: tuple[RankStats, ...] = ()  # by rank, if there are several

    @property
    def by_rank(self) -> Sequence[RankStats]:
        """Statistics by data-parallel rank. Requests that wait for any rank count at the first."""
        return self.ranks or (self,)


_GAUGES = dict.fromkeys(
    (
        *("num_running", "num_waiting", "num_kv_blocks", "num_free_kv_blocks"),
        *("num_host_blocks", "num_used_host_blocks", "num_file_blocks", "num_used_file_blocks"),
        "num_leases",
    ),
    0,
)


def sum_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """Sum several engines, without ranks; one engine is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    experts = [part.experts for part in parts if part.experts is not None]
    return EngineStats(
        **sum_fields(EngineStats, parts),
        experts=ExpertStats.of(experts) if experts else None,
        at=max((part.at for part in parts), default=0.0),
    )


def sum_generations(parts: Sequence[EngineStats]) -> EngineStats:
    """Sum an engine and its predecessors, rank by rank."""
    if len(parts) == 1:
        return parts[0]
    ranks = zip(*(part.ranks for part in parts if part.ranks), strict=True)
    sums = tuple(RankStats(**sum_fields(RankStats, same)) for same in ranks)
    return msgspec.structs.replace(sum_stats(parts), ranks=sums)


def sum_fields(kind: type[RankStats], parts: Sequence[RankStats]) -> dict[str, Any]:
    accepted = itertools.zip_longest(*(part.accepted_per_position for part in parts), fillvalue=0)
    numbers = {
        name: sum(getattr(part, name) for part in parts)
        for name in kind.__struct_fields__
        if name not in ("accepted_per_position", "at", "experts", "ranks")
    }
    return {**numbers, "accepted_per_position": tuple(map(sum, accepted))}


def drop_gauges(stats: EngineStats) -> EngineStats:
    """Keep only the counters of an engine that is gone."""
    ranks = tuple(msgspec.structs.replace(rank, **_GAUGES) for rank in stats.ranks)
    experts = stats.experts and msgspec.structs.replace(stats.experts, balancedness=1.0)
    return msgspec.structs.replace(stats, **_GAUGES, ranks=ranks, experts=experts)


def sequence_id(request_id: str, choice: int, *, server: int) -> str:
    """The id of a choice in the engine, unique over all server processes."""
    return f"{request_id}/{choice}@{server}" if server else f"{request_id}/{choice}"


def server_of(sequence_id: str) -> int:
    return int(sequence_id[sequence_id.rfind("/") :].partition("@")[2] or 0)


class StartEngine(msgspec.Struct, frozen=True):
    """The first frame, from the server process that starts the engine."""

    options: EngineOptions
    num_servers: int  # server processes, each with its own sockets
    parent: ParentPulse | None = None  # to be watched
    replica: int = 0


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    request: GenerateRequest


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    request_ids: list[str]


class AbortServer(msgspec.Struct, frozen=True, tag="abort-server"):
    """End all requests of a dead server process."""

    server: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Empty the prefix cache."""


RecordAction = Literal["start", "stop", "dump"]


class RecordExperts(msgspec.Struct, frozen=True, tag="record_experts"):
    """Start, stop or dump a record of experts. `ExpertRecord` answers with `number`."""

    server: int
    number: int
    action: RecordAction


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    pass


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    info: ModelInfo


class StepOutputs(msgspec.Struct, frozen=True, tag="outputs"):
    updates: list[SequenceUpdate]
    stats: EngineStats
    # newly running sequences, with the `time.monotonic()` of their first step
    admitted: list[tuple[str, float]] = []
    step_tokens: list[int] = []  # tokens of each step since the last message


class ExpertDump(msgspec.Struct, frozen=True):
    """A record of experts and their current placement."""

    logical_count: list[list[int]]  # selections by layer and expert
    physical_to_logical_map: list[list[int]]  # expert by layer and slot
    balancedness: float  # as in `ExpertStats`, of the record with the current placement


class ExpertRecord(msgspec.Struct, frozen=True, tag="expert_record"):
    number: int
    dump: ExpertDump | None = None
    problem: str | None = None  # why it failed


class Heartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """Sent every `BEAT_SECONDS` by a thread: the process runs; whether its loop and ranks do."""

    num_rounds: int  # rounds of the loop since the start
    is_idle: bool  # the loop waits for a message
    stats: EngineStats
    rank: int = 0  # rank without a heartbeat for the longest time
    rank_silence: float = 0.0  # seconds since that heartbeat


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not start or had to stop. `exit_code`: for a command line."""

    message: str
    exit_code: int


ToEngine = AddRequest | AbortRequests | AbortServer | ResetPrefixCache | RecordExperts | Shutdown
FromEngine = EngineReady | StepOutputs | ExpertRecord | Heartbeat | EngineFailed

encoder = msgspec.msgpack.Encoder()
start_decoder: msgspec.msgpack.Decoder[StartEngine] = msgspec.msgpack.Decoder(StartEngine)
to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
