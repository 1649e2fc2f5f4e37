"""Messages between scheduler and worker: `StepPlan` and `StepResult`. A plan contains one flat list
per property of its rows, so that hundreds of rows are encoded fast.

A *slot* is a persistent row of the worker's request state: tokens, block table, sampling state and
length of a sequence. A sequence holds its slot from `NewRow` until another sequence gets the slot.
A plan states only how many tokens a slot runs; the worker counts the computed tokens of each slot.
The worker writes each sampled token into the slot, so a plan can run before the previous step's
tokens have reached the host.

A row may verify *draft tokens* that the worker has proposed. The row runs its last known token and
the drafts after it, and samples after each of these tokens. A draft is accepted if this draft and
all earlier drafts equal the tokens sampled at their positions. The sequence keeps the accepted
drafts and one bonus token.
"""

from collections.abc import Collection, Iterable
from typing import Self

import msgspec

from negamax.scheduler.request import SamplingParams


class NewRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence that gets `slot`: a new request, or a request that resumes after preemption."""

    slot: int
    token_ids: list[int]  # all known tokens: first the prompt, then the output
    prompt_len: int  # number of prompt tokens in token_ids
    num_computed: int  # number of leading tokens whose KV is already in block_ids (prefix cache)
    block_ids: list[int]  # KV blocks in position order, from position 0
    sampling: SamplingParams


class StepSize(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sizes of a step, as maxima over all data-parallel ranks that run the step together."""

    num_tokens: int
    num_rows: int
    num_drafts: int  # largest number of draft tokens that a row verifies or proposes
    is_decode: bool  # whether all rows of all ranks are decodes (with or without drafts)
    largest_shard: int = 0  # tokens of the largest PCP rank's shard; 0: the step is not sharded


def is_sharded(longest_run: int, num_shards: int) -> bool:
    """Whether a step is sharded: its longest prompt chunk has at least two tokens per rank."""
    return num_shards > 1 and longest_run >= 2 * num_shards


