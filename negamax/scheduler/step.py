"""Messages between scheduler and worker: StepPlan and StepResult. Frozen plain data in columns, so
a plan for hundreds of sequences stays a handful of flat lists.

A *slot* is a persistent row of the worker's request state: tokens, block table, sampling state and
length of a sequence. The sequence holds it from `NewRow` until another sequence gets the slot. A
plan states how many tokens a slot runs, not where they begin: the worker counts the computed tokens
of each slot. It writes each sampled token into the slot itself, so a plan can run before the
previous step's tokens have reached the host.

A row may verify *draft tokens* from the worker's proposer: the row runs its last known token and
the drafts after it, and samples after each. Drafts are accepted up to the first one that differs
from the token sampled in its place. Accepted drafts plus one bonus token are kept.
"""

from collections.abc import Collection, Iterable
from typing import Self

import msgspec

from negamax.scheduler.request import SamplingParams


class NewRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence that takes over `slot`: a new request, or one resumed after preemption."""

    slot: int
    token_ids: list[int]  # all known tokens: prompt, then outputs so far
    prompt_len: int  # number of prompt tokens among them
    num_computed: int  # number of them with KV in `block_ids` already (prefix cache)
    block_ids: list[int]  # KV blocks of positions 0.., in order
    sampling: SamplingParams


class StepSize(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Maxima over all data-parallel ranks that run the step together."""

    num_tokens: int
    num_rows: int
    num_drafts: int  # draft tokens that a row verifies or proposes
    is_decode: bool  # every row of every rank is a decode, with its drafts, and samples
    # with context parallelism, the most tokens of any shard; 0: the step is not sharded
    largest_shard: int = 0


def is_sharded(longest_run: int, num_shards: int) -> bool:
    """Whether a step is sharded: each piece of its longest run, two per rank, has a token."""
    return num_shards > 1 and longest_run >= 2 * num_shards


