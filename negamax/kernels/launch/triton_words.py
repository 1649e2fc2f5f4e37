"""Functions for rows of 16-bit values that are handled as int32 words of two values. Kernels also
exchange rows between ranks as words.

    a row in memory         | even odd | even odd | ...
    in registers            even [BLOCK] and odd [BLOCK], fp32
"""

import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.launch.ptx import pack_pair


def num_parts(x: Tensor) -> int:
    """Return P of x [T, P, width]; 1 for x [T, width]."""
    return x.shape[1] if x.dim() == 3 else 1


@triton.jit
def make_word_indices(BLOCK: tl.constexpr):
    """Return 0 to BLOCK - 1, in a layout in which a thread has two adjacent indices, and a warp has
    the 64 words that share a scale. All loads and stores by these indices have the same layout and
    need no shared memory.
    """
    return tl.max_contiguous(tl.arange(0, BLOCK), 2)


@triton.jit
def as_words(pointer):
    """Cast a pointer to 2-byte values to a pointer to words of two values."""
    return pointer.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def unpack(words, DTYPE: tl.constexpr):
    """Return the values of each word as fp32: even columns (lower halves), then odd columns."""
    if tl.bfloat16 == DTYPE:
        even = (words << 16).to(tl.float32, bitcast=True)
        odd = (words & -65536).to(tl.float32, bitcast=True)
    else:
        even = words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        odd = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return even, odd


@triton.jit
def sum_parts(x, row, index, mask, PARTS: tl.constexpr, WORDS: tl.constexpr, DTYPE: tl.constexpr):
    """Sum row `row` of x [T, PARTS, 2 * WORDS] over its parts in fp32, round once; return words."""
    parts = as_words(x) + row.to(tl.int64) * (PARTS * WORDS) + index
    words = tl.load(parts, mask=mask, other=0)
    if PARTS > 1:
        even, odd = unpack(words, DTYPE)
        for part in tl.static_range(1, PARTS):
            more_even, more_odd = unpack(tl.load(parts + part * WORDS, mask=mask, other=0), DTYPE)
            even += more_even
            odd += more_odd
        words = pack_pair(even, odd, DTYPE)
    return words


@triton.jit
def fetch_parts(x, row, index, mask, PARTS: tl.constexpr, WORDS: tl.constexpr):
    """Load the parts of row `row` of x [T, PARTS, 2 * WORDS] as a tuple of words, for `add_parts`.

    The loads are volatile: ptxas otherwise moves most of them after the first sums and waits for
    memory three times instead of once. The loads stay together only if their results are used
    in a branch whose condition is unknown to ptxas.
    """
    parts = as_words(x) + row.to(tl.int64) * (PARTS * WORDS) + index
    fetched = ()
    for part in tl.static_range(PARTS):
        fetched += (tl.load(parts + part * WORDS, mask=mask, other=0, volatile=True),)
    return fetched


@triton.jit
def add_parts(fetched, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """Sum the parts from `fetch_parts` in fp32, round once; return even and odd columns."""
    even, odd = unpack(fetched[0], DTYPE)
    if PARTS > 1:
        for part in tl.static_range(1, PARTS):
            more_even, more_odd = unpack(fetched[part], DTYPE)
            even += more_even
            odd += more_odd
        even, odd = unpack(pack_pair(even, odd, DTYPE), DTYPE)
    return even, odd
