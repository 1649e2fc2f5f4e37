"""Messages between scheduler and worker: `StepPlan` and `StepResult`. Messages store columns,
so a plan for hundreds of sequences consists of a few flat lists.

A *slot* is a persistent row of the worker's request state: tokens, block table, sampling state and
length of a sequence. A sequence holds its slot from `NewRow` until another sequence gets the slot.
A plan states only how many tokens a slot runs; the worker counts the computed tokens of each slot.
The worker writes each sampled token into the slot, so a plan can run before the previous step's
tokens have reached the host.

A row may verify *draft tokens* from the worker's proposer: the row runs its last known token and
the drafts after it, and samples after each of these tokens. Drafts are accepted up to the first
draft that differs from the sampled token. Accepted drafts plus one bonus token are kept.
"""

from collections.abc import Collection, Iterable
from typing import Self

import msgspec

from negamax.scheduler.request import SamplingParams


class NewRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence that takes over `slot`: a new request, or one resumed after preemption."""

    slot: int
    token_ids: list[int]  # all known tokens: prompt, then outputs so far
    prompt_len: int  # number of prompt tokens in token_ids
    num_computed: int  # leading tokens with KV in block_ids already (prefix cache)
    block_ids: list[int]  # KV blocks of positions 0.., in order
    sampling: SamplingParams


class StepSize(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Maxima over all data-parallel ranks that run the step together."""

    num_tokens: int
    num_rows: int
    num_drafts: int  # draft tokens that a row verifies or proposes
    is_decode: bool  # all rows of all ranks are decodes (with or without drafts)
    # with context parallelism, the most tokens of any shard; 0: the step is not sharded
    largest_shard: int = 0


def is_sharded(longest_run: int, num_shards: int) -> bool:
    """Whether a step is sharded: its longest run has at least two tokens per rank."""
    return num_shards > 1 and longest_run >= 2 * num_shards