def bound_shard(num_tokens: int, *, num_runs: int, num_shards: int) -> int:
    """Bound a rank's tokens in a step whose `num_runs` runs are split into two pieces per rank."""
    return min(num_tokens, -(-num_tokens // num_shards) + 2 * num_runs)


class ExpertMove(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copies the expert in slot `source` of a layer to slot `target`."""

    layer: int
    source: int
    target: int


class ExpertStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Changes of experts before a step: all `moves` at once, valid from this step on."""

    version: int  # number of steps that have moved experts, this one included
    wants_counts: bool = False  # whether the result counts the choices of each expert
    # a rank sends and receives one expert at most
    moves: list[ExpertMove] = []


class FileCopies(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copies between blocks in host memory and files, which are named by the blocks' hashes."""

    written_places: list[int]  # host blocks
    written_hashes: list[bytes]  # file of each
    read_hashes: list[bytes]  # files
    read_places: list[int]  # host block of each
    used_hashes: list[bytes] = []  # files that count as used
    deletes_all: bool = False  # whether all files are deleted after the writes


class HostCopies(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copies between KV blocks and blocks in host memory: the stores, then the loads. They run
    after the steps before the plan's, and beside its own.
    """

    stored_blocks: list[int]  # KV blocks
    stored_places: list[int]  # host block of each
    loaded_places: list[int]  # host blocks
    loaded_blocks: list[int]  # KV block of each
    # whether nothing else can run: the result waits for a load or a file, but not for long
    is_awaited: bool = False
    files: FileCopies | None = None


ROWS_PER_PAGE = 16  # rows of images are allocated in pages


class EncodeJob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Computes the rows of an image before the step; on other ranks these rows become zeros."""

    rank: int  # tensor-parallel rank that computes it
    pages: list[int]  # of `ROWS_PER_PAGE` rows each, in order
    grid: tuple[int, int]  # rows and columns of patches
    pixels: bytes  # uint8 [height, width, 3]


class ImageRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of a step that read rows of an image instead of embeddings."""

    slot: int
    offset: int  # position of the image's first token
    start: int  # positions that the step runs,
    stop: int  # up to here
    pages: list[int]  # as in its `EncodeJob`


class StepPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step: apply `new_rows` and `appended_*`, then run the next num_scheduled[i] tokens of
    slots[i]. Generating rows come first, longer prompt chunks last.
    """

    step_id: int
    new_rows: list[NewRow]
    appended_slots: list[int]  # one entry per appended block
    appended_blocks: list[int]  # block id, appended to that slot's table
    slots: list[int]
    num_scheduled: list[int]  # tokens to run, at least 1
    # draft tokens among them, the last ones; a slot with fewer proposed drafts runs padding
    num_draft_tokens: list[int]
    # whether the logits of the last token, and of those before its draft tokens, are sampled
    needs_sampling: list[bool]
    # rows whose sampling waits for the step's `GrammarBitmask`; empty: the step has none
    grammar_rows: list[int] = []
    num_proposed: int = 0  # draft tokens to propose after the step for each sampled row
    # with several data-parallel ranks, each of which has a plan, perhaps empty, for this step
    of_all: StepSize | None = None
    experts: ExpertStep | None = None
    copies: HostCopies | None = None
    encodes: list[EncodeJob] = []
    images: list[ImageRun] = []

    @property
    def num_tokens(self) -> int:
        """Number of tokens over all rows."""
        return sum(self.num_scheduled)


class GrammarRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sampled row of a plan whose next token may be constrained."""

    row: int  # row of the plan
    request_id: str
    num_outputs: int  # output tokens before the first sampled one
    num_drafts: int = 0  # draft tokens of the row


class GrammarBitmask(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Allowed tokens of a step's grammar rows, sent after the plan. A row is listed once for each
    of its samples with a mask, in order: the first, then those after its draft tokens. Draft tokens
    after the last mask are rejected.
    """

    step_id: int
    rows: list[int]  # rows of the plan
    places: list[int]  # index in `masks` of each; -1: any token
    masks: list[bytes]  # ceil(vocabulary / 8) bytes each: bit i of byte j allows token 8 j + i
    # rows whose mask is late: their samples are ignored, and their last token runs again later
    postponed: list[int] = []


class RowFailures(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Slots that failed on a rank at the launch of step `step_id`, with the reasons."""

    step_id: int
    errors: dict[int, str]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability and rank (1 = most likely) of a token, and the most likely tokens."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class FileProgress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copies from and to files that are complete on a rank, or on all ranks of a group."""

    rank: int
    read_step: int = -1  # the reads of plans up to this step id are complete,
    written_step: int = -1  # and the writes
    missing: list[bytes] = []  # of the reads completed since the last report: those that failed
    is_off: bool = False  # whether an error has switched the files off
    # since the start: bytes read and written, files deleted to keep the bound, damaged files and
    # errors
    bytes_read: int = 0
    bytes_written: int = 0
    num_evicted: int = 0
    num_errors: int = 0

    @classmethod
    def of_group(cls, ranks: Collection["FileProgress"], missing: Iterable[bytes]) -> Self:
        """Join the progress of all ranks: all of them have a block, or none."""
        sums = ("bytes_read", "bytes_written", "num_evicted", "num_errors")
        return cls(
            min(each.rank for each in ranks),
            min(each.read_step for each in ranks),
            min(each.written_step for each in ranks),
            sorted(missing),
            any(each.is_off for each in ranks),
            *(sum(getattr(each, name) for each in ranks) for name in sums),
        )


class StepResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Results of a step: each sampled row's accepted drafts and bonus token, in plan order."""

    step_id: int
    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs]  # by index in `token_ids`; only rows that asked
    # by row index of the plan; one entry per prompt token run after the first
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    errors: dict[int, str]  # by row index of the plan: reasons of failed rows; the others are valid
    num_accepted: dict[int, int] = {}  # by row index of the plan: accepted draft tokens
    # by row index of the plan, of grammar rows: proposed draft tokens, -1: none
    proposed: dict[int, list[int]] = {}
    device_seconds: float = 0.0  # GPU time of the step
    idle_seconds: float = 0.0  # GPU idle time before the step
    # [layers, experts] int64: choices of each expert on all ranks, if the plan asks for them
    expert_counts: bytes = b""
    # by row index of the plan: number of proposed draft tokens, for rows where some are missing
    num_draft_tokens: dict[int, int] = {}
    loaded_step: int = -1  # the loads of plans up to this step id are complete
    # by place: share of rows whose proposed drafts up to there are accepted, as the draft model
    # estimates, also for the place after the last one; empty: no estimate
    expected: list[float] = []
    files: FileProgress | None = None


class SequenceUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Output of one request from a committed step; sent to the client unchanged."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # complete, on the first update only
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"; None: not finished
    stop_reason: int | None = None  # stop token id, if one of `stop_token_ids` ended it
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    error: str | None = None
    is_refusal: bool = False  # the request caused the error: it cannot be served
    # the request lost its grammar process, or got none in time: a retry may succeed
    is_lost: bool = False
    lacks_prompt: bool = False  # its prompt did not arrive from another engine
    # of a finished request: rows with drafts, their draft tokens, accepted ones; None: no such rows
    drafts: tuple[int, int, int] | None = None
