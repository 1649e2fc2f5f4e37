"""Messages between the server processes and the engine process: msgspec structs as MessagePack
frames, never pickle.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from negamax.base.supervision import ParentPulse
from negamax.config.generation import SamplingDefaults
from negamax.options.engine import EngineOptions
from negamax.options.speculation import SpeculationConfig
from negamax.scheduler.request import GenerateRequest
from negamax.scheduler.step import SequenceUpdate

BEAT_SECONDS = 0.2  # between two heartbeats


@dataclass(frozen=True)
class EngineAddress:
    """The sockets of an engine process, two for each server process, in a folder only this user can
    enter.
    """

    folder: str

    def requests(self, server: int) -> str:
        """The endpoint from which a server process sends its requests."""
        return f"ipc://{self.folder}/requests-{server}"

    def outputs(self, server: int) -> str:
        """The endpoint at which a server process waits for the outputs."""
        return f"ipc://{self.folder}/outputs-{server}"


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the front end must know of a started engine."""

    model: str  # folder, hub id or embedded name, as given
    served_model_name: str
    architecture: str  # as config.json names it
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    sampling_defaults: SamplingDefaults
    max_logprobs: int
    max_num_seqs: int
    block_size: int  # tokens per KV block
    num_kv_blocks: int  # of each data-parallel rank, as is max_num_seqs
    device: str
    dtype: str
    data_parallel_size: int = 1
    memory: str = ""  # what cache and graphs take on a GPU, for people
    speculation: SpeculationConfig | None = None


class ExpertStats(msgspec.Struct, frozen=True, array_like=True):
    """Statistics of a model's experts, where their choices are counted."""

    # lately: the mean of the ranks' tokens over those of the busiest one, both added up over the
    # layers
    balancedness: float = 1.0
    num_rebalances: int = 0  # that moved any and are complete
    num_moved: int = 0  # from one slot to another

    @classmethod
    def of(cls, parts: Sequence[ExpertStats]) -> ExpertStats:
        """The statistics of several engines together, with the balancedness of the least balanced
        one.
        """
        return cls(
            min(part.balancedness for part in parts),
            sum(part.num_rebalances for part in parts),
            sum(part.num_moved for part in parts),
        )


