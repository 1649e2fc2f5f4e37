"""Verification of draft tokens, and both ends of a draft model's pass."""

import torch
from torch import Tensor

from negamax.kernels.norm.op import WIDE_ERROR, NormWeight, rms
from negamax.kernels.op import FLOAT_DTYPES, Tolerance, op, rounding_tolerance


def count_accepted(
    sampled: Tensor,
    drafts: Tensor,
    firsts: Tensor,
    num_drafts: Tensor,
    /,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Count the accepted draft tokens of each row: those before the first mismatch.

    Row i has the 1 + num_drafts[i] entries of `sampled` [R] from firsts[i] on, and the first
    num_drafts[i] of drafts[i] (-1: none). drafts [rows, K], firsts, num_drafts [rows] -> [rows],
    all int64, in `out` if given.
    """
    places = torch.arange(drafts.shape[1], device=sampled.device)
    is_draft = (places < num_drafts.unsqueeze(1)) & (drafts >= 0)
    index = (firsts.unsqueeze(1) + places).clamp_max(sampled.shape[0] - 1)
    is_accepted = ((sampled[index] == drafts) & is_draft).long()
    return torch.sum(is_accepted.cumprod(dim=1), dim=1, out=out)


def advance_rows(
    accepted: Tensor,  # [rows] int64, accepted draft tokens
    counts: Tensor,  # [rows] int64, tokens of each row in the step, drafts included; 0: padding
    seq_lens: Tensor,  # [rows] int64, sequence lengths after all of these
    firsts: Tensor,  # [rows] int64, index of a row's first token in the step
    slots: Tensor,
    /,  # [rows] int64
    *,
    num_computed: Tensor,  # [slots] int64, written
    lengths: Tensor,  # [rows] int64, written: known tokens
    ends: Tensor,  # [rows] int64, written: index of the last accepted token in the step
) -> None:
    """Compute the lengths of rows after a step with draft tokens."""
    computed = seq_lens - (counts - 1).clamp_min(0) + accepted
    num_computed[slots] = computed
    torch.add(computed, 1, out=lengths)
    torch.add(firsts, accepted, out=ends)


def record_drafts(
    picked: Tensor,  # [R] int64, -1: none
    ids: Tensor,  # [n + 1] int64, the target's ids of the draft model's n tokens, and -1
    slots: Tensor,  # [R] int64
    lengths: Tensor,
    /,  # [R] int64, known tokens of the slots, all of them computed
    *,
    place: int,
    padding_slot: int,
    last: int,
    drafts: Tensor,  # [R, K] int64, column `place` is written: the target's ids
) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the draft tokens of a pass, and return the inputs of the next one.

    Those are tokens (0 where there is none) and positions (`last` at most), [R] int64, and sequence
    lengths, 0 in the padding slot, [R] int32.
    """
    proposed = ids[picked.clamp(-1, len(ids) - 2)]  # (-1 finds the last one)
    drafts[:, place] = proposed
    positions = (lengths - 1 + place).clamp(0, last)
    seq_lens = (positions + 1).masked_fill(slots == padding_slot, 0)
    return proposed.clamp_min(0), positions, seq_lens.int()


def embed_norms(
    token_ids: Tensor,  # [T], -1: none
    table: Tensor,  # [vocab + 2, width]: a row of zeros, the embeddings, a row of zeros
    hidden: Tensor,  # [T, width]
    embedding_weight: Tensor,  # [width]
    hidden_weight: Tensor | None,
    /,  # [width], None: no norm
    *,
    eps: float,
) -> Tensor:
    """Concatenate RMS norms of token embeddings and of hidden states, [T, 2 * width]."""
    embedded = table[(token_ids + 1).clamp(0, len(table) - 1)]
    normed = rms(embedded, NormWeight(embedding_weight, eps))
    if hidden_weight is not None:
        hidden = rms(hidden, NormWeight(hidden_weight, eps))
    return torch.cat([normed, hidden], dim=-1)


_EXACT = dict.fromkeys(FLOAT_DTYPES, Tolerance(0.0, 0.0, "integers"))

COUNT_ACCEPTED = op(
    "drafts.count_accepted",
    count_accepted,
    None,
    summary="accepted draft tokens of each row",
    tolerance=_EXACT,
)
ADVANCE_ROWS = op(
    "drafts.advance_rows",
    advance_rows,
    None,
    summary="lengths of rows after verification",
    tolerance=_EXACT,
)
RECORD_DRAFTS = op(
    "drafts.record_drafts",
    record_drafts,
    None,
    summary="keep draft tokens, and inputs of the next pass",
    tolerance=_EXACT,
)
EMBED_NORMS = op(
    "drafts.embed_norms",
    embed_norms,
    None,
    summary="norms of token embeddings and of hidden states, concatenated",
    sequence=("embedding", "norm.add_rms", "norm.add_rms", "concatenate"),
    tolerance=rounding_tolerance(scale=2.0, reason="as norm.add_rms"),
    wide_error=WIDE_ERROR,
)
