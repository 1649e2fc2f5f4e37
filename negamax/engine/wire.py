"""Messages between server processes and the engine process, encoded as MessagePack."""

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

BEAT_SECONDS = 0.2  # Time between two heartbeats of the engine.


@dataclass(frozen=True)
class EngineAddress:
    """The paths of an engine's sockets in a private folder, two for each server process."""

    folder: str

    def requests(self, server: int) -> str:
        return f"ipc://{self.folder}/requests-{server}"

    def outputs(self, server: int) -> str:
        return f"ipc://{self.folder}/outputs-{server}"


class TransferInfo(msgspec.Struct, frozen=True):
    """Settings with which an engine exchanges KV blocks of prompts with other engines."""

    engine_id: str  # Random id that the engine draws at its start.
    role: str  # "kv_producer", "kv_consumer" or "kv_both".
    host: str
    port: int
    num_ranks: int
    allowed_hosts: tuple[str, ...]  # Hosts of engines from which requests may read prompts.


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a started engine that the server needs."""

    model: str  # Folder, hub id or built-in name, as set by the user.
    served_model_name: str
    architecture: str  # Architecture in config.json.
    max_model_len: int  # Limit of prompt plus output tokens.
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    sampling_defaults: SamplingDefaults
    max_logprobs: int
    max_num_seqs: int
    block_size: int  # Tokens per KV block.
    num_kv_blocks: int  # Number of KV blocks per data-parallel rank.
    device: str
    dtype: str
    data_parallel_size: int = 1
    memory: str = ""  # Text that states the GPU memory of KV cache and graphs.
    speculation: SpeculationConfig | None = None
    host_block_bytes: int = 0  # Bytes of a KV block in main memory, summed over ranks.
    shape: dict[str, Any] = {}  # The serving shape (`engine.shape`).
    transfer: TransferInfo | None = None  # None: no exchange of prompts with other engines.
    vision: VisionSpec | None = None  # Spec of the loaded vision tower; None: images are refused.


class ExpertStats(msgspec.Struct, frozen=True, array_like=True):
    balancedness: float = 1.0  # Mean load per rank / load of the busiest rank, in recent steps.
    num_rebalances: int = 0  # Number of rebalances that moved experts.
    num_moved: int = 0  # Number of experts moved between slots.


class RankStats(msgspec.Struct, frozen=True, array_like=True):
    """Statistics of a data-parallel rank after a step. Counters are 0 when the engine starts."""

    num_running: int
    num_waiting: int
    num_kv_blocks: int
    num_free_kv_blocks: int  # Number of KV blocks that no sequence uses; some are cached.
    step_count: int
    preemption_count: int
    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    num_drafts: int = 0  # Number of rows that verified drafts, over all steps.
    num_draft_tokens: int = 0  # Number of draft tokens that were verified.
    num_accepted_tokens: int = 0  # Number of draft tokens that were accepted.
    accepted_per_position: tuple[int, ...] = ()  # Accepted draft tokens by position in the draft.
    num_host_blocks: int = 0  # Capacity of main memory, in KV blocks.
    num_used_host_blocks: int = 0  # Number of KV blocks that are in main memory.
    num_host_queries: int = 0  # Number of tokens that were looked up in main memory.
    num_host_hits: int = 0  # Number of tokens that were found in main memory.
    num_host_stores: int = 0  # Number of KV blocks copied to main memory.
    num_host_loads: int = 0  # Number of KV blocks copied from main memory.
    num_host_evictions: int = 0  # Number of KV blocks evicted from main memory.
    num_file_blocks: int = 0  # Capacity of the files, in KV blocks.
    num_used_file_blocks: int = 0  # Number of KV blocks that are in files.
    num_file_reads: int = 0  # Number of KV blocks read from files.
    num_file_writes: int = 0  # Number of KV blocks written to files.
    num_file_bytes_read: int = 0
    num_file_bytes_written: int = 0
    num_file_evictions: int = 0  # Number of files deleted because of the size limit.
    num_file_errors: int = 0  # Number of damaged files and system errors.
    num_kv_event_batches: int = 0  # Number of batches of prefix cache events that were sent.
    num_dropped_kv_events: int = 0  # Number of steps whose prefix cache changes were dropped.
    num_remote_prefills: int = 0  # Number of requests whose prompts came from other engines.
    num_failed_prefills: int = 0  # Number of requests whose remote prompts did not arrive.
    num_local_prefills: int = 0  # Number of requests that use no other engine.
    num_pulled_blocks: int = 0  # Number of KV blocks read from other engines.
    num_expired_leases: int = 0  # Number of prompts that other engines did not read in time.
    num_leases: int = 0  # Number of prompts kept for other engines.


class EngineStats(RankStats, frozen=True, array_like=True):
    """Statistics of an engine. Inherited fields are sums over the engine's data-parallel ranks."""

    device_seconds: float = 0.0  # Total GPU time of all steps.
    idle_seconds: float = 0.0  # Total time for which the GPU was idle before steps.
    prefill_tokens: int = 0  # Number of tokens in rows that compute several prompt tokens.
    experts: ExpertStats | None = None  # None if expert selections are not counted.
    at: float = 0.0  # Monotonic second of the statistics; later statistics replace earlier ones.
    ranks: tuple[RankStats, ...] = ()  # Statistics by rank; empty for a single rank.

    @property
    def by_rank(self) -> Sequence[RankStats]:
        """Return statistics by rank. Statistics of rank 0 include requests without a rank."""
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
    """Sum the statistics of engines, take the smallest `balancedness`, and drop `ranks`. Return one
    engine's statistics unchanged.
    """
    if len(parts) == 1:
        return parts[0]
    experts = None
    if of_engines := [part.experts for part in parts if part.experts is not None]:
        experts = ExpertStats(
            min(each.balancedness for each in of_engines),
            sum(each.num_rebalances for each in of_engines),
            sum(each.num_moved for each in of_engines),
        )
    latest = max((part.at for part in parts), default=0.0)
    return EngineStats(**sum_fields(EngineStats, parts), experts=experts, at=latest)


