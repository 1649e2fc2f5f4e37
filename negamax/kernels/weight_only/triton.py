"""Multiply with packed weights, which are dequantized in registers to the activations' dtype.

Kernels load tiles as words. Four threads load a row, 16 neighboring bytes each. The tensor cores
expect the codes of a thread's 16 bytes in the same thread (`layout.py`). A warp loads eight rows of
words, but the operand of the tensor cores has 16 rows per warp. Kernels therefore load rows in the
order of `compute_load_order`, so that no thread needs unpacked values of another thread.

On NVIDIA GPUs bit operations convert codes to pairs of bf16 (instructions per weight: uint4 1.4,
e2m1 1.6, e4m3 2.2, int8 1.8, uint8 2). The bits of e2m1 and e4m3 are moved to their positions in
bf16, which divides the value by a power of two. Scales are multiplied by this power divided by
2^_POST, so that they fit into bf16; the final sum is multiplied by 2^_POST.

If all columns of a tile have one scale, the scale multiplies the tile's product in fp32. Scales of
smaller groups multiply the weights. The scaled weights are rounded to the activations' dtype, which
costs 0.5 more instructions per weight.
"""

# ruff: noqa: RUF005  (Triton appends to a tuple with + alone)

from typing import Any

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from negamax.kernels.launch.ptx import INTERPRETED, pack_pair, take_bytes, unpack_words
from negamax.kernels.launch.triton import dot
from negamax.kernels.weight_only import layout

_POST = 10
POST_FACTOR = tl.constexpr(2.0**_POST)
_E5M3 = tl.constexpr((127 - layout.E5M3_BIAS) << 23)  # _E5M3 + (e5m3 << 20) = fp32 scale bits
_TWICE = tl.constexpr(0x00010001)
BYTES = tl.constexpr(layout.SPAN_BYTES)
_SIDE = tl.constexpr(layout.SIDE_COLUMNS)
RAW = tl.constexpr(128.0)  # unpacking adds this number to codes of 4 bits
COLUMNS = tl.constexpr(64)  # number of columns per `dot`; more columns need more registers
_ONE_SCALE_MAX_M = tl.constexpr(64)  # for more tokens, registers lack room for two accumulators


@triton.constexpr_function
def _converts_pairs(DTYPE: Any) -> bool:
    """Return whether codes are converted to pairs of bf16 by bit operations."""
    return not INTERPRETED and bool(is_cuda()) and tl.bfloat16 == DTYPE


@triton.constexpr_function
def exponent(P: Any, DTYPE: Any) -> int:
    """Return e: scales are multiplied by 2^e. Codes are 2^(e + _POST) times too small if e > 0."""
    lack = {"e2m1": 126 - _POST, "e4m3": 120 - _POST}.get(P.ELEMENT, 0)
    return lack if _converts_pairs(DTYPE) else 0


@triton.constexpr_function
def _factor(P: Any, DTYPE: Any) -> float:
    """Return 2^`exponent`, by which scales are multiplied."""
    return 2.0 ** exponent(P, DTYPE)