def bound_shard(num_tokens: int, *, num_runs: int, num_shards: int) -> int:
    """Return an upper bound of a rank's tokens if each run is split into two pieces per rank."""
    return min(num_tokens, -(-num_tokens // num_shards) + 2 * num_runs)


class ExpertMove(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Request to copy the expert in slot `source` of a layer to slot `target` of the layer."""

    layer: int
    source: int
    target: int


class ExpertStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Moves of experts that run before a step. All `moves` of a step are simultaneous."""

    version: int  # number of steps so far that moved experts, including this step
    wants_counts: bool = False  # whether the result counts the selections of each expert
    moves: list[ExpertMove] = []  # each rank sends at most one and receives at most one expert


class FileCopies(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copies between host blocks and files. The hash of a block is the name of its file."""

    written_places: list[int]  # host blocks to write to files
    written_hashes: list[bytes]  # file name (hash) for each written host block
    read_hashes: list[bytes]  # names (hashes) of the files to read into host blocks
    read_places: list[int]  # the host block for each file of `read_hashes`
    used_hashes: list[bytes] = []  # names of the files to mark as recently used
    deletes_all: bool = False  # whether to delete all files after the writes


class HostCopies(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copies between KV blocks and host blocks. Stores (copies to host blocks) run before loads.
    The copies of a plan start after all earlier steps and run in parallel with the plan's step.
    """

    stored_blocks: list[int]  # KV blocks to copy to host blocks
    stored_places: list[int]  # the host block of each stored KV block
    loaded_places: list[int]  # host blocks to copy to KV blocks
    loaded_blocks: list[int]  # the KV block of each loaded host block
    is_awaited: bool = False  # whether the worker waits briefly for loads if the plan has no rows
    files: FileCopies | None = None


ROWS_PER_PAGE = 16  # number of image embeddings in a page


class EncodeJob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image that one rank encodes before the step, while other ranks add zeros in its place."""

    rank: int  # rank that encodes the image, see `ParallelLayout.encoder_rank`
    pages: list[int]  # pages that store the image's embeddings, in order
    grid: tuple[int, int]  # number of rows and of columns of patches
    pixels: bytes  # uint8 [height, width, 3]; b"" after the image's first job.
    # `parts` of the tower's layers: index of the first to run, index after the last, total number.
    # A rank encodes at most one image in several parts at a time.
    parts: tuple[int, int, int] = (0, 1, 1)

    @property
    def is_last(self) -> bool:
        """Whether the job runs the tower's last layers, which compute the image's embeddings."""
        return self.parts[1] == self.parts[2]


class ImageRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Image tokens of a step, which use outputs of the vision tower instead of token embeddings."""

    slot: int
    offset: int  # position of the image's first token
    start: int  # position of the first image token that the step runs
    stop: int  # position after the last image token that the step runs
    pages: list[int]  # pages of the image's `EncodeJob`


class StepPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step. The worker applies `new_rows` and `appended_*`, then runs the next num_scheduled[i]
    tokens of slots[i]. Decodes come first, and prompt chunks of several tokens come last.
    """

    step_id: int
    new_rows: list[NewRow]
    appended_slots: list[int]  # slot of each block in `appended_blocks`
    appended_blocks: list[int]  # KV blocks to append to block tables
    slots: list[int]
    num_scheduled: list[int]  # number of tokens to run, at least 1
    num_draft_tokens: list[int]  # number of drafts in `num_scheduled`; the worker may lack some
    needs_sampling: list[bool]  # whether a row samples after its known tokens and after each draft
    grammar_rows: list[int] = []  # indices of rows whose samples need the masks of `GrammarBitmask`
    num_proposed: int = 0  # number of drafts to propose for each sampled row
    of_all: StepSize | None = None  # maxima over all data-parallel ranks; None: there is one rank
    experts: ExpertStep | None = None
    copies: HostCopies | None = None
    encodes: list[EncodeJob] = []
    images: list[ImageRun] = []

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled)


class GrammarRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sampling row whose tokens a grammar or a thinking budget may constrain."""

    row: int  # index of the row in the plan
    request_id: str
    num_outputs: int  # number of output tokens before the first token that this step samples
    num_drafts: int = 0  # number of draft tokens of the row


class GrammarBitmask(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Allowed tokens of a step's grammar rows, sent after the plan. `rows` lists the row of each
    sample that has a mask. The worker rejects the draft tokens after the last mask of a row.
    """

    step_id: int
    rows: list[int]  # row of the plan for each sample
    places: list[int]  # index in `masks` for each entry of `rows`; -1: all tokens are allowed
    masks: list[bytes]  # ceil(vocabulary / 8) bytes each: bit i of byte j allows token 8 j + i
    postponed: list[int] = []  # rows with late masks, whose samples the scheduler ignores


class RowFailures(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Errors, by slot, of the rows that failed on one rank when step `step_id` was launched."""

    step_id: int
    errors: dict[int, str]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability and rank of a token (rank 1: most likely), and the most likely tokens."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class FileProgress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Progress of copies from and to files, on one rank or on all ranks of a group."""

    rank: int
    read_step: int = -1  # the reads of plans up to this step id are complete
    written_step: int = -1  # the writes of plans up to this step id are complete
    missing: list[bytes] = []  # hashes of blocks whose reads failed since the last report
    is_off: bool = False  # whether files are no longer used, because of an error.
    # The next 4 fields are totals since the start. `num_evicted`: files deleted at the size limit.
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
    """Results of a step. `token_ids`: accepted drafts and bonus token of each sampled row."""

    step_id: int
    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs]  # index in `token_ids` -> logprobs, if requested.
    # `prompt_logprobs`: row of the plan -> logprobs of prompt tokens except a prompt's first.
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    errors: dict[int, str]  # row of the plan -> reason why the row failed
    num_accepted: dict[int, int] = {}  # row of the plan -> number of accepted drafts
    proposed: dict[int, list[int]] = {}  # grammar row of the plan -> proposed drafts; -1: no draft
    device_seconds: float = 0.0  # GPU time of the step
    idle_seconds: float = 0.0  # time for which the GPU was idle before the step
    expert_counts: bytes = b""  # int64 [layers, experts] selections on all ranks; b"": not wanted
    num_draft_tokens: dict[int, int] = {}  # row -> number of drafts, if fewer than planned
    loaded_step: int = -1  # the loads of plans up to this step id are complete.
    # `expected[i]`: the draft model's estimate of the share of rows that accept drafts 0 to i.
    # `expected` has one entry more than there are proposed drafts, or is empty without an estimate.
    expected: list[float] = []
    files: FileProgress | None = None


class SequenceUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Output of one request from a committed step, which the engine sends to the server."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # only set in the first update of a request
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"; None: not finished
    stop_reason: int | None = None  # stop token id, if one of `stop_token_ids` ended the request
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    error: str | None = None
    is_refusal: bool = False  # whether the request caused the error, so a retry would fail
    is_lost: bool = False  # whether no grammar process was free or alive, so a retry may succeed
    lacks_prompt: bool = False  # whether the prompt did not arrive from another engine.
    # `drafts` of a finished request: number of rows with drafts, of drafts and of accepted drafts
    drafts: tuple[int, int, int] | None = None
