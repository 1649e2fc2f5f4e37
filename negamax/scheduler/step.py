"""What the scheduler tells the worker (StepPlan) and what it hears back (StepResult). Frozen plain
data, columns not rows, so that a plan for hundreds of sequences stays a handful of flat lists.

A *slot* is a persistent row of the worker: it holds a sequence's tokens, block table and sampling
state from `NewRow` until the slot is given to another sequence. The worker reads its input tokens
from the row, and writes each sampled token into the row itself, so a plan can run before the
previous step's tokens have reached the host.
"""

from __future__ import annotations

import msgspec

from negamax.scheduler.request import SamplingParams


class NewRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence that takes over `slot` (a new request, or one resumed after preemption)."""

    slot: int
    token_ids: list[int]  # all tokens known now: prompt, then outputs so far
    prompt_len: int  # how many of them are prompt
    block_ids: list[int]  # KV blocks of positions 0.., in order
    sampling: SamplingParams


class StepPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step: apply `new_rows` and `appended_*`, then run row i of `slots` on tokens [starts[i],
    starts[i] + counts[i]).
    """

    step_id: int
    new_rows: list[NewRow]
    appended_slots: list[int]  # one entry per appended block
    appended_blocks: list[int]  # block id, goes to the end of that slot's table
    slots: list[int]
    starts: list[int]  # position of the first token to run
    counts: list[int]  # tokens to run, at least 1
    # True: the last token's logits are sampled; the token lands at position start + count
    samples: list[bool]
    # rows whose sampling waits for the `StepMasks` of this step; empty: it brings none
    masked: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Tokens run by this step over all rows."""
        return sum(self.counts)


class MaskedRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sampled row of a plan whose next token may be constrained."""

    row: int  # of the plan
    request_id: str
    num_outputs: int  # output tokens before the one that is sampled


class StepMasks(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Which tokens the masked rows of step `step_id` may sample; follows the plan. Rows that are
    not named may sample any.
    """

    step_id: int
    rows: list[int]  # of the plan
    places: list[int]  # for each of them, its mask in `masks`
    masks: list[bytes]  # ceil(vocabulary / 8) bytes each: bit i of byte j allows token 8 j + i


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
    """What step `step_id` produced. `token_ids` has one entry per row with `samples` True, in plan
    order.
    """

    step_id: int
    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs]  # by index into `token_ids`; only rows that asked
    # by row index of the plan; one entry per prompt token run after the first
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    errors: dict[int, str]  # by row index of the plan: this row failed, the others are good
    device_seconds: float = 0.0  # that the step took on a GPU
    idle_seconds: float = 0.0  # that the GPU had nothing to do before it


class SequenceUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one request gained by a committed step; goes to the client as it is."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs] | None  # on the first update only, complete
    finish_reason: str | None  # "stop" | "length" | "abort" | "error"; None: goes on
    stop_reason: int | None  # the stop token id, when one of `stop_token_ids` ended it
    num_cached_tokens: int  # prompt tokens taken from the prefix cache
    error: str | None
    is_refusal: bool = False  # the error is the request's own: what it asks for cannot be done
    # the error is that a process which served the request is gone: the same request may succeed
    is_lost: bool = False
