"""Multiply packed weights with up to TOKENS tokens. A program loads its full rows of the weight
before it uses the first value.

The warps split the columns. In each step a warp multiplies SPAN columns of all rows of the program,
as one batch entry of a batched product on the tensor cores. One instruction multiplies 256 weights
with eight tokens; the CUDA cores would need 128 instructions for each token. With a single token
the eight columns of a product hold the values of x for eight steps:

    several tokens                         one token
    step i    w_i [x0_i x1_i .. x7_i]      w_i [x_0 x_1 .. x_7], of which column i is used

The values of a single token are therefore loaded once and not in each step. If all 4-bit codes have
one addend, the kernel multiplies it with x once, and all products start from this result.

A fragment has one span per row and warp: [8, NUM_WARPS, ROWS / 8, 16] words. A thread has four
neighboring words of every eighth row, and four threads have a span. A span is SPAN columns with 4
bits and SPAN / 2 columns with 8 bits. The tensor cores expect a thread to have the rows and columns
that it loads (`layout.py`), so weights do not pass through shared memory. The dimensions of a load
are in the order in which Triton assigns threads to them (`add_last_first`).
"""

# ruff: noqa: RUF005  (Triton appends to a tuple with + alone)

from typing import Any

import triton
import triton.language as tl

from negamax.kernels.launch.triton import TRITON_VERSION, add_last_first, dot
from negamax.kernels.weight_only.triton import (
    POST_FACTOR,
    RAW,
    convert_scales,
    convert_zeros,
    exponent,
    make_constants,
    scale_to_fp32,
    side_entries,
    strides,
    unpack_numbers,
)

TOKENS = tl.constexpr(8)  # smallest number of tokens of a tensor core instruction
SPAN = tl.constexpr(128)  # number of columns that a warp multiplies in a step
_WORDS = tl.constexpr(16)  # number of words per row of a fragment.
# `_NEIGHBORS`: number of adjacent columns of a 16-bit `dot` operand that Triton assigns to a thread
_NEIGHBORS = 2 if TRITON_VERSION >= (3, 8) else 4


@triton.constexpr_function
def _has_one_scale(P: Any) -> bool:
    """Return whether the columns of a warp in a step have one scale per row."""
    return bool(P.GROUP and P.GROUP % SPAN.value == 0)


