"""Prepare a step and store its sampled tokens. Each op is one launch; PyTorch needs several."""

import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.launch.ptx import launch_dependents
from negamax.kernels.launch.triton import launch_dependents_then_wait, launch_options, triton_kernel
from negamax.kernels.launch.triton_words import as_words
from negamax.kernels.norm import tiles
from negamax.kernels.op import FLOAT_DTYPES
from negamax.kernels.steps import op as spec
from negamax.kernels.steps.op import EMBED_TOKENS, PLACE_TOKENS, STORE_TOKENS, ImageRows

_BLOCK = 128  # number of entries of each output that a program writes


@triton.jit(do_not_specialize=["num_tokens", "size", "num_words", "padding_slot"])
def _place_kernel(
    columns,  # see `spec.place`
    num_computed,  # [slots] int64; position of a token = num_computed + its offset
    tokens,  # [slots, width], written: draft tokens
    drafts,  # [slots, room] int64, draft tokens; or None
    places,  # [size] int64, written: positions of the tokens, then lengths of the sequences
    token_ids,  # [num_tokens] int64, written: the step's tokens
    ends,  # [num_tokens] int64, written: positions + 1; 0 for tokens of the padding slot
    words,  # [num_words] int32, written: sequence lengths, then the last entries of `columns`
    num_tokens,
    size,  # number of tokens + number of sequences
    num_words,
    padding_slot,
    width,
    room,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write BLOCK entries of each output. Grid (blocks,).

    A program reads data of other programs only for padding tokens, for which all write equal
    values. The kernel starts after its predecessor has ended, so programs do not wait.
    """
    launch_dependents(PDL)
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    live, is_token = at < size, at < num_tokens
    slot = tl.load(columns + at, mask=live, other=0)
    offset = tl.load(columns + size + at, mask=live, other=0)
    place = tl.load(num_computed + slot, mask=live, other=0) + offset
    tl.store(places + at, place, mask=live)
    word = at - num_tokens
    tl.store(words + word, place.to(tl.int32), mask=live & (word >= 0))
    more = tl.load(columns + size + at, mask=(at >= size) & (word < num_words), other=0)
    tl.store(words + word, more.to(tl.int32), mask=(at >= size) & (word < num_words))
    known = tokens + slot * width + place
    if drafts is None:
        token_id = tl.load(known, mask=is_token, other=0).to(tl.int64)
    else:
        token_id = tl.load(known, mask=is_token & (offset == 0), other=0).to(tl.int64)
        guess = tl.load(drafts + slot * room + offset - 1, mask=is_token & (offset > 0), other=0)
        token_id += tl.maximum(guess, 0)
        tl.store(known, token_id.to(tokens.dtype.element_ty), mask=is_token)
    tl.store(token_ids + at, token_id, mask=is_token)
    tl.store(ends + at, tl.where(slot == padding_slot, 0, place + 1), mask=is_token)


def place(
    columns: Tensor,
    num_computed: Tensor,
    tokens: Tensor,
    drafts: Tensor | None,
    *,
    padding_slot: int,
    places: Tensor,
    token_ids: Tensor,
    ends: Tensor,
    words: Tensor,
) -> None:
    written = (places, token_ids, ends, words)
    assert all(tensor.is_contiguous() for tensor in (columns, num_computed, tokens, *written))
    num_tokens, size = len(token_ids), len(places)
    _place_kernel[(triton.cdiv(num_tokens + len(words), _BLOCK),)](
        columns, num_computed, tokens, drafts, *written, num_tokens, size, len(words),
        padding_slot, tokens.shape[1], 0 if drafts is None else drafts.shape[1],
        BLOCK=_BLOCK,
        num_warps=4,
        **launch_options(columns.device, starts_early=False),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "first_id"])
def _embed_kernel(
    token_ids,  # [T] int64
    table,  # [num_rows, 2 * WORDS]
    images,  # [T] int32, index in `rows`; -1: read `table`; None: no token has an image row
    rows,  # [P, 2 * WORDS], image embeddings; or None
    out,  # [2, T, 2 * WORDS], written: embeddings, then a residual of zeros
    num_rows,
    first_id,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Embed one token. Grid (T,)."""
    row, count = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    index = tl.arange(0, BLOCK)
    mask = index < WORDS
    to = as_words(out) + row * WORDS + index
    launch_dependents_then_wait(PDL)
    tl.store(to + count.to(tl.int64) * WORDS, tl.zeros_like(index), mask=mask)
    token = tl.load(token_ids + row) - (first_id - 1)
    token = tl.minimum(tl.maximum(token, 0), num_rows - 1)
    if images is None:
        words = tl.load(as_words(table) + token * WORDS + index, mask=mask)
    else:
        image = tl.load(images + row).to(tl.int64)
        from_table, from_rows = mask & (image < 0), mask & (image >= 0)
        words = tl.load(as_words(table) + token * WORDS + index, mask=from_table, other=0)
        words |= tl.load(as_words(rows) + image * WORDS + index, mask=from_rows, other=0)
    tl.store(to, words, mask=mask)


def embed(
    token_ids: Tensor, table: Tensor, images: ImageRows | None = None, *, first_id: int
) -> tuple[Tensor, Tensor]:
    num_tokens, (num_rows, width) = len(token_ids), table.shape
    if width % 2:  # the kernel reads rows as 4-byte words
        return spec.embed(token_ids, table, images, first_id=first_id)
    assert token_ids.is_contiguous() and table.is_contiguous()
    out = table.new_empty(2, num_tokens, width)
    if num_tokens:
        _embed_kernel[(num_tokens,)](
            token_ids, table, *(images or (None, None)), out, num_rows, first_id,
            WORDS=width // 2,
            BLOCK=triton.next_power_of_2(width // 2),
            num_warps=tiles.num_warps(table.device, width),
            **launch_options(table.device),
        )  # fmt: skip
    return out[0], out[1]


@triton.jit(do_not_specialize=["num_tokens"])
def _store_kernel(
    token_ids,  # [T] int64
    slots,  # [T] int64, row of each token in `tokens`
    ends,  # [T] int64, columns of `tokens` to which the tokens are written
    tokens,  # [slots, width], written
    num_computed,  # [slots] int64, set to the `ends` of each slot's token; or None
    out,  # [T] int64, written: a copy of `token_ids`
    num_tokens,
    width,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store BLOCK tokens. Grid (blocks,)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < num_tokens
    launch_dependents_then_wait(PDL)
    slot, end = tl.load(slots + at, mask=live, other=0), tl.load(ends + at, mask=live, other=0)
    token_id = tl.load(token_ids + at, mask=live, other=0)
    known = tl.maximum(token_id, 0).to(tokens.dtype.element_ty)
    tl.store(tokens + slot * width + end, known, mask=live)
    if num_computed is not None:
        tl.store(num_computed + slot, end, mask=live)
    tl.store(out + at, token_id, mask=live)


def store(
    token_ids: Tensor,
    slots: Tensor,
    ends: Tensor,
    *,
    tokens: Tensor,
    num_computed: Tensor | None,
    out: Tensor,
) -> None:
    assert all(tensor.is_contiguous() for tensor in (token_ids, slots, ends, tokens, out))
    if len(slots):
        _store_kernel[(triton.cdiv(len(slots), _BLOCK),)](
            token_ids, slots, ends, tokens, num_computed, out, len(slots), tokens.shape[1],
            BLOCK=_BLOCK, num_warps=4, **launch_options(slots.device),
        )  # fmt: skip


KERNELS = (
    triton_kernel(PLACE_TOKENS, place, dtypes=FLOAT_DTYPES),
    triton_kernel(EMBED_TOKENS, embed),
    triton_kernel(STORE_TOKENS, store, dtypes=FLOAT_DTYPES),
)
