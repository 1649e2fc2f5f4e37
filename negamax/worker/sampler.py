"""Sample one token per row from its logits and parameters.

Rare features cost time only for rows that use these features. No function waits for the device, so
copies to the host may still run when a function returns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from negamax.kernels.peers import Collective
from negamax.kernels.registry import KernelTable
from negamax.kernels.sampling import noise
from negamax.kernels.sampling import op as ops
from negamax.kernels.sampling.op import DRAW_LEADING, PICK, RowSampling
from negamax.scheduler.step import TokenLogprobs
from negamax.worker.batch import SampleInputs
from negamax.worker.device import HostTensor, indices
from negamax.worker.grammar_bitmask import RowBitmasks
from negamax.worker.logit_edits import EditedRow
from negamax.worker.request_state import RequestState

BROKEN = -1  # token id that marks a row whose logits are not finite


class LogprobEntries:
    """Log-probabilities of N sampled tokens and their top alternatives, copied to the host."""

    def __init__(self, logprobs: Tensor, token_ids: Tensor, *, num_top: Sequence[int]) -> None:
        """logprobs [N, V] fp32, token_ids [N] int64. Row i gets num_top[i] alternatives."""
        self._num_top = num_top
        described = ops.token_logprobs(
            logprobs, token_ids.clamp_min(0), num_top=min(max(num_top), logprobs.shape[1])
        )
        self._columns = [HostTensor(column) for column in (token_ids, *described)]

    def read(self) -> list[TokenLogprobs]:
        columns = [column.read().tolist() for column in self._columns]
        return [
            TokenLogprobs(
                token_id=token, logprob=lp, rank=rank, top_ids=top[:k], top_logprobs=top_lp[:k]
            )
            for token, lp, rank, top, top_lp, k in zip(*columns, self._num_top, strict=True)
        ]


@dataclass(frozen=True)
class Sampled:
    """Sampled tokens of R rows."""

    token_ids: Tensor  # [R] int64, BROKEN for rows without finite logits
    logprob_rows: list[int] = field(default_factory=list)  # rows with requested log-probabilities
    logprobs: LogprobEntries | None = None  # log-probabilities of `logprob_rows`
    is_captured: bool = False  # whether a captured step has sampled and stored the tokens


class Sampler:
    """Samples from logits that are split over the ranks of `group`. With `on_shards`, ranks
    exchange one value and one index for each row without filters. For a row with a small top_k,
    ranks exchange the tokens with the largest logits. Every rank gathers the whole logits for rows
    with edits, log-probabilities or filters other than a small top_k. Without `on_shards`, every
    rank gathers the logits of all rows. Log-probabilities are computed before edits and masks.
    """

    def __init__(
        self,
        requests: RequestState,
        *,
        kernels: KernelTable,
        group: Collective,
        on_shards: bool,
        first_id: int = 0,
    ) -> None:
        """`first_id`: first token of this rank's logits."""
        self._requests, self._kernels = requests, kernels
        self._group, self._first_id, self._on_shards = group, first_id, on_shards
        self._shard: dict[str, Any] = {"first_id": first_id, "group": group}

    def __call__(
        self,
        logits: Tensor,
        inputs: SampleInputs,
        *,
        picked: Tensor | None = None,
        masks: RowBitmasks | None = None,
    ) -> Sampled:
        """Sample every row of `logits` [R, V of this rank] fp32, which may be overwritten. `picked`
        [R]: tokens that a captured step has already sampled.
        """
        members = list(range(len(inputs.slots)))
        if self._on_shards:
            if picked is None:
                picked = self._choose_on_shards(logits, inputs, masks=masks)
            needs_all = self._requests.needs_all_logits
            members = [i for i, slot in enumerate(inputs.slots) if needs_all(slot)]
            if not members:
                return Sampled(picked)
        return self._choose_gathered(logits, inputs, members, picked=picked, masks=masks)

    def launch_all(self, logits: Tensor, inputs: SampleInputs) -> None:
        """As a warmup on padding rows, launch all kernels that sampling from `logits` may use."""
        rows, shard = self._get_rows(inputs), self._shard
        picked = self._kernels[PICK].run(logits, rows, **shard)
        self._kernels[DRAW_LEADING].run(logits, rows, otherwise=picked, **shard)
        self._choose(self._group.all_gather(logits, dim=-1), inputs)

    def _get_rows(self, inputs: SampleInputs) -> RowSampling:
        return self._requests.get_sampling(inputs.slots_device, inputs.positions_device)

    def _choose_on_shards(
        self, logits: Tensor, inputs: SampleInputs, *, masks: RowBitmasks | None
    ) -> Tensor:
        requests = self._requests
        if masks is not None:
            reporting = requests.logprob_slots
            early = [i for i, slot in enumerate(inputs.slots) if slot not in reporting]
            masks = masks.select(early)
        if masks is not None:
            masks.apply(logits, first_id=self._first_id)
        rows, shard = self._get_rows(inputs), self._shard
        picked = self._kernels[PICK].run(logits, rows, **shard)
        if not requests.filtered_slots.isdisjoint(inputs.slots):
            picked = self._kernels[DRAW_LEADING].run(logits, rows, otherwise=picked, **shard)
        return picked

    def _choose_gathered(
        self,
        logits: Tensor,
        inputs: SampleInputs,
        members: list[int],
        *,
        picked: Tensor | None,
        masks: RowBitmasks | None,
    ) -> Sampled:
        """Sample the rows `members` from their whole logits. Other rows keep `picked`."""
        device, requests, part, index = logits.device, self._requests, inputs, None
        if len(members) < len(inputs.slots):
            index = indices(members, device)
            part = SampleInputs(
                [inputs.slots[i] for i in members],
                [inputs.bounds[i] for i in members],
                inputs.slots_device[index],
                inputs.positions_device[index],
            )
            masks = None if masks is None else masks.select(members, renumber=True)
        full = self._group.all_gather(logits if index is None else logits[index], dim=-1)
        wanted = [i for i, slot in enumerate(part.slots) if slot in requests.logprob_slots]
        raw = torch.log_softmax(full[indices(wanted, device)], dim=-1) if wanted else None
        _edit_rows(full, part, requests=requests, masks=masks)
        token_ids = self._choose(full, part)
        if index is not None:
            assert picked is not None
            token_ids = picked.index_copy(0, index, token_ids)
        asked, entries = [members[i] for i in wanted], None
        if raw is not None:
            num_top = [requests.state(inputs.slots[i]).sampling.logprobs or 0 for i in asked]
            entries = LogprobEntries(raw, token_ids[indices(asked, device)], num_top=num_top)
        return Sampled(token_ids, asked, entries)

    def _choose(self, logits: Tensor, inputs: SampleInputs) -> Tensor:
        """Sample each row from whole logits. On a GPU, sharded sampling returns the same tokens."""
        requests, kernels = self._requests, self._kernels
        if self._on_shards:  # PICK ignores filters; filtered rows are drawn again below
            token_ids: Tensor = kernels[PICK].run(logits, self._get_rows(inputs), first_id=0)
            drawing = requests.filtered_slots
        else:
            best, token_ids = logits.max(dim=-1)  # `max` returns NaN if a logit is NaN
            token_ids = token_ids.where(best.isfinite(), BROKEN)
            drawing = requests.drawn_slots
        members = [i for i, slot in enumerate(inputs.slots) if slot in drawing]
        for index, drawn in self._draws(logits, inputs, members):
            token_ids[index] = drawn.where(token_ids[index] != BROKEN, BROKEN)
        return token_ids

    def _draws(
        self, logits: Tensor, inputs: SampleInputs, members: list[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Sample the rows `members` in two groups. Rows with a small top_k use a fixed number of
        candidates, and other rows use all logits. Separate kernels sample the groups.
        """
        requests, vocab_size = self._requests, logits.shape[1]
        top_k = {i: requests.state(inputs.slots[i]).sampling.top_k or 0 for i in members}
        narrow = [i for i in members if 0 < top_k[i] <= ops.CANDIDATES]
        wide = [i for i in members if not 0 < top_k[i] <= ops.CANDIDATES]
        groups = ((narrow, min(ops.CANDIDATES, vocab_size)), (wide, vocab_size))
        for chosen, candidates in groups:
            if chosen:
                index = indices(chosen, logits.device)
                rows = logits if len(chosen) == len(logits) else logits[index]
                slots, positions = inputs.slots_device[index], inputs.positions_device[index]
                filters, seeds = requests.sampling[slots], requests.seeds[slots]
                uniforms = noise.uniforms(seeds, positions)
                drawn = ops.sample(rows, filters=filters, uniforms=uniforms, candidates=candidates)
                yield index, drawn


def _edit_rows(
    logits: Tensor, inputs: SampleInputs, *, requests: RequestState, masks: RowBitmasks | None
) -> None:
    """Apply each row's edits, then the masks, to logits [R, V] in place."""
    for i, slot in enumerate(inputs.slots):
        if slot in requests.special_slots:
            is_masked = masks is not None and i in masks.members
            try:
                _edit(logits[i], i, inputs, requests=requests, is_masked=is_masked)
            except Exception as error:
                requests.fail(slot, error)
    if masks is not None:
        masks.apply(logits, first_id=0)


def _edit(
    logits: Tensor, i: int, inputs: SampleInputs, *, requests: RequestState, is_masked: bool
) -> None:
    """Edit the logits [V] of row `i`."""
    slot, bound, position = inputs.slots[i], inputs.bounds[i], inputs.positions_device[i]
    state = requests.state(slot)
    outputs = requests.tokens[slot, state.prompt_len : bound].long()
    places = torch.arange(state.prompt_len, bound, device=logits.device)
    row = EditedRow(
        prompt_ids=requests.tokens[slot, : state.prompt_len].long(),
        output_ids=outputs.where(places < position, -1),
        num_outputs=position - state.prompt_len,
        is_masked=is_masked,
    )
    for edit in state.edits:
        edit(logits, row)
