"""Count accepted draft tokens, update row lengths, and prepare and record draft model passes. Each
op is one launch with a program per token or row; PyTorch ops would need about twelve launches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.drafts import op as spec
from negamax.kernels.drafts.op import (
    ADVANCE_ROWS,
    ATTEND_BLOCK,
    COUNT_ACCEPTED,
    EMBED_NORMS,
    RECORD_DRAFTS,
)
from negamax.kernels.drafts.triton_block import attend_block
from negamax.kernels.launch.triton import launch_dependents_then_wait, launch_options, triton_kernel
from negamax.kernels.launch.triton_words import as_words, make_word_indices
from negamax.kernels.norm import tiles
from negamax.kernels.norm.triton import normalize_words
from negamax.kernels.op import FLOAT_DTYPES


@triton.jit(do_not_specialize=["num_sampled", "stride"])
def _count_accepted_kernel(
    sampled,  # [R] int64, sampled tokens
    drafts,  # [rows, stride] int64, draft tokens
    firsts,  # [rows] int64, index in `sampled` of each row's first token
    num_drafts,  # [rows] int64, number of draft tokens per row
    accepted,  # [rows] int64, written: number of accepted draft tokens per row
    num_sampled,
    stride,
    ROOM_POW2: tl.constexpr,
):
    """Count the draft tokens of a row before the first rejected draft token. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    count, first = tl.load(num_drafts + row), tl.load(firsts + row)
    place = tl.arange(0, ROOM_POW2)
    is_draft = place < count
    draft = tl.load(drafts + row * stride + place, mask=is_draft, other=-1)
    sample = tl.load(
        sampled + first + place, mask=is_draft & (first + place < num_sampled), other=-1
    )
    is_accepted = is_draft & (draft >= 0) & (draft == sample)
    tl.store(accepted + row, tl.min(tl.where(is_accepted, ROOM_POW2, place), axis=0).to(tl.int64))