class RankStats(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot of a data-parallel rank after a step; counters rise from start."""

    num_running: int
    num_waiting: int
    num_kv_blocks: int
    num_free_kv_blocks: int  # blocks no live sequence holds (cached ones included)
    step_count: int
    preemption_count: int
    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    num_drafts: int = 0  # speculation: how often tokens were proposed,
    num_draft_tokens: int = 0  # how many,
    num_accepted_tokens: int = 0  # and how many of them were right,
    accepted_per_position: tuple[int, ...] = ()  # by position in the draft


class EngineStats(RankStats, frozen=True, array_like=True):
    """The same of all data-parallel ranks of an engine together, and what it has beside."""

    device_seconds: float = 0.0  # a GPU's time in steps
    idle_seconds: float = 0.0  # and between them
    prefill_tokens: int = 0  # prompt tokens that were computed, in rows of more than one
    experts: ExpertStats | None = None  # None: they are not counted
    at: float = 0.0  # monotonic seconds: steps and beats come by ways of their own
    ranks: tuple[RankStats, ...] = ()  # of each, where there are several

    @property
    def by_rank(self) -> Sequence[RankStats]:
        """Statistics of each data-parallel rank. Requests that wait for any rank count at the
        first.
        """
        return self.ranks or (self,)


_GAUGES = dict.fromkeys(("num_running", "num_waiting", "num_kv_blocks", "num_free_kv_blocks"), 0)


def sum_of(parts: Sequence[EngineStats]) -> EngineStats:
    """The statistics of several engines together, without those of ranks; of one, as they are."""
    if len(parts) == 1:
        return parts[0]
    experts = [part.experts for part in parts if part.experts is not None]
    return EngineStats(
        **_sums(EngineStats, parts),
        experts=ExpertStats.of(experts) if experts else None,
        at=max((part.at for part in parts), default=0.0),
    )


def sum_of_same(parts: Sequence[EngineStats]) -> EngineStats:
    """The same of one engine and those before it, rank by rank."""
    if len(parts) == 1:
        return parts[0]
    ranks = zip(*(part.ranks for part in parts if part.ranks), strict=True)
    sums = tuple(RankStats(**_sums(RankStats, same)) for same in ranks)
    return msgspec.structs.replace(sum_of(parts), ranks=sums)


def _sums(kind: type[RankStats], parts: Sequence[RankStats]) -> dict[str, Any]:
    """The fields of `kind` that can be added up, of all `parts` together."""
    accepted = itertools.zip_longest(*(part.accepted_per_position for part in parts), fillvalue=0)
    numbers = {
        name: sum(getattr(part, name) for part in parts)
        for name in kind.__struct_fields__
        if name not in ("accepted_per_position", "at", "experts", "ranks")
    }
    return {**numbers, "accepted_per_position": tuple(map(sum, accepted))}


def without_gauges(stats: EngineStats) -> EngineStats:
    """The counters of an engine that is gone."""
    ranks = tuple(msgspec.structs.replace(rank, **_GAUGES) for rank in stats.ranks)
    experts = stats.experts and msgspec.structs.replace(stats.experts, balancedness=1.0)
    return msgspec.structs.replace(stats, **_GAUGES, ranks=ranks, experts=experts)


def sequence_id(request_id: str, choice: int, *, server: int) -> str:
    """The id of a choice in the engine, which no other server process gives to another."""
    return f"{request_id}/{choice}@{server}" if server else f"{request_id}/{choice}"


def server_of(sequence_id: str) -> int:
    """The server process that a sequence belongs to."""
    return int(sequence_id[sequence_id.rfind("/") :].partition("@")[2] or 0)


# server -> engine
class Start(msgspec.Struct, frozen=True):
    """The first frame, from the server process that started the engine."""

    options: EngineOptions
    num_servers: int  # processes that send requests, each with sockets of its own
    parent: ParentPulse | None = None  # to be watched


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    request: GenerateRequest


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    request_ids: list[str]


class AbortServer(msgspec.Struct, frozen=True, tag="abort-server"):
    """End all requests of a server process that is gone."""

    server: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Empty the prefix cache."""


RecordAction = Literal["start", "stop", "dump"]


class RecordExperts(msgspec.Struct, frozen=True, tag="record_experts"):
    """Begin or end to record how often each expert is chosen, or hand over what was recorded.
    `server` gets an `ExpertRecord` with the same `number`.
    """

    server: int
    number: int
    action: RecordAction


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    pass


# engine -> server
class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    info: ModelInfo


class StepOutputs(msgspec.Struct, frozen=True, tag="outputs"):
    updates: list[SequenceUpdate]
    stats: EngineStats
    # sequences that began to run, with the `time.monotonic()` of their first step
    admitted: list[tuple[str, float]] = []
    step_tokens: list[int] = []  # tokens that each step since the last message ran


class ExpertDump(msgspec.Struct, frozen=True):
    """What was recorded, and where the experts of each layer lie now."""

    logical_count: list[list[int]]  # by layer and expert: how often it was chosen
    physical_to_logical_map: list[list[int]]  # by layer and slot: the expert
    balancedness: float  # as in `ExpertStats`, of what was recorded with experts where they are now


class ExpertRecord(msgspec.Struct, frozen=True, tag="expert_record"):
    """The answer to `RecordExperts`."""

    number: int
    dump: ExpertDump | None = None
    problem: str | None = None  # why it was not done


class Heartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """Every `BEAT_SECONDS`, from a thread of its own: the process runs, whether its loop goes
    round, and its ranks run.
    """

    num_rounds: int  # of the loop since the start
    is_idle: bool  # the loop waits for a message
    stats: EngineStats
    rank: int = 0  # the rank process that has sent no heartbeat for the longest time,
    rank_silence: float = 0.0  # and for how many seconds


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not start or had to stop. `exit_code` is what a command line should end
    with.
    """

    message: str
    exit_code: int


ToEngine = AddRequest | AbortRequests | AbortServer | ResetPrefixCache | RecordExperts | Shutdown
FromEngine = EngineReady | StepOutputs | ExpertRecord | Heartbeat | EngineFailed

encoder = msgspec.msgpack.Encoder()
start_decoder: msgspec.msgpack.Decoder[Start] = msgspec.msgpack.Decoder(Start)
to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