@triton.jit
def multiply(
    x_rows, valid, w, first, left, num_rows, start, stop, P: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    NUM_WARPS: tl.constexpr, PARTS: tl.constexpr = 1, APART: tl.constexpr = 0,
):  # fmt: skip
    """Multiply rows of the packed weight w with rows of x -> [PARTS * BLOCK_N, BLOCK_M] fp32.

    w has `num_rows` rows. Part p of the result is from the BLOCK_N rows of w from `first` + p *
    APART on; only the first `left` rows of a part are valid. Row m of x begins at pointer x_rows[m]
    if valid[m]. The product covers the columns of steps start .. stop - 1 of BLOCK_K columns. The
    weight is the left operand of `tl.dot`, read from registers.
    """
    ROWS: tl.constexpr = PARTS * BLOCK_N
    rows, inside = _rows(tl.arange(0, ROWS), left, BLOCK_N, APART)
    order = compute_load_order(ROWS, NUM_WARPS)
    q_rows, q_inside = _rows(order, left, BLOCK_N, APART)
    DTYPE: tl.constexpr = x_rows.dtype.element_ty
    EVEN: tl.constexpr = P.K % BLOCK_K == 0
    SPAN: tl.constexpr = BYTES * P.CODES
    SPANS: tl.constexpr = BLOCK_K // SPAN
    PRODUCTS: tl.constexpr = P.CODES  # number of `dot` calls per span
    ONE_SCALE: tl.constexpr = _has_one_scale(P, BLOCK_K) and BLOCK_M <= _ONE_SCALE_MAX_M
    GROUPED: tl.constexpr = P.GROUP > 0 and not ONE_SCALE
    columns = tl.arange(0, COLUMNS)
    x_ptrs = x_rows[None, :] + columns[:, None]
    acc = tl.zeros((ROWS, BLOCK_M), tl.float32)
    for step in tl.range(start, stop, num_stages=NUM_STAGES):
        first_k = step * BLOCK_K
        scale, zero = None, None
        if ONE_SCALE:
            scale = load_side(w[1], first, rows, inside, num_rows, first_k, P, BLOCK_K, False)
            product = tl.zeros_like(acc)
        elif GROUPED:
            scale = load_side(w[1], first, q_rows, q_inside, num_rows, first_k, P, BLOCK_K,
                               P.IN_WORDS)  # fmt: skip
        if P.ZEROS:
            zero = load_side(w[2], first, q_rows, q_inside, num_rows, first_k, P, BLOCK_K, False)
        for i in tl.static_range(SPANS):
            k = first_k + i * SPAN
            q = load_words(w, first, q_rows, q_inside, num_rows, k, P)
            factors, added = convert_sides(scale, zero, i, SPANS, P, DTYPE, GROUPED)
            q = split_by_product(q, P)
            for j in tl.static_range(PRODUCTS):
                weight = unpack_operand(
                    q[j], factors[j], added[j], P, DTYPE, GROUPED, ROWS, NUM_WARPS
                )
                here = valid[None, :] & ((columns < P.K - k - j * COLUMNS)[:, None] | EVEN)
                x = tl.load(x_ptrs + k + j * COLUMNS, mask=here, other=0.0)
                if ONE_SCALE:
                    product = dot(weight, x, product)
                else:
                    acc = dot(weight, x, acc)
        if ONE_SCALE:
            acc += product * scale_to_fp32(scale, P)
    if exponent(P, DTYPE) != 0:
        acc *= POST_FACTOR
    if P.ROW_SCALE:
        acc *= tl.load(w[3] + first + rows, mask=inside, other=0.0)[:, None]
    return acc


