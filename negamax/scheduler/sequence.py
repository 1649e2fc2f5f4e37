"""State of one request in the scheduler."""

from typing import Any

import msgspec

from negamax.scheduler.limits import SchedulerLimits
from negamax.scheduler.prefix_cache import BlockHashes
from negamax.scheduler.request import GenerateRequest
from negamax.scheduler.step import SequenceUpdate, TokenLogprobs

NO_SLOT = -1
NEVER = 2**63  # larger than any number of tokens


class Sequence:
    """State of one request: waiting (no slot, no blocks), running or finished. `tokens` contains
    the known tokens. `num_computed` counts tokens that have run or are in a plan. `num_total`
    counts `tokens` and the tokens that steps in flight sample. Drafts in flight count as accepted.
    """

    __slots__ = (
        "block_hashes", "block_ids", "capacity", "drafts", "finished", "held_images", "index_at",
        "is_constrained", "is_postponed", "known_at", "limit", "may_load", "may_read",
        "num_cached_tokens", "num_committed", "num_computed", "num_indexed", "num_proposed",
        "num_total", "order", "prompt_len", "prompt_logprobs", "rank", "request", "request_id",
        "resume_after", "retry_gain", "slot", "stop_from", "stop_ids", "tenant", "tokens", "turn",
        "was_admitted", "worker_sampling",
    )  # fmt: skip

    def __init__(
        self,
        request: GenerateRequest,
        limits: SchedulerLimits,
        *,
        limit: int,
        turn: int,
        arrival: int,
    ) -> None:
        """`limit`: most tokens. Sequences of equal priority run by `turn`, then by `arrival`."""
        sampling = request.sampling
        self.request = request
        self.request_id = request.request_id
        self.tenant = request.tenant
        self.turn = turn
        self.order = (request.priority, turn, arrival)  # sequences with lower values run first
        self.tokens = list(request.prompt_token_ids)
        self.prompt_len = len(self.tokens)
        self.limit = limit
        # number of tokens up to which stop tokens are ignored
        self.stop_from = self.prompt_len + sampling.min_tokens
        self.stop_ids = frozenset() if sampling.ignore_eos else limits.eos_token_ids
        if sampling.stop_token_ids:
            self.stop_ids |= frozenset(sampling.stop_token_ids)
        size, salt, images = limits.block_size, request.cache_salt, request.images
        self.block_hashes = BlockHashes(self.tokens, block_size=size, salt=salt, images=images)
        self.held_images: dict[int, Any] = {}  # index of an image -> `EncodedImage` in use

        self.rank: int | None = None  # data-parallel rank that runs the sequence
        self.slot = NO_SLOT
        self.block_ids: list[int] = []
        self.capacity = 0  # number of tokens that fit in the blocks of `block_ids`
        self.num_computed = 0
        self.num_committed = 0  # number of leading tokens whose steps are committed
        self.num_total = self.prompt_len
        self.num_indexed = 0  # number of leading blocks that were offered to the pool's index
        self.index_at = NEVER  # number of computed tokens at which the next block is full

        self.known_at = 0  # first turn (`Turns`) to which the last sampled token is available
        self.num_proposed = 0  # number of draft tokens that follow the last sampled token
        self.drafts = (0, 0, 0)  # counts of rows with drafts, of drafts and of accepted drafts
        self.was_admitted = False
        self.num_cached_tokens = 0  # number of prompt tokens found cached at first admission
        self.resume_after = -1  # id of the last step that may yield tokens after a preemption
        self.may_load = True  # whether host memory is searched before the next admission
        self.may_read = True  # whether files are searched before the next admission
        self.retry_gain = 0  # value of pool.gain_count at which admission is tried again
        self.prompt_logprobs: list[TokenLogprobs] | None = None  # None: unrequested or already sent
        if sampling.prompt_logprobs is not None:
            self.prompt_logprobs = []
        self.is_constrained = sampling.is_constrained  # whether masks may limit the next token
        self.is_postponed = False  # whether the sequence waits for its grammar mask
        self.worker_sampling = sampling  # `sampling` without fields that only the engine reads
        if sampling.grammar is not None or sampling.reasoning is not None:
            self.worker_sampling = msgspec.structs.replace(sampling, grammar=None, reasoning=None)
        self.finished = False

    def subtract(self, num_tokens: int) -> None:
        """Subtract rejected drafts or a postponed token, whose blocks later tokens reuse."""
        self.num_computed -= num_tokens
        self.num_total -= num_tokens

    def finish_reason(self) -> str | None:
        """Return the finish reason; None if the latest token does not end the sequence."""
        if len(self.tokens) > self.stop_from and self.tokens[-1] in self.stop_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.limit else None

    def stop_reason(self, eos_token_ids: frozenset[int]) -> int | None:
        """Return the stop token that ended the sequence, or None for an end-of-sequence token."""
        is_eos = self.tokens[-1] in eos_token_ids and not self.request.sampling.ignore_eos
        return None if is_eos else self.tokens[-1]

    def end_update(self, finish_reason: str, *, error: str | None = None) -> SequenceUpdate:
        """Return the final update of a sequence that ends without a new token."""
        return SequenceUpdate(
            self.request_id,
            [],
            finish_reason=finish_reason,
            num_cached_tokens=self.num_cached_tokens,
            error=error,
        )


class DraftCounters:
    """Counts the draft tokens in committed rows. Rows without drafts are ignored."""

    def __init__(self, most_drafts: int) -> None:
        self.num_rows = 0  # number of rows with draft tokens
        self.num_tokens = 0  # number of draft tokens in all rows
        self.accepted_per_position = [0] * most_drafts  # accepted drafts by draft position

    def add(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Count a committed row with drafts."""
        if not num_drafts:
            return
        rows, tokens, accepted = sequence.drafts
        sequence.drafts = rows + 1, tokens + num_drafts, accepted + num_accepted
        self.num_rows += 1
        self.num_tokens += num_drafts
        for place in range(num_accepted):
            self.accepted_per_position[place] += 1
