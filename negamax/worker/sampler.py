"""From logits to one token per sampled row, with what the row's parameters ask for. Rare features touch only the rows that
use them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from negamax.kernels.registry import KernelTable
from negamax.kernels.sampling import spec as ops
from negamax.scheduler.step import TokenLogprobs
from negamax.worker.batch import ForwardBatch
from negamax.worker.rows import Rows


@dataclass(frozen=True)
class Sampled:
    """The outcome for R rows."""

    token_ids: Tensor  # [R] int64
    logprobs: dict[int, TokenLogprobs]  # by index into the R rows
    broken: tuple[int, ...]  # indices of rows whose logits are not finite


def sample(logits: Tensor, batch: ForwardBatch, *, rows: Rows, kernels: KernelTable) -> Sampled:
    """Choose a token for every sampled row. `logits` [R, V] fp32 may be changed in place."""
    slots = batch.sample_slots
    wants_logprobs = [i for i, slot in enumerate(slots) if slot in rows.logprob_slots]
    raw = torch.log_softmax(logits[wants_logprobs], dim=-1) if wants_logprobs else None
    for i, slot in enumerate(slots):
        if slot in rows.special_slots:
            _edit(logits[i], slot, position=batch.sample_positions[i], rows=rows)
    token_ids = _draw(logits, batch, rows=rows, kernels=kernels)
    finite = logits.gather(1, token_ids.unsqueeze(1)).isfinite()  # argmax and topk both put NaN first
    broken = () if bool(finite.all()) else tuple((~finite.squeeze(1)).nonzero().flatten().tolist())
    logprobs: dict[int, TokenLogprobs] = {}
    if raw is not None:
        requested = [rows.state(slots[i]).sampling.logprobs or 0 for i in wants_logprobs]
        entries = describe(raw, token_ids[wants_logprobs], num_top=requested)
        logprobs = dict(zip(wants_logprobs, entries, strict=True))
    return Sampled(token_ids=token_ids, logprobs=logprobs, broken=broken)


def describe(logprobs: Tensor, token_ids: Tensor, *, num_top: list[int]) -> list[TokenLogprobs]:
    """Per row of `logprobs` [R, V]: the chosen token's entry with its own number of leading alternatives."""
    chosen, ranks, ids, values = ops.token_logprobs(logprobs, token_ids, num_top=min(max(num_top), logprobs.shape[1]))
    columns = zip(token_ids.tolist(), chosen.tolist(), ranks.tolist(), ids.tolist(), values.tolist(), num_top, strict=True)
    return [
        TokenLogprobs(token_id=token, logprob=lp, rank=rank, top_ids=top[:k], top_logprobs=top_lp[:k])
        for token, lp, rank, top, top_lp, k in columns
    ]


def _draw(logits: Tensor, batch: ForwardBatch, *, rows: Rows, kernels: KernelTable) -> Tensor:
    """Greedy rows take the maximum; rows with a small top_k draw from a fixed number of candidates; the others sort all.

    Each group's arithmetic has a shape that does not depend on the rows of the other groups, so that the same seed gives the
    same token in any company.
    """
    take_best, draw = kernels["sampling.greedy"].run, kernels["sampling.draw"].run
    slots = batch.sample_slots
    greedy: list[int] = []
    narrow: list[int] = []
    wide: list[int] = []
    for i, slot in enumerate(slots):
        params = rows.state(slot).sampling
        assert params.temperature is not None and params.top_k is not None
        if params.temperature == 0.0:
            greedy.append(i)
        elif 0 < params.top_k <= ops.CANDIDATES:
            narrow.append(i)
        else:
            wide.append(i)
    if len(greedy) == len(slots):
        return take_best(logits)
    token_ids = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
    if greedy:
        token_ids[greedy] = take_best(logits[greedy])
    vocab_size = logits.shape[1]
    for members, candidates in ((narrow, min(ops.CANDIDATES, vocab_size)), (wide, vocab_size)):
        if not members:
            continue
        whole = len(members) == len(slots)
        columns = rows.sampling[batch.sample_slots_device if whole else batch.sample_slots_device[members]]
        drawn: Tensor = draw(
            logits if whole else logits[members],
            temperature=columns[:, 0],
            top_k=columns[:, 1],
            top_p=columns[:, 2],
            min_p=columns[:, 3],
            uniforms=_uniforms(members, batch, rows=rows),
            candidates=candidates,
        )
        if whole:
            return drawn
        token_ids[members] = drawn
    return token_ids


def _uniforms(members: list[int], batch: ForwardBatch, *, rows: Rows) -> Tensor:
    values = []
    for i in members:
        seed = rows.state(batch.sample_slots[i]).sampling.seed
        assert seed is not None, "the engine gives every request a seed"
        values.append(ops.uniform(seed, batch.sample_positions[i]))
    return torch.tensor(values, dtype=torch.float32, device=rows.tokens.device)


def _edit(logits: Tensor, slot: int, *, position: int, rows: Rows) -> None:
    """Penalties, bias and the min_tokens block of one row; `logits` [V] is changed in place, `position` is the new token's."""
    state = rows.state(slot)
    params = state.sampling
    assert params.repetition_penalty is not None
    ops.apply_penalties(
        logits,
        rows.tokens[slot, : state.prompt_len],
        rows.tokens[slot, state.prompt_len : position],
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
    )
    if state.bias_ids.numel():
        logits[state.bias_ids] += state.bias_values
    if position - state.prompt_len < params.min_tokens and state.blocked_ids.numel():
        logits[state.blocked_ids] = float("-inf")