@triton.jit
def _rows(offs, left, BLOCK_N: tl.constexpr, APART: tl.constexpr):
    """Return the distances of rows `offs` from a tile's first row, and whether each is valid."""
    of_part = tl.max_contiguous(tl.multiple_of(offs % BLOCK_N, 8), 8)
    part = tl.max_constancy(offs // BLOCK_N, 8)
    return of_part + part * APART, of_part < left


@triton.jit
def compute_load_order(ROWS: tl.constexpr, NUM_WARPS: tl.constexpr):
    """Return the rows [ROWS] of a tile in the order of loads: a warp loads 8 rows at a time."""
    WARPS: tl.constexpr = min(NUM_WARPS, ROWS // 16)
    offs = tl.arange(0, ROWS)
    in_warp = offs // (8 * WARPS) % 2 * 8 + offs % 8
    return offs // (16 * WARPS) * (16 * WARPS) + offs // 8 % WARPS * 16 + in_warp


@triton.jit
def convert_sides(
    scale, zero, i: tl.constexpr, SPANS: tl.constexpr, P: tl.constexpr, DTYPE: tl.constexpr,
    GROUPED: tl.constexpr,
):  # fmt: skip
    """Return the factors and addends for `unpack_numbers`, for each product of span `i`.
    `load_side` loaded `scale` (used if GROUPED) and `zero` for all SPANS spans.
    """
    PART: tl.constexpr = i % (2 // P.CODES)  # index of the span in its block of 128 columns
    factors, added = make_constants(P, DTYPE)
    if GROUPED:
        own = _select_span(scale, i, SPANS, P, P.IN_WORDS)
        factors = _repeat_for_threads(convert_scales(own, PART, P, DTYPE))
    if P.ZEROS:
        own = _select_span(zero, i, SPANS, P, False)
        added = _repeat_for_threads(convert_zeros(own, PART, P, DTYPE))
    return _split_pairs(factors, P), _split_pairs(added, P)


@triton.jit
def _split_pairs(each, P: tl.constexpr):
    """Return two factors (or addends) for each product of a span: one per half of the codes."""
    first, second = split_by_product(each[0], P), split_by_product(each[1], P)
    if P.CODES == 1:
        pairs = ((first[0], second[0]),)
    else:
        pairs = ((first[0], second[0]), (first[1], second[1]))
    return pairs


@triton.jit
def unpack_operand(
    q, factors, added, P: tl.constexpr, DTYPE: tl.constexpr, GROUPED: tl.constexpr,
    ROWS: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """Unpack the words of one product to weights [ROWS, COLUMNS] in DTYPE."""
    numbers = unpack_numbers(q, factors, added, P, DTYPE, GROUPED)
    return _reorder_tile(numbers, P, ROWS, NUM_WARPS)


@triton.jit
def split_by_product(each, P: tl.constexpr):
    """Split scales or zero points [ROWS, 16] or [1, 1] of a span into a tensor per product."""
    ROWS: tl.constexpr = each.shape[0]
    if P.CODES == 1:
        products = (each,)
    elif ROWS == 1:
        products = (each, each)
    else:  # one `dot` uses the first two of a thread's four words, the next `dot` the last two
        by_half = tl.permute(tl.reshape(each, (ROWS, 4, 2, 2)), (0, 1, 3, 2))
        first, second = tl.split(by_half)
        products = (tl.reshape(first, (ROWS, 8)), tl.reshape(second, (ROWS, 8)))
    return products


@triton.jit
def _reorder_tile(numbers, P: tl.constexpr, ROWS: tl.constexpr, NUM_WARPS: tl.constexpr):
    """Reorder rows (load order) and columns (word order) to matrix order -> [ROWS, COLUMNS]."""
    WARPS: tl.constexpr = min(NUM_WARPS, ROWS // 16)
    TILES: tl.constexpr = ROWS // (16 * WARPS)
    numbers = tl.reshape(numbers, (TILES, 2, WARPS, 8, 4, 2, 2, 2, 2))
    if P.CODES == 2:  # axes from 4 on: thread, then strides of 32, 1, 8 and 16 columns
        numbers = tl.permute(numbers, (0, 2, 1, 3, 5, 8, 7, 4, 6))
    else:  # axes from 4 on: thread, then strides of 32, 16, 1 and 8 columns
        numbers = tl.permute(numbers, (0, 2, 1, 3, 5, 6, 8, 4, 7))
    return tl.reshape(numbers, (ROWS, COLUMNS))


@triton.jit
def load_side(
    ptr, first, rows, inside, num_rows, k, P: tl.constexpr, BLOCK_K: tl.constexpr,
    IN_WORDS: tl.constexpr,
):  # fmt: skip
    """Load stored scales or zero points -> [BLOCK_N, entries] of columns k .. k + BLOCK_K - 1.

    `rows` [BLOCK_N] are offsets from row `first` of a packed weight with `num_rows` rows. Entries
    where `inside` is false are 0.
    """
    tl.static_assert(BLOCK_K == _SIDE or BLOCK_K == 2 * _SIDE)  # `_select_span` needs these sizes
    COLUMNS: tl.constexpr = max(P.GROUP, _SIDE)
    ENTRIES: tl.constexpr = side_entries(P, IN_WORDS)
    offs = tl.arange(0, max(1, BLOCK_K // COLUMNS) * ENTRIES)
    fits = (k + offs // ENTRIES * COLUMNS < P.K_PACKED) | (P.K_PACKED % BLOCK_K == 0)
    ptr += (first + k // COLUMNS * num_rows) * ENTRIES
    offsets = (rows[:, None] + (offs // ENTRIES)[None, :] * num_rows) * ENTRIES
    offsets += (offs % ENTRIES)[None, :]
    return tl.load(ptr + offsets, mask=inside[:, None] & fits[None, :], other=0)


@triton.jit
def load_words(w, first, rows, inside, num_rows, k, P: tl.constexpr):
    """Load the words of the span at column k -> [BLOCK_N, 16]; `rows` are offsets from row `first`.
    The pointer includes the part of the address that all threads share. The offsets of one thread
    therefore differ by constants, which fit into the load instructions.
    """
    row_words, span_words = strides(num_rows, P)
    q_ptr = w[0] + first.to(tl.int64) * row_words + k // (BYTES * P.CODES) * span_words
    offsets = rows[:, None] * row_words + tl.arange(0, BYTES // 4)[None, :]
    return tl.load(q_ptr + offsets, mask=inside[:, None] & (k < P.K_PACKED), other=0)


@triton.jit
def strides(num_rows, P: tl.constexpr):
    """Return the number of words from a row to the next, and from a span to the next."""
    row, span = P.K_PACKED // 4, tl.full((), BYTES // 4, tl.int64)
    if P.CODES == 2:
        row, span = BYTES // 4, num_rows.to(tl.int64) * (BYTES // 4)
    return row, span


@triton.jit
def _select_span(
    each, i: tl.constexpr, SPANS: tl.constexpr, P: tl.constexpr, IN_WORDS: tl.constexpr
):
    """Return the scales or zero points [BLOCK_N, entries] of span `i` of SPANS spans."""
    if each.shape[1] > side_entries(P, IN_WORDS):  # `each` covers 256 columns, not 128
        each = _half(each, i // (SPANS // 2))
    return each


@triton.jit
def _half(each, i: tl.constexpr):
    """Return the first (i = 0) or second (i = 1) half of the columns of `each` [ROWS, COLUMNS]."""
    ROWS: tl.constexpr = each.shape[0]
    COLUMNS: tl.constexpr = each.shape[1]
    low, high = tl.split(tl.permute(tl.reshape(each, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
    return high if i == 1 else low


@triton.constexpr_function
def _has_one_scale(P: Any, BLOCK_K: int) -> bool:
    """Return whether a tile has one scale per row."""
    return P.GROUP >= BLOCK_K and P.GROUP % BLOCK_K == 0


@triton.jit
def scale_to_fp32(scale, P: tl.constexpr):
    """Convert stored scales to fp32."""
    if P.SCALE == "float":
        scale = scale.to(tl.float32)
    elif P.SCALE == "e8m0":
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        scale = ((scale.to(tl.int32) << 20) + _E5M3).to(tl.float32, bitcast=True)
    return scale


@triton.constexpr_function
def _bits_of_scale(P: Any, DTYPE: Any) -> int:
    """Return the number to add to e8m0 or e5m3 bits in bf16 to obtain scale * `_factor`."""
    return (exponent(P, DTYPE) + (0 if P.SCALE == "e8m0" else 127 - layout.E5M3_BIAS)) << 7


@triton.constexpr_function
def side_entries(P: Any, IN_WORDS: bool) -> int:
    """Return the number of adjacent scales or zero points of a row, or of words if IN_WORDS."""
    groups: int = max(1, layout.SIDE_COLUMNS // P.GROUP)
    return groups // 4 if IN_WORDS else groups


@triton.jit
def convert_scales(scale, part: tl.constexpr, P: tl.constexpr, DTYPE: tl.constexpr):
    """Convert stored scales [N, entries] to factors of the codes; see `_repeat_beside_words`."""
    if P.IN_WORDS and _converts_pairs(DTYPE):
        ONE: tl.constexpr = 1 << 7 if P.SCALE == "e8m0" else 1 << 4
        words = scale
        if scale.shape[1] == 2 and P.CODES == 1:
            words = _half(scale, part)
        words = _repeated(words, 4)
        run = tl.arange(0, 4)[None, :] * P.CODES + 4 * part
        first, second = run * 16 // P.GROUP % 4, (run + P.CODES - 1) * 16 // P.GROUP % 4
        pair = take_bytes(words, 0x4040 + first + second * 0x100)  # two scales, each in 16 bits
        pair = pair * ONE + _bits_of_scale(P, DTYPE) * _TWICE
        factors = (pair, pair)
    else:
        if P.IN_WORDS:
            N: tl.constexpr = scale.shape[0]
            GROUPS: tl.constexpr = side_entries(P, False)
            byte = scale[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]
            scale = tl.reshape(byte & 0xFF, (N, GROUPS))
        factors = _repeat_beside_words(scale_to_fp32(scale, P) * _factor(P, DTYPE), part, P, DTYPE)
    return factors


@triton.jit
def convert_zeros(zero, part: tl.constexpr, P: tl.constexpr, DTYPE: tl.constexpr):
    """Convert zero points [N, entries] to addends of the codes; see `_repeat_beside_words`."""
    return _repeat_beside_words(_offset(P, DTYPE) - zero.to(tl.float32), part, P, DTYPE)


@triton.jit
def _repeat_beside_words(number, part: tl.constexpr, P: tl.constexpr, DTYPE: tl.constexpr):
    """Repeat fp32 numbers [N, groups of 128 columns] for the four words that a thread has in span
    `part` -> two tensors [N, 4]: for the first and the second half of the codes of each word. If
    codes are converted in pairs, an entry has the numbers of both halves as two bf16 values.
    """
    ARE_ALIKE: tl.constexpr = P.GROUP >= 16 * P.CODES  # both halves of a word are in one group
    if _converts_pairs(DTYPE) and ARE_ALIKE:
        number = pack_pair(number, number, tl.bfloat16)
    runs = _repeated(number, 8)  # `runs` has one entry per 16 columns
    if P.CODES == 2:  # a word holds codes of two neighboring runs of 16 columns
        first, second = tl.split(tl.reshape(runs, (number.shape[0], 4, 2)))
    else:
        first = _half(runs, part)
        second = first
    if _converts_pairs(DTYPE) and not ARE_ALIKE:
        first = pack_pair(first, second, tl.bfloat16)
        second = first
    return first, second


@triton.jit
def _repeated(each, COLUMNS: tl.constexpr):
    """Repeat the entries of each row: [N, n] -> [N, COLUMNS]."""
    N: tl.constexpr = each.shape[0]
    OWN: tl.constexpr = each.shape[1]
    return tl.reshape(tl.broadcast_to(each[:, :, None], (N, OWN, COLUMNS // OWN)), (N, COLUMNS))


@triton.jit
def _repeat_for_threads(each):
    """Repeat two tensors [N, 4] (words of a thread) -> two tensors [N, 16] (words of 4 threads)."""
    return _repeat_for_thread(each[0]), _repeat_for_thread(each[1])


@triton.jit
def _repeat_for_thread(each):
    N: tl.constexpr = each.shape[0]
    return tl.reshape(tl.broadcast_to(each[:, None, :], (N, 4, 4)), (N, 16))


@triton.jit
def make_constants(P: tl.constexpr, DTYPE: tl.constexpr):
    """Return factors and addends for weights without group scales and zero points."""
    factor = tl.full((1, 1), _factor(P, DTYPE), tl.float32)
    added = tl.full((1, 1), _offset(P, DTYPE), tl.float32)
    if _converts_pairs(DTYPE):
        factor = pack_pair(factor, factor, tl.bfloat16)
        added = pack_pair(added, added, tl.bfloat16)
    return (factor, factor), (added, added)


@triton.jit
def unpack_numbers(
    q, factors, added, P: tl.constexpr, DTYPE: tl.constexpr, GROUPED: tl.constexpr,
    IS_RAW: tl.constexpr = False,
):  # fmt: skip
    """Unpack words -> [..., 2, 2] in DTYPE, or [..., 2, 2, 2] for 4-bit codes. The last dimensions
    index columns that are 1, 8 and (4-bit codes) 16 columns apart. With IS_RAW the result is the
    codes plus RAW.
    """
    ELEMENT: tl.constexpr = P.ELEMENT  # a copy, because Triton 3.6 treats `P.ELEMENT` as a tensor
    ZEROS: tl.constexpr = P.ZEROS
    SCALED: tl.constexpr = GROUPED or exponent(P, DTYPE) != 0
    if _converts_pairs(DTYPE):
        n = unpack_words(q, factors[0], added[0], ELEMENT, SCALED, ZEROS, IS_RAW)
    else:
        n = ()
        for i in tl.static_range(4 * P.CODES):
            number = _number(_code(q, i, ELEMENT), factors[i // (2 * P.CODES)],
                             RAW if IS_RAW else added[i // (2 * P.CODES)], P)  # fmt: skip
            n = n + (number.to(DTYPE),)
    first = tl.join(tl.join(n[0], n[1]), tl.join(n[2], n[3]))
    if P.CODES == 2:
        first = tl.join(first, tl.join(tl.join(n[4], n[5]), tl.join(n[6], n[7])))
    return first


@triton.constexpr_function
def _place(i: int, bit: int, ELEMENT: str) -> int:
    """Return the position of bit `bit` of code i in its word."""
    return (layout.BITS[ELEMENT][i // 2][bit] + i % 2 * 16) % 32


@triton.jit
def _code(q, i: tl.constexpr, ELEMENT: tl.constexpr):
    """Extract code i of each word as int32."""
    if ELEMENT == "uint4":
        code = (q >> _place(i, 0, ELEMENT)) & 0xF
    elif ELEMENT == "e2m1":
        code = q & 0
        for bit in tl.static_range(4):
            code |= ((q >> _place(i, bit, ELEMENT)) & 1) << bit
    else:
        code = (q >> (i // 2 * 8 + i % 2 * 16)) & 0xFF
    return code


@triton.jit
def _number(code, scale, added, P: tl.constexpr):
    """Convert codes (one per entry) to scaled fp32 numbers."""
    if P.ELEMENT == "e2m1":
        bits = ((code & 0x8) << 28) | ((code & 0x7) << 22)
        number = bits.to(tl.float32, bitcast=True) * 2.0**126
    elif P.ELEMENT == "e4m3":
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        number = bits.to(tl.float32, bitcast=True) * 2.0**120
    elif P.ELEMENT == "int8":
        number = code.to(tl.int8).to(tl.float32)
    else:
        number = code.to(tl.float32) + added
    return number * scale


@triton.constexpr_function
def _offset(P: Any, DTYPE: Any) -> float:
    """Return the addend of unpacked codes. If codes are unpacked in pairs, uint4 becomes code + 128
    and uint8 becomes code - 128. Codes without zero points have the zero point 8.
    """
    if P.ELEMENT not in ("uint4", "uint8"):
        return 0.0
    zero = 0.0 if P.ZEROS else 8.0
    shift = {"uint4": -128.0, "uint8": 128.0}[P.ELEMENT] if _converts_pairs(DTYPE) else 0.0
    return shift - zero
