"""What the scheduler tells the worker (StepPlan) and what it hears back (StepResult). Frozen plain
data, columns not rows, so that a plan for hundreds of sequences stays a handful of flat lists.

A *slot* is a persistent place in the worker's request state: it holds a sequence's tokens, block
table, sampling state and its length from `NewRow` until the slot is given to another sequence. A
plan says how many tokens a slot runs, not where they begin: the worker knows how many tokens of
each slot it has computed. It writes each sampled token into the slot itself, so a plan can run
before the previous step's tokens have reached the host.

A row may verify *draft tokens*, which the worker's proposer has guessed: the row runs its last
known token and the drafts behind it, and samples after each. Drafts are accepted up to the first
one that differs from what is sampled in its place; the row yields that many tokens and one more.
"""

from __future__ import annotations

import msgspec

from negamax.scheduler.request import SamplingParams


class NewRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence that takes over `slot` (a new request, or one resumed after preemption)."""

    slot: int
    token_ids: list[int]  # all tokens known now: prompt, then outputs so far
    prompt_len: int  # how many of them are prompt
    num_computed: int  # how many of them have their KV in `block_ids` already (prefix cache)
    block_ids: list[int]  # KV blocks of positions 0.., in order
    sampling: SamplingParams


class StepSize(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What data-parallel ranks know of the step that they run together: the most of any of them."""

    num_tokens: int
    num_rows: int
    num_drafts: int  # draft tokens that a row verifies, or gets
    longest_decode: int  # tokens of a sequence that runs a generated one
    is_decode: bool  # every row of every rank runs one generated token, and its drafts, and samples
    # where context-parallel ranks share the step out: no share of theirs has more tokens; 0: each
    # runs all tokens of its data-parallel rank
    largest_share: int = 0


class ExpertMove(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The slot `target` of a layer's experts gets what `source` has."""

    layer: int
    source: int
    target: int


class ExpertStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is done with experts before a step: all `moves` at once, then the step and those behind
    it find the experts where they lie now.
    """

    version: int  # how many steps have moved experts, this one included
    wants_counts: bool = False  # the result says how often each was chosen
    # a rank sends one expert and receives one at most
    moves: list[ExpertMove] = []


class StepPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step: apply `new_rows` and `appended_*`, then run the next num_scheduled[i] tokens of
    slots[i]. Rows that generate come first, longer chunks of prompts last.
    """

    step_id: int
    new_rows: list[NewRow]
    appended_slots: list[int]  # one entry per appended block
    appended_blocks: list[int]  # block id, goes to the end of that slot's table
    slots: list[int]
    num_scheduled: list[int]  # tokens to run, at least 1
    # how many of them, the last ones, are draft tokens; a slot with fewer drafts runs padding
    num_draft_tokens: list[int]
    # True: the logits of the last token are sampled, and of those before its draft tokens
    needs_sampling: list[bool]
    # rows whose sampling waits for the `GrammarBitmask` of this step; empty: it brings none
    grammar_rows: list[int] = []
    num_proposed: int = 0  # draft tokens to guess behind the step for each row that it samples
    # with several data-parallel ranks, each of which has a plan of this step, perhaps an empty one
    of_all: StepSize | None = None
    experts: ExpertStep | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens run by this step over all rows."""
        return sum(self.num_scheduled)


class GrammarRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sampled row of a plan whose next token may be constrained."""

    row: int  # of the plan
    request_id: str
    num_outputs: int  # output tokens before the first one that is sampled
    num_drafts: int = 0  # draft tokens that the row verifies


class GrammarBitmask(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Which tokens the grammar rows of step `step_id` may sample; follows the plan. Rows that are
    not named may sample any.

    A row is named once for each of its samples that has a mask, in order: the first, then those
    behind its draft tokens. Where there are fewer, the draft tokens behind them count as wrong.
    """

    step_id: int
    rows: list[int]  # of the plan
    places: list[int]  # for each of them, its mask in `masks`; -1: any token
    masks: list[bytes]  # ceil(vocabulary / 8) bytes each: bit i of byte j allows token 8 j + i
    # rows of the plan whose mask is late: what they sample means nothing, and their last token runs
    # again in a later step
    postponed: list[int] = []


class RowFailures(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Slots that failed on a rank while it launched step `step_id`, and why."""

    step_id: int
    errors: dict[int, str]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position: the chosen token's, its rank (1 = most likely), and the
    most likely tokens'.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class StepResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What step `step_id` produced. `token_ids` has the tokens of each row with `needs_sampling`,
    in plan order: one for each accepted draft token of the row, and one more.
    """

    step_id: int
    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs]  # by index into `token_ids`; only rows that asked
    # by row index of the plan; one entry per prompt token run after the first
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    errors: dict[int, str]  # by row index of the plan: this row failed, the others are good
    num_accepted: dict[int, int] = {}  # by row index of the plan: draft tokens that were right
    # by row index of the plan, of grammar rows: draft tokens that may follow, -1: none
    proposed: dict[int, list[int]] = {}
    device_seconds: float = 0.0  # that the step took on a GPU
    idle_seconds: float = 0.0  # that the GPU had nothing to do before it
    # [layers, experts] int64: how often each was chosen on all ranks, if the plan asks for it
    expert_counts: bytes = b""
    # by row index of the plan: draft tokens that were guessed, of rows where some are missing
    num_guessed: dict[int, int] = {}


class SequenceUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one request gained by a committed step; goes to the client as it is."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # on the first update only, complete
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"; None: goes on
    stop_reason: int | None = None  # the stop token id, when one of `stop_token_ids` ended it
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    error: str | None = None
    is_refusal: bool = False  # the error is the request's own: what it asks for cannot be done
    # the error is that a process which served the request is gone: the same request may succeed
    is_lost: bool = False
    # of an answer that is complete: rows with drafts, their draft tokens, right ones; None: no rows
    drafts: tuple[int, int, int] | None = None
