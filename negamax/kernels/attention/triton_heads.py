"""Load, rotate and store heads, for kernels that normalize heads and write caches.

    a head    | HALF | HALF | rest |    rope pairs the two halves; `rest` is not rotated

`heads` is a tuple of tiles [heads, columns] fp32: two halves, then `rest` if it is not empty.
"""

import triton
import triton.language as tl

from negamax.kernels.launch.triton import e4m3_max


def block_of_rest(dim: int, half: int) -> int:
    """Return the padded number of columns of a head that are not rotated; 0 if all are rotated."""
    return int(triton.next_power_of_2(dim - 2 * half)) if dim > 2 * half else 0


@triton.jit
def finite(x, dtype: tl.constexpr):
    """Convert x to fp32, NaN to 0 and infinities to the largest number of `dtype`."""
    largest: tl.constexpr = 65504.0 if dtype == tl.float16 else 3.3895313892515355e38
    x = x.to(tl.float32)
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, -largest), largest)


@triton.jit
def to_cache_dtype(x, dtype: tl.constexpr):
    """Convert x to the dtype of a cache; large values saturate in FP8."""
    if dtype == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x, -e4m3_max(dtype)), e4m3_max(dtype))
    return x.to(dtype)


@triton.jit
def split_columns(
    is_head, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Return the column indices within each tile of `heads`, and the masks [heads, columns]."""
    i = tl.arange(0, BLOCK_HALF)[None, :]
    mask = is_head[:, None] & (i < HALF)
    columns, masks = (i, i), (mask, mask)
    if BLOCK_REST > 0:
        j = tl.arange(0, BLOCK_REST)[None, :]
        columns += (j,)
        masks += (is_head[:, None] & (j < DIM - 2 * HALF),)
    return columns, masks


@triton.jit
def load_heads(x, offsets, masks, HALF: tl.constexpr):
    """Load heads as tiles, tile number i at x + offsets[i] + i * HALF, without conversion."""
    heads = ()
    for part in tl.static_range(len(offsets)):
        heads += (tl.load(x + offsets[part] + part * HALF, mask=masks[part], other=0.0),)
    return heads


@triton.jit
def load_angles(cos, sin, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Load a token's cosines and sines [1, BLOCK_HALF]; cos and sin contain each angle twice."""
    i = tl.arange(0, BLOCK_HALF)
    c = tl.load(cos + i, mask=i < HALF, other=0.0)[None, :]
    return c, tl.load(sin + HALF + i, mask=i < HALF, other=0.0)[None, :]


@triton.jit
def rotate(heads, angles):
    low, high = heads[0], heads[1]
    c, s = angles
    rotated = (low * c - high * s, high * c + low * s)
    if len(heads) == 3:
        rotated += (heads[2],)
    return rotated


@triton.jit
def store_heads(heads, columns, masks, rows, mine, scale, HALF: tl.constexpr):
    """Store `heads`, multiplied by `scale`, at pointers `rows`; skip heads with `mine` false."""
    dtype: tl.constexpr = rows.dtype.element_ty
    for part in tl.static_range(len(heads)):
        x = to_cache_dtype(heads[part] * scale, dtype)
        tl.store(rows[:, None] + part * HALF + columns[part], x, mask=masks[part] & mine[:, None])