@triton.constexpr_function
def _steps(P: Any, NUM_WARPS: int) -> int:
    """Return the number of steps if NUM_WARPS warps split the columns."""
    return -(-P.K_PACKED // (SPAN.value * NUM_WARPS))


@triton.constexpr_function
def _fills_steps(columns: int, NUM_WARPS: int) -> bool:
    """Return whether `columns` columns keep all warps busy in every step."""
    return columns % (SPAN.value * NUM_WARPS) == 0


@triton.constexpr_function
def _vector(P: Any) -> int:
    """Return columns per thread: 8 for byte scales or small zero-point groups, else _NEIGHBORS."""
    grouped = P.GROUP > 0 and not _has_one_scale(P)
    is_byte = (P.SCALE != "float" and not P.IN_WORDS) or (P.ZEROS and P.GROUP < 64)
    return 8 if grouped and is_byte else _NEIGHBORS


@triton.constexpr_function
def _starts_from_offset(P: Any) -> bool:
    """Return whether products of one token start from x times the addend that all codes share."""
    return bool(P.ELEMENT == "uint4" and not P.ZEROS and _has_one_scale(P))


@triton.constexpr_function
def _column(step: int) -> int:
    """Return the index (0 to 7) of the product column that has the result of `step`."""
    return step % TOKENS.value


@triton.jit
def number_fragment_rows(ROWS: tl.constexpr):
    """Return the row numbers of a fragment, [ROWS / 8, 8]."""
    return tl.arange(0, ROWS // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def load_weight(
    w, rows, num_rows, P: tl.constexpr, NUM_WARPS: tl.constexpr, split=0, SPLIT_K: tl.constexpr = 1
):
    """Load the stored codes, scales and zero points of all steps of a packed weight with `num_rows`
    rows. `rows` [ROWS / 8, 8] are in the order of `number_fragment_rows`. SPLIT_K programs split
    the columns; this program has number `split`.
    """
    WARPS: tl.constexpr = NUM_WARPS * SPLIT_K
    STEPS: tl.constexpr = _steps(P, WARPS)
    PARTS: tl.constexpr = 2 // P.CODES  # number of fragments per step
    EVEN: tl.constexpr = _fills_steps(P.K_PACKED, WARPS)
    row_words, span_words = strides(num_rows, P)
    span = _warps(split, NUM_WARPS)[None, :, None, None] * PARTS
    q_ptrs = w[0] + rows.to(tl.int64)[:, None, :, None] * row_words + span * span_words
    q_ptrs = add_last_first(q_ptrs, tl.arange(0, _WORDS)[None, None, None, :], _WORDS)
    codes, scales, zeros = (), (), ()
    for i in tl.static_range(STEPS * PARTS):
        first = i // PARTS * WARPS * PARTS + i % PARTS
        inside = ((span + first) * (SPAN // PARTS) < P.K_PACKED) | EVEN
        q_span = q_ptrs + first * span_words
        words = tl.load(q_span, mask=inside, other=0, cache_modifier=".cg")
        codes = codes + (tl.permute(words, (2, 1, 0, 3)),)
    if P.GROUP > 0:
        for step in tl.static_range(STEPS):
            stored = _load_side(
                w[1], rows, num_rows, step, P, NUM_WARPS, split, SPLIT_K, P.IN_WORDS
            )
            scales = scales + (stored,)
            if P.ZEROS:
                stored = _load_side(w[2], rows, num_rows, step, P, NUM_WARPS, split, SPLIT_K, False)
                zeros = zeros + (stored,)
    return codes, scales, zeros


@triton.jit
def _warps(split, NUM_WARPS: tl.constexpr):
    """Return indices [NUM_WARPS] of program `split`'s warps among the warps of all splits."""
    return split * NUM_WARPS + tl.arange(0, NUM_WARPS)


@triton.jit
def _load_side(
    ptr, rows, num_rows, step: tl.constexpr, P: tl.constexpr, NUM_WARPS: tl.constexpr, split,
    SPLIT_K: tl.constexpr, IN_WORDS: tl.constexpr,
):  # fmt: skip
    """Load the scales or zero points of a step -> [4, 8, NUM_WARPS, ROWS / 8, entries]; each thread
    loads the entries that it uses.
    """
    ENTRIES: tl.constexpr = side_entries(P, IN_WORDS)
    WARPS: tl.constexpr = NUM_WARPS * SPLIT_K
    k = (step * WARPS + _warps(split, NUM_WARPS))[None, :, None, None, None] * SPAN
    k += tl.arange(0, 4)[None, None, None, :, None] * 0
    offsets = k // max(P.GROUP, SPAN) * num_rows + rows[:, None, :, None, None]
    offsets = offsets * ENTRIES + tl.arange(0, ENTRIES)[None, None, None, None, :]
    # number of bytes of adjacent entries, which one instruction loads
    SIZE: tl.constexpr = ENTRIES * ptr.dtype.element_ty.primitive_bitwidth // 8
    ptrs = add_last_first(ptr, offsets, ENTRIES, SIZE)
    inside = (k < P.K_PACKED) | _fills_steps(P.K_PACKED, WARPS)
    return tl.permute(tl.load(ptrs, mask=inside, other=0), (3, 2, 1, 0, 4))


@triton.jit
def multiply_weight(
    loaded, x_ptr, x_rows, P: tl.constexpr, ROWS: tl.constexpr, NUM_WARPS: tl.constexpr, split=0,
    SPLIT_K: tl.constexpr = 1,
):  # fmt: skip
    """Multiply weights `loaded` with rows of x [any, K] -> [ROWS, TOKENS] fp32; no row scales."""
    WARPS: tl.constexpr = NUM_WARPS * SPLIT_K
    STEPS: tl.constexpr = _steps(P, WARPS)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    codes, scales, zeros = loaded
    acc = tl.zeros((NUM_WARPS, ROWS, TOKENS), tl.float32)
    for i in tl.static_range(STEPS):
        x = _load_tokens(x_ptr, x_rows, i * (WARPS * SPAN), P, NUM_WARPS, 1, split, SPLIT_K)
        w = _dequantize(codes, scales, zeros, i, P, ROWS, NUM_WARPS, DTYPE, False)
        if P.GROUP > 0 and _has_one_scale(P):
            product = dot(w, x, tl.zeros_like(acc))
            acc += _times_scale(product, scales[i], P, ROWS, NUM_WARPS)
        else:
            acc = dot(w, x, acc)
    acc = tl.sum(acc, axis=0)
    if exponent(P, DTYPE) != 0:
        acc *= POST_FACTOR
    return acc


@triton.jit
def multiply_token(
    loaded, x_ptr, P: tl.constexpr, ROWS: tl.constexpr, NUM_WARPS: tl.constexpr, split=0,
    SPLIT_K: tl.constexpr = 1,
):  # fmt: skip
    """Multiply weights `loaded` with one token x [K] -> [ROWS] fp32, without row scales."""
    WARPS: tl.constexpr = NUM_WARPS * SPLIT_K
    STEPS: tl.constexpr = _steps(P, WARPS)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    codes, scales, zeros = loaded
    acc = tl.zeros((NUM_WARPS, ROWS, TOKENS), tl.float32)
    column = tl.arange(0, TOKENS)
    x = ()
    for i in tl.static_range(0, STEPS, TOKENS):
        first = (i + column)[None, None, :, None, None] * (WARPS * SPAN)
        tokens = _load_tokens(x_ptr, column * 0, first, P, NUM_WARPS, TOKENS, split, SPLIT_K)
        x = x + (tokens,)
    start = tl.zeros_like(acc)
    for i in tl.static_range(STEPS):
        if _starts_from_offset(P) and _column(i) == 0:
            # These codes are 0, but Triton treats them like loaded codes. Triton then keeps x in
            # the layout of the other `dot` calls.
            words = (codes[i].to(tl.uint32) >> 31 >> 1).to(tl.int32)
            none = _dequantize((words,), scales, zeros, 0, P, ROWS, NUM_WARPS, DTYPE, True)
            start = dot(none, x[i // TOKENS], tl.zeros_like(acc)) * (-(RAW + 8.0) / RAW)
        w = _dequantize(codes, scales, zeros, i, P, ROWS, NUM_WARPS, DTYPE, _starts_from_offset(P))
        product = dot(w, x[i // TOKENS], start)
        if P.GROUP > 0 and _has_one_scale(P):
            product = _times_scale(product, scales[i], P, ROWS, NUM_WARPS)
        acc += tl.where(column[None, None, :] == _column(i), product, 0.0)
    acc = tl.sum(tl.sum(acc, axis=2), axis=0)
    if exponent(P, DTYPE) != 0:
        acc *= POST_FACTOR
    return acc


@triton.jit
def _times_scale(
    product, scale, P: tl.constexpr, ROWS: tl.constexpr, NUM_WARPS: tl.constexpr
):  # fmt: skip
    """Multiply product [NUM_WARPS, ROWS, TOKENS] by one scale per row and warp."""
    scale = tl.permute(scale_to_fp32(scale, P), (2, 3, 1, 0, 4))
    product = tl.reshape(product, (NUM_WARPS, ROWS // 8, 8, 4, TOKENS // 4)) * scale
    return tl.reshape(product, (NUM_WARPS, ROWS, TOKENS))


@triton.jit
def _load_tokens(
    x_ptr, rows, first, P: tl.constexpr, NUM_WARPS: tl.constexpr, STEPS: tl.constexpr, split,
    SPLIT_K: tl.constexpr,
):  # fmt: skip
    """Load rows `rows` [TOKENS] of x [any, K] for the tensor cores -> [NUM_WARPS, SPAN, TOKENS].

    A scalar `first` is the first column of one step. If `first` is [1, 1, TOKENS, 1, 1], it has the
    first columns of STEPS steps. Each thread loads the values that it multiplies.
    """
    # axes of the pointers: steps of 8 columns, warp, token, thread, neighboring columns
    thread = tl.arange(0, 4)[None, None, None, :, None]
    warp = _warps(split, NUM_WARPS)[None, :, None, None, None]
    k = warp * SPAN + thread * 2
    x_ptrs = x_ptr + rows.to(tl.int64)[None, None, :, None, None] * P.K + k
    constant = first + tl.arange(0, SPAN // 8)[:, None, None, None, None] * 8
    constant += tl.arange(0, 2)[None, None, None, None, :]
    x_ptrs = add_last_first(x_ptrs, constant.to(tl.int64), 2)
    inside = (k + constant < P.K) | _fills_steps(P.K, NUM_WARPS * SPLIT_K * STEPS)
    x = tl.permute(tl.load(x_ptrs, mask=inside, other=0.0), (2, 3, 1, 0, 4))
    VECTOR: tl.constexpr = _vector(P)
    x = tl.reshape(x, (TOKENS, 4, NUM_WARPS, SPAN // 4 // VECTOR, VECTOR))
    return tl.reshape(tl.permute(x, (2, 3, 1, 4, 0)), (NUM_WARPS, SPAN, TOKENS))


@triton.jit
def _dequantize(
    codes, scales, zeros, step: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
    NUM_WARPS: tl.constexpr, DTYPE: tl.constexpr, IS_RAW: tl.constexpr,
):  # fmt: skip
    """Unpack the codes of a step -> [NUM_WARPS, ROWS, SPAN]. Scales are applied if a span has
    several groups. With IS_RAW the result is the codes plus RAW.
    """
    GROUPED: tl.constexpr = P.GROUP > 0 and not _has_one_scale(P)
    factors, added = make_constants(P, DTYPE)
    parts = ()
    for i in tl.static_range(2 // P.CODES):
        if GROUPED:
            found = convert_scales(_flatten_rows(scales[step]), i, P, DTYPE)
            factors = _reorder_words(found, ROWS, NUM_WARPS)
        if P.ZEROS:
            found = convert_zeros(_flatten_rows(zeros[step]), i, P, DTYPE)
            added = _reorder_words(found, ROWS, NUM_WARPS)
        words = codes[step * (2 // P.CODES) + i]
        part = unpack_numbers(words, factors, added, P, DTYPE, GROUPED, IS_RAW)
        parts = parts + (part,)
    if P.CODES == 2:
        # axes: row of 8, warp, group of 8 rows, thread, then strides of 32, 1, 8, 16 columns
        w = tl.reshape(parts[0], (8, NUM_WARPS, ROWS // 8, 4, 4, 2, 2, 2))
        w = tl.permute(w, (1, 2, 0, 3, 4, 7, 6, 5))
    else:
        # axes: row of 8, warp, group of 8 rows, thread, then strides of 16, 1, 8, 64 columns
        w = tl.reshape(tl.join(parts[0], parts[1]), (8, NUM_WARPS, ROWS // 8, 4, 4, 2, 2, 2))
        w = tl.permute(w, (1, 2, 0, 3, 7, 4, 6, 5))
    VECTOR: tl.constexpr = _vector(P)
    w = tl.reshape(w, (NUM_WARPS, ROWS, 4, SPAN // 4 // VECTOR, VECTOR))
    return tl.reshape(tl.permute(w, (0, 1, 3, 2, 4)), (NUM_WARPS, ROWS, SPAN))


@triton.jit
def _reorder_words(each, ROWS: tl.constexpr, NUM_WARPS: tl.constexpr):
    """Reorder two tensors [4 * 8 * NUM_WARPS * ROWS / 8, 4] -> [8, NUM_WARPS, ROWS / 8, 16]."""
    return _reorder_fragment(each[0], ROWS, NUM_WARPS), _reorder_fragment(each[1], ROWS, NUM_WARPS)


@triton.jit
def _reorder_fragment(each, ROWS: tl.constexpr, NUM_WARPS: tl.constexpr):
    each = tl.permute(tl.reshape(each, (4, 8, NUM_WARPS, ROWS // 8, 4)), (1, 2, 3, 0, 4))
    return tl.reshape(each, (8, NUM_WARPS, ROWS // 8, _WORDS))


@triton.jit
def _flatten_rows(each):
    """Flatten [4, 8, NUM_WARPS, ROWS / 8, entries] -> [any, entries]."""
    ENTRIES: tl.constexpr = each.shape[4]
    return tl.reshape(each, (each.numel // ENTRIES, ENTRIES))