def bound_shard(num_tokens: int, *, num_runs: int, num_shards: int) -> int:
    """Return the most tokens of a rank if `num_runs` runs are split into two pieces per rank."""
    return min(num_tokens, -(-num_tokens // num_shards) + 2 * num_runs)


class ExpertMove(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copies the expert in slot `source` of a layer to slot `target`."""

    layer: int
    source: int
    target: int


class ExpertStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Moves of experts before a step. All `moves` happen at once and apply from this step on."""

    version: int  # number of steps that have moved experts, this one included
    wants_counts: bool = False  # whether the result counts the selections of each expert
    moves: list[ExpertMove] = []  # a rank sends and receives at most one expert


class FileCopies(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copies between blocks in host memory and files, which are named by the blocks' hashes."""

    written_places: list[int]  # host blocks
    written_hashes: list[bytes]  # the file of each host block
    read_hashes: list[bytes]  # files
    read_places: list[int]  # the host block of each file
    used_hashes: list[bytes] = []  # files that count as used
    deletes_all: bool = False  # whether all files are deleted after the writes


class HostCopies(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copies between KV blocks and host blocks: first the stores, then the loads. The copies run
    after all earlier steps and in parallel with the plan's own step.
    """

    stored_blocks: list[int]  # KV blocks
    stored_places: list[int]  # the host block of each stored KV block
    loaded_places: list[int]  # host blocks
    loaded_blocks: list[int]  # the KV block of each loaded host block
    # whether nothing else can run, so that the result waits briefly for a load or a file
    is_awaited: bool = False
    files: FileCopies | None = None


ROWS_PER_PAGE = 16  # rows of images are allocated in pages


class EncodeJob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image whose rows one rank computes before the step. Other ranks set the rows to 0."""

    rank: int  # tensor-parallel rank that encodes the image
    pages: list[int]  # pages of `ROWS_PER_PAGE` rows, in order
    grid: tuple[int, int]  # rows and columns of patches
    pixels: bytes  # uint8 [height, width, 3]


class ImageRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of a step that read rows of an image instead of embeddings."""

    slot: int
    offset: int  # position of the image's first token
    start: int  # first position that the step runs
    stop: int  # position after the last one that the step runs
    pages: list[int]  # pages of the image's `EncodeJob`


class StepPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step: the worker applies `new_rows` and `appended_*`, then runs the next num_scheduled[i]
    tokens of slots[i]. Generating rows come first, longer prompt chunks last.
    """

    step_id: int
    new_rows: list[NewRow]
    appended_slots: list[int]  # one entry per appended block
    appended_blocks: list[int]  # block id, which is appended to the slot's table
    slots: list[int]
    num_scheduled: list[int]  # tokens to run, at least 1
    # draft tokens at the end of num_scheduled; a slot with fewer proposed drafts runs padding
    num_draft_tokens: list[int]
    # whether the row samples after its last token that is no draft, and after each draft token
    needs_sampling: list[bool]
    # rows whose sampling waits for the step's `GrammarBitmask`; empty: the step has none
    grammar_rows: list[int] = []
    num_proposed: int = 0  # draft tokens to propose after the step for each sampled row
    # maxima over the plans of all data-parallel ranks for this step; None: there is one rank
    of_all: StepSize | None = None
    experts: ExpertStep | None = None
    copies: HostCopies | None = None
    encodes: list[EncodeJob] = []
    images: list[ImageRun] = []

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled)


class GrammarRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sampled row of a plan whose next token may be constrained."""

    row: int  # row of the plan
    request_id: str
    num_outputs: int  # output tokens before the first token sampled in this step
    num_drafts: int = 0  # draft tokens of the row


class GrammarBitmask(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Allowed tokens of a step's grammar rows, sent after the plan. A row is listed once for each
    of its samples that has a mask, in order. Draft tokens after the last mask are rejected.
    """

    step_id: int
    rows: list[int]  # rows of the plan
    places: list[int]  # index in `masks` for each entry of `rows`; -1: any token
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
    """Completed copies from and to files on one rank, or on all ranks of a group."""

    rank: int
    read_step: int = -1  # the reads of plans up to this step id are complete
    written_step: int = -1  # the writes of plans up to this step id are complete
    missing: list[bytes] = []  # hashes of reads that failed since the last report
    is_off: bool = False  # whether an error has disabled the files
    # Totals since the start. Files are evicted to keep the bound; damaged files count as errors.
    bytes_read: int = 0
    bytes_written: int = 0
    num_evicted: int = 0
    num_errors: int = 0

    @classmethod
    def of_group(cls, ranks: Collection["FileProgress"], missing: Iterable[bytes]) -> Self:
        """Combine the progress of all ranks: a copy is complete if it is complete on all ranks."""
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
    """Results of a step. `token_ids`: accepted drafts and bonus token of sampled rows, in order."""

    step_id: int
    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs]  # by index in `token_ids`, for rows that request logprobs
    # by row index of the plan: an entry for each prompt token that ran, but not for a first token
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    errors: dict[int, str]  # by row index of the plan: why the row failed
    num_accepted: dict[int, int] = {}  # by row index of the plan: accepted draft tokens
    # by row index of the plan, for grammar rows: proposed draft tokens, -1: none
    proposed: dict[int, list[int]] = {}
    device_seconds: float = 0.0  # GPU time of the step
    idle_seconds: float = 0.0  # GPU idle time before the step
    # [layers, experts] int64: selections of each expert on all ranks, if the plan requests them
    expert_counts: bytes = b""
    # by row index of the plan: number of proposed draft tokens, for rows with fewer than planned
    num_draft_tokens: dict[int, int] = {}
    loaded_step: int = -1  # the loads of plans up to this step id are complete
    # by place, and for one more place: the draft model's estimate of the share of rows that accept
    # all proposed drafts up to that place; empty: no estimate
    expected: list[float] = []
    files: FileProgress | None = None


class SequenceUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Output of one request from a committed step. Clients receive this message unchanged."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # whole prompt; first update only
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"; None: not finished
    stop_reason: int | None = None  # stop token id, if one of `stop_token_ids` ended the request
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    error: str | None = None
    is_refusal: bool = False  # whether the request caused the error, so that a retry fails too
    # the request lost its grammar process, or got none in time: a retry may succeed
    is_lost: bool = False
    lacks_prompt: bool = False  # whether its prompt did not arrive from another engine
    # of a finished request: rows with drafts, draft tokens, accepted drafts; None: no drafts
    drafts: tuple[int, int, int] | None = None