def sum_generations(parts: Sequence[EngineStats]) -> EngineStats:
    """Sum the statistics of an engine and of the engines that it replaced, rank by rank."""
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
    """Return a dead engine's statistics, with its counters unchanged and its gauges set to 0."""
    ranks = tuple(msgspec.structs.replace(rank, **_GAUGES) for rank in stats.ranks)
    experts = stats.experts and msgspec.structs.replace(stats.experts, balancedness=1.0)
    return msgspec.structs.replace(stats, **_GAUGES, ranks=ranks, experts=experts)


def sequence_id(request_id: str, choice: int, *, server: int) -> str:
    """Return the engine's id for a choice. Ids of different server processes differ."""
    return f"{request_id}/{choice}@{server}" if server else f"{request_id}/{choice}"


def server_of(sequence_id: str) -> int:
    return int(sequence_id[sequence_id.rfind("/") :].partition("@")[2] or 0)


class StartEngine(msgspec.Struct, frozen=True):
    """The first message to an engine. The server process that starts the engine sends it."""

    options: EngineOptions
    num_servers: int  # Number of server processes; each process has its own sockets.
    parent: ParentPulse | None = None  # Heartbeat of the server, watched by the engine.
    replica: int = 0


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    request: GenerateRequest


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    request_ids: list[str]


class AbortServer(msgspec.Struct, frozen=True, tag="abort-server"):
    """Asks the engine to end all requests of a dead server process."""

    server: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Asks the engine to empty the prefix cache."""


RecordAction = Literal["start", "stop", "dump"]


class RecordExperts(msgspec.Struct, frozen=True, tag="record_experts"):
    """Asks the engine to start, stop or dump a recording of expert use. Answer: `ExpertRecord`."""

    server: int
    number: int
    action: RecordAction


class RecordTrace(msgspec.Struct, frozen=True, tag="record_trace"):
    """Asks the engine to start a trace of steps, or to write the trace. Answer: `ExpertRecord`."""

    server: int
    number: int
    path: str | None  # Path (without the rank) of a new trace; None: write the running trace.
    num_steps: int = 0  # The engine writes the trace after this many steps.


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    pass


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    info: ModelInfo


class StepOutputs(msgspec.Struct, frozen=True, tag="outputs"):
    updates: list[SequenceUpdate]
    stats: EngineStats
    # (sequence id, monotonic second of the first step) of each sequence that began.
    admitted: list[tuple[str, float]] = []
    step_tokens: list[int] = []  # Number of tokens in each step since the last message.


class ExpertDump(msgspec.Struct, frozen=True):
    """The number of selections of each expert in a recording, and the current expert placement."""

    logical_count: list[list[int]]  # Number of selections by layer and expert.
    physical_to_logical_map: list[list[int]]  # Index of the expert by layer and slot.
    balancedness: float  # Mean load per rank / load of the busiest rank, in the recording.


class ExpertRecord(msgspec.Struct, frozen=True, tag="expert_record"):
    """The answer to a `RecordExperts` or a `RecordTrace` with the same number."""

    number: int
    dump: ExpertDump | None = None
    problem: str | None = None  # Reason why the command failed.


class Heartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """The engine sends this message every `BEAT_SECONDS`, even while its loop waits."""

    num_rounds: int  # Number of iterations of the engine loop since the start.
    is_idle: bool  # Whether the engine loop waits for a message.
    stats: EngineStats
    rank: int = 0  # Rank with the oldest heartbeat.
    rank_silence: float = 0.0  # Age of the heartbeat of `rank` in seconds.


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not start or had to stop. The server should exit with `exit_code`."""

    message: str
    exit_code: int


Record = RecordExperts | RecordTrace
ToEngine = AddRequest | AbortRequests | AbortServer | ResetPrefixCache | Record | Shutdown
FromEngine = EngineReady | StepOutputs | ExpertRecord | Heartbeat | EngineFailed

encoder = msgspec.msgpack.Encoder()
start_decoder: msgspec.msgpack.Decoder[StartEngine] = msgspec.msgpack.Decoder(StartEngine)
to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