def count_accepted(
    sampled: Tensor,
    drafts: Tensor,
    firsts: Tensor,
    num_drafts: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    assert drafts.stride(1) == 1
    columns = (sampled, firsts, num_drafts)
    assert all(column.is_contiguous() for column in columns)
    # If `_count_accepted_kernel` is only compiled, not run, later ops use these zeros as indices.
    accepted = torch.zeros_like(firsts) if out is None else out
    if len(firsts):
        _count_accepted_kernel[(len(firsts),)](
            sampled,
            drafts,
            firsts,
            num_drafts,
            accepted,
            len(sampled),
            drafts.stride(0),
            # each row of draft tokens ends with one extra column, which is never accepted
            ROOM_POW2=triton.next_power_of_2(drafts.shape[1] + 1),
            num_warps=1,
        )
    return accepted


@triton.jit
def _advance_rows_kernel(
    accepted,  # [rows] int64; counts, seq_lens, firsts and slots have the same shape and dtype
    counts,
    seq_lens,
    firsts,
    slots,
    num_computed,  # [slots] int64, written: number of computed tokens
    lengths,  # [rows] int64, written: number of computed tokens + 1
    ends,  # [rows] int64, written: index in the step of each row's last accepted token
    PDL: tl.constexpr,
):
    """Compute num_computed, length, end of a row. Padding rows write equal values. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    launch_dependents_then_wait(PDL)
    num_accepted = tl.load(accepted + row)
    num_drafts = tl.maximum(tl.load(counts + row) - 1, 0)
    computed = tl.load(seq_lens + row) - num_drafts + num_accepted
    tl.store(num_computed + tl.load(slots + row), computed)
    tl.store(lengths + row, computed + 1)
    tl.store(ends + row, tl.load(firsts + row) + num_accepted)


def advance_rows(
    accepted: Tensor,
    counts: Tensor,
    seq_lens: Tensor,
    firsts: Tensor,
    slots: Tensor,
    *,
    num_computed: Tensor,
    lengths: Tensor,
    ends: Tensor,
) -> None:
    columns = (accepted, counts, seq_lens, firsts, slots, num_computed, lengths, ends)
    assert all(column.is_contiguous() for column in columns)
    if len(slots):
        _advance_rows_kernel[(len(slots),)](*columns, num_warps=1, **launch_options(slots.device))


@triton.jit(do_not_specialize=["place", "padding_slot", "last", "stride", "num_ids"])
def _record_drafts_kernel(
    picked,  # [R] int64, draft-vocabulary ids; slots and lengths have the same shape and dtype
    ids,  # [num_ids + 1] int64, target-vocabulary ids of the draft-vocabulary tokens, then -1
    slots,
    lengths,
    drafts,  # [R, stride] int64, column `place` is written
    token_ids,  # [R] int64, written: token ids of the next draft pass
    positions,  # [R] int64, written: positions of the next draft pass
    seq_lens,  # [R] int32, written: sequence lengths of the next draft pass
    place,
    padding_slot,
    last,
    stride,
    num_ids,
    PDL: tl.constexpr,
):
    """Record the draft token of one row. Grid (R,)."""
    row = tl.program_id(0).to(tl.int64)
    launch_dependents_then_wait(PDL)
    token = tl.load(picked + row)
    token = tl.where(token < 0, num_ids, tl.minimum(token, num_ids - 1))
    token_id = tl.load(ids + token)
    position = tl.minimum(tl.maximum(tl.load(lengths + row) - 1 + place, 0), last)
    tl.store(drafts + row * stride + place, token_id)
    tl.store(token_ids + row, tl.maximum(token_id, 0))
    tl.store(positions + row, position)
    is_padding = tl.load(slots + row) == padding_slot
    tl.store(seq_lens + row, tl.where(is_padding, 0, position + 1).to(tl.int32))


def record_drafts(
    picked: Tensor,
    ids: Tensor,
    slots: Tensor,
    lengths: Tensor,
    *,
    place: int,
    padding_slot: int,
    last: int,
    drafts: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    columns = (picked, ids, slots, lengths, drafts)
    assert all(column.is_contiguous() for column in columns)
    token_ids, positions = torch.empty(2, *slots.shape, dtype=torch.int64, device=slots.device)
    seq_lens = torch.empty(slots.shape, dtype=torch.int32, device=slots.device)
    if len(slots):
        _record_drafts_kernel[(len(slots),)](
            *columns, token_ids, positions, seq_lens, place, padding_slot, last, drafts.shape[1],
            len(ids) - 1, num_warps=1, **launch_options(slots.device),
        )  # fmt: skip
    return token_ids, positions, seq_lens


@triton.jit(do_not_specialize=["num_rows"])
def _embed_norms_kernel(
    token_ids,  # [T], -1: no token
    table,  # [num_rows, 2 * WORDS], embeddings between two rows of zeros
    hidden,  # [T, 2 * WORDS]
    embedding_weight,  # [2 * WORDS], norm weight of the embeddings
    hidden_weight,  # [2 * WORDS], norm weight; None: hidden states are not normalized
    out,  # [T, 4 * WORDS], written: norm of the embedding, then of the hidden state
    num_rows,
    eps,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalize a token's embedding (program 0) or hidden state (program 1). Grid (T, 2)."""
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    index = make_word_indices(BLOCK)
    mask = index < WORDS
    to = as_words(out) + row * (2 * WORDS) + index
    launch_dependents_then_wait(PDL)
    if tl.program_id(1) == 0:
        weight_words = tl.load(as_words(embedding_weight) + index, mask=mask, other=0)
        token = tl.load(token_ids + row).to(tl.int64) + 1
        token = tl.minimum(tl.maximum(token, 0), num_rows - 1)
        words = tl.load(as_words(table) + token * WORDS + index, mask=mask, other=0)
        tl.store(to, normalize_words(words, weight_words, eps, WORDS, False, dtype), mask=mask)
    else:
        words = tl.load(as_words(hidden) + row * WORDS + index, mask=mask, other=0)
        if hidden_weight is not None:
            weight_words = tl.load(as_words(hidden_weight) + index, mask=mask, other=0)
            words = normalize_words(words, weight_words, eps, WORDS, False, dtype)
        tl.store(to + WORDS, words, mask=mask)


def embed_norms(
    token_ids: Tensor,
    table: Tensor,
    hidden: Tensor,
    embedding_weight: Tensor,
    hidden_weight: Tensor | None,
    *,
    eps: float,
) -> Tensor:
    num_tokens, width = hidden.shape
    if width % 2:  # the kernel reads rows as 4-byte words
        return spec.embed_norms(token_ids, table, hidden, embedding_weight, hidden_weight, eps=eps)
    out = hidden.new_empty(num_tokens, 2 * width)
    assert all(tensor.is_contiguous() for tensor in (token_ids, table, hidden))
    if num_tokens:
        _embed_norms_kernel[(num_tokens, 2)](
            token_ids, table, hidden, embedding_weight, hidden_weight, out, len(table), eps,
            WORDS=width // 2,
            BLOCK=triton.next_power_of_2(width // 2),
            num_warps=tiles.num_warps(hidden.device, width),
            **launch_options(hidden.device),
        )  # fmt: skip
    return out


KERNELS = (
    triton_kernel(COUNT_ACCEPTED, count_accepted, dtypes=FLOAT_DTYPES),
    triton_kernel(ADVANCE_ROWS, advance_rows, dtypes=FLOAT_DTYPES),
    triton_kernel(RECORD_DRAFTS, record_drafts, dtypes=FLOAT_DTYPES),
    triton_kernel(EMBED_NORMS, embed_norms),
    triton_kernel(ATTEND_BLOCK, attend_block),
)
