"""Round activations to int8 or E4M3 for 8-bit GEMMs, with a scale per token, and with columns in
the order of packed weights (`layout.py`).

    scale[t] = max |x[t]| / 127 or 448        q[t] = x[t] / scale[t], rounded to the nearest

A row that holds NaN or infinity gets an infinite scale, so no product with this row is finite.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.formats.floats import E4M3_MAX
from negamax.kernels.launch.triton import launch_options, wait_then_launch_dependents
from negamax.kernels.weight_only import layout
from negamax.kernels.weight_only.layout import Packing

_SPAN = tl.constexpr(layout.SPAN_BYTES)
_E4M3_MAX = tl.constexpr(E4M3_MAX)
_INT8_MAX = tl.constexpr(127.0)
_MIN_SCALE = tl.constexpr(1e-30)
# the sum of a number and this constant has the rounded integer in its lower bits
_TO_INTEGER = tl.constexpr(1.5 * 2.0**23)
_AXIS_2, _AXIS_3, _AXIS_4, _AXIS_5, _AXIS_6 = (tl.constexpr(2 + axis) for axis in layout.AXES)
_DTYPES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}


def rounded_dtype(packing: Packing) -> torch.dtype:
    """Return the dtype of both the codes and the rounded activations."""
    return _DTYPES[packing.ELEMENT]


@triton.jit
def scale_of_rows(y, DTYPE: tl.constexpr):
    """Return the scales [ROWS] with which each row of y [ROWS, COLUMNS] fp32 fits into DTYPE."""
    largest = tl.max(tl.where(y == y, tl.abs(y), float("inf")), axis=1)
    return tl.maximum(largest / (_INT8_MAX if tl.int8 == DTYPE else _E4M3_MAX), _MIN_SCALE)


@triton.jit
def round_rows(y, scale, DTYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return y / scale [ROWS, COLUMNS] in DTYPE, the columns in the order of packed weights."""
    y = y * (1.0 / scale)[:, None]
    if tl.int8 == DTYPE:
        q = (y + _TO_INTEGER).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        q = y.to(DTYPE)
    q = tl.reshape(q, (ROWS, COLUMNS // _SPAN, 2, 2, 2, 4, 2))
    q = tl.permute(q, (0, 1, _AXIS_2, _AXIS_3, _AXIS_4, _AXIS_5, _AXIS_6))
    return tl.reshape(q, (ROWS, COLUMNS))


@triton.jit
def add_product(acc, x, w, x_scale):
    """Return acc + x w in exact int32 for int8, or acc + x w * x_scale [BLOCK_M] in fp32 for E4M3.
    Hopper's tensor cores keep 14 bits of a sum of E4M3 products, so this function adds in fp32.
    """
    if x.dtype == tl.int8:
        acc = tl.dot(x, w, acc, out_dtype=tl.int32)
    else:
        acc += tl.dot(x, w) * x_scale[:, None]
    return acc


@triton.jit
def scaled(acc, x_scale):
    """Return the sums of `add_product` times x_scale, in fp32."""
    if acc.dtype == tl.int32:
        return acc.to(tl.float32) * x_scale[:, None]
    else:
        return acc


@triton.jit
def _round_kernel(
    x_ptr,  # [M, K]
    q_ptr,  # [M, K_PACKED] int8 or e4m3
    scale_ptr,  # [M] fp32
    K: tl.constexpr,
    K_PACKED: tl.constexpr,
    BLOCK_K: tl.constexpr,  # a power of two, at least K_PACKED
    PDL: tl.constexpr,
):
    """Round one token; columns from K to K_PACKED are 0. Grid (M,)."""
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    wait_then_launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_K)[None, :]
    x = tl.load(x_ptr + token * K + offs, mask=offs < K, other=0.0).to(tl.float32)
    scale = scale_of_rows(x, dtype)
    q = round_rows(x, scale, dtype, 1, BLOCK_K)
    tl.store(q_ptr + token * K_PACKED + offs, q, mask=offs < K_PACKED)
    tl.store(scale_ptr + token + tl.arange(0, 1), scale)


def round_activations(x: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """Round x [M, K], M > 0 -> values [M, K_PACKED] int8 or e4m3, scales [M] fp32."""
    M, K = x.shape
    assert K == packing.K and x.is_contiguous(), (x.shape, packing)
    q = torch.empty((M, packing.K_PACKED), dtype=rounded_dtype(packing), device=x.device)
    scale = torch.empty(M, dtype=torch.float32, device=x.device)
    _round_kernel[(M,)](
        x, q, scale, K=K, K_PACKED=packing.K_PACKED,
        BLOCK_K=triton.next_power_of_2(packing.K_PACKED), num_warps=8, **launch_options(x.device),
    )  # fmt: skip
    return q, scale
