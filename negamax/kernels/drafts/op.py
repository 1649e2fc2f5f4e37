"""Ops that verify draft tokens, prepare and record draft passes, and attend with draft blocks."""

from typing import NamedTuple

import torch
from torch import Tensor

from negamax.kernels.attention.op import attention_op, rows_of
from negamax.kernels.kvcache.op import KvCache
from negamax.kernels.norm.op import WIDE_ERROR, NormWeight, rms
from negamax.kernels.op import EXACT, op, rounding_tolerance


def count_accepted(
    sampled: Tensor,
    drafts: Tensor,
    firsts: Tensor,
    num_drafts: Tensor,
    /,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Count the accepted draft tokens of each row, which precede the first mismatch.

    The sampled tokens of row i are 1 + num_drafts[i] entries of `sampled` [R] from index firsts[i]
    on. The row's draft tokens are the first num_drafts[i] entries of drafts[i] (-1: no token).
    drafts [rows, K], firsts, num_drafts [rows] -> [rows], all int64. If `out` is given, it receives
    the result.
    """
    places = torch.arange(drafts.shape[1], device=sampled.device)
    is_draft = (places < num_drafts.unsqueeze(1)) & (drafts >= 0)
    index = (firsts.unsqueeze(1) + places).clamp_max(sampled.shape[0] - 1)
    is_accepted = ((sampled[index] == drafts) & is_draft).long()
    return torch.sum(is_accepted.cumprod(dim=1), dim=1, out=out)


def advance_rows(
    accepted: Tensor,  # [rows] int64, number of accepted draft tokens
    counts: Tensor,  # [rows] int64, number of tokens per row, drafts included; 0: padding
    seq_lens: Tensor,  # [rows] int64, sequence lengths including all tokens of this step
    firsts: Tensor,  # [rows] int64, index of a row's first token in the step
    slots: Tensor,  # [rows] int64, index of each row in `num_computed`
    /,
    *,
    num_computed: Tensor,  # [slots] int64, written: number of computed tokens
    lengths: Tensor,  # [rows] int64, written: number of computed tokens + 1
    ends: Tensor,  # [rows] int64, written: the last accepted (else first) token's index in the step
) -> None:
    """Compute the sequence lengths of rows after a step with draft tokens."""
    computed = seq_lens - (counts - 1).clamp_min(0) + accepted
    num_computed[slots] = computed
    torch.add(computed, 1, out=lengths)
    torch.add(firsts, accepted, out=ends)


def record_drafts(
    picked: Tensor,  # [R] int64, picked draft-vocabulary ids; -1: no token
    ids: Tensor,  # [n + 1] int64, target-vocabulary ids of the n draft-vocabulary tokens, then -1
    slots: Tensor,  # [R] int64, slot of each row; padding rows have `padding_slot`
    lengths: Tensor,  # [R] int64, sequence lengths; the draft model has processed all these tokens
    /,
    *,
    place: int,
    padding_slot: int,
    last: int,
    drafts: Tensor,  # [R, K] int64, column `place` receives target-vocabulary ids
) -> tuple[Tensor, Tensor, Tensor]:
    """Store the draft tokens of a pass, and return the inputs of the next pass.

    The inputs are token ids [R] int64 (0: no token), positions [R] int64 (at most `last`) and
    sequence lengths [R] int32 (0: padding slot).
    """
    proposed = ids[picked.clamp(-1, len(ids) - 2)]  # index -1 selects the last id, which is -1
    drafts[:, place] = proposed
    positions = (lengths - 1 + place).clamp(0, last)
    seq_lens = (positions + 1).masked_fill(slots == padding_slot, 0)
    return proposed.clamp_min(0), positions, seq_lens.int()


def embed_norms(
    token_ids: Tensor,  # [T], -1: no token
    table: Tensor,  # [vocab + 2, width]: a row of zeros, the embeddings, a row of zeros
    hidden: Tensor,  # [T, width]
    embedding_weight: Tensor,  # [width], norm weight of the embeddings
    hidden_weight: Tensor | None,  # [width], norm weight; None: hidden states are not normalized
    /,
    *,
    eps: float,
) -> Tensor:
    """Concatenate RMS norms of token embeddings and of hidden states, [T, 2 * width]."""
    embedded = table[(token_ids + 1).clamp(0, len(table) - 1)]
    normed = rms(embedded, NormWeight(embedding_weight, eps))
    if hidden_weight is not None:
        hidden = rms(hidden, NormWeight(hidden_weight, eps))
    return torch.cat([normed, hidden], dim=-1)


class BlockContext(NamedTuple):
    """The cached context of R blocks of draft tokens."""

    tables: Tensor  # [slots, max_blocks], block tables of the paged caches
    slots: Tensor  # [R] int64, index in `tables` of each block's row
    lengths: Tensor  # [R] int32, number of cached tokens before each block; 0 for padding


def attend_block(
    q: Tensor,  # [R * N, heads, head_dim]
    own: KvCache,  # keys and values of q's rows, [R, kv_heads, N, head_dim], not divided by scales
    cache: KvCache,
    context: BlockContext,
    /,
    *,
    sliding_window: int,  # number of tokens, including the row's own token; 0: the whole context
    is_causal: bool,
) -> Tensor:
    """Compute attention of R blocks, each with N rows -> [R * N, heads * head_dim].

    A row attends to the context within its window and to all rows of its block. With `is_causal` a
    row does not attend to later rows of its block.
    """
    (num_blocks, kv_heads, rows, head_dim), device = own.k.shape, q.device
    queries = q.view(num_blocks, rows, kv_heads, -1, head_dim).float()
    out, places = torch.empty_like(queries), torch.arange(rows, device=device)
    for block, length in enumerate(context.lengths.tolist()):
        table = context.tables[context.slots[block]].long()
        k, v = (
            torch.cat([rows_of(cached, table, length) * scale, new[block].transpose(0, 1).float()])
            for cached, new, scale in zip(cache[:2], own[:2], cache.scales, strict=True)
        )
        scores = torch.einsum("nhgd,jhd->hgnj", queries[block], k) * head_dim**-0.5
        keys, positions = torch.arange(length + rows, device=device), length + places.unsqueeze(1)
        is_hidden = (keys <= positions - sliding_window) & (keys < length) & (sliding_window > 0)
        if is_causal:
            is_hidden |= keys > positions
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
        out[block] = torch.einsum("hgnj,jhd->nhgd", weights, v)
    return out.view(q.shape[0], -1).to(q.dtype)


COUNT_ACCEPTED = op(
    "drafts.count_accepted", count_accepted, None, "accepted draft tokens of each row", EXACT
)
ADVANCE_ROWS = op(
    "drafts.advance_rows", advance_rows, None, "lengths of rows after verification", EXACT
)
RECORD_DRAFTS = op(
    "drafts.record_drafts", record_drafts, None, "draft tokens and inputs of the next pass", EXACT
)
EMBED_NORMS = op(
    "drafts.embed_norms",
    embed_norms,
    None,
    "norms of token embeddings and of hidden states, concatenated",
    rounding_tolerance(scale=2.0, reason="as norm.add_rms"),
    sequence=("embedding", "norm.add_rms", "norm.add_rms", "concatenate"),
    wide_error=WIDE_ERROR,
)
ATTEND_BLOCK = attention_op(
    "drafts.attend_block",
    attend_block,
    None,
    "rows of draft blocks against their paged context and their own keys and values",
)
