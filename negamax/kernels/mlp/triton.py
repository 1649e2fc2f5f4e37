"""`SwiGlu` between the GEMMs of an MLP, in Triton: grid (T * ceil(width / BLOCK),).

    gate_up [T, 2 * WIDTH]  gate | up
    out [T, WIDTH]          with `quantize` also in FP8 with a scale per 128 columns

The kernel reads 4 bytes and writes 2 bytes per value; FP8 adds 1 byte and the scales.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.activations import GROUP, QuantizedActivations, SwiGlu
from negamax.kernels.launch.triton import (
    e4m3_max,
    launch_dependents_then_wait,
    launch_options,
    triton_kernel,
)
from negamax.kernels.mlp.op import SWIGLU
from negamax.kernels.quantize.native import outputs, result

_GROUP = tl.constexpr(GROUP)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_BLOCK = 1024  # number of columns per program; no other values were measured


@triton.jit
def swiglu(gate, up, A: tl.constexpr):
    """Apply the activation A (`SwiGlu`) to fp32 values; NaN stays NaN."""
    if A.limit is not None:
        gate = tl.where(gate > A.limit, A.limit, gate)
        up = tl.where(up > A.limit, A.limit, tl.where(up < -A.limit, -A.limit, up))
    if A.beta != 0.0:
        up += A.beta
    if A.alpha == 1.0:
        return gate / (1.0 + tl.exp(-gate)) * up
    else:
        return gate / (1.0 + tl.exp(-A.alpha * gate)) * up


@triton.jit
def _swiglu_kernel(
    gate_up_ptr,  # [T, 2 * WIDTH]
    out_ptr,  # [T, WIDTH]
    q_ptr,  # [T, WIDTH] e4m3, written if QUANTIZE, else None
    scale_ptr,  # [T, WIDTH / 128] fp32, written if QUANTIZE, else None
    A: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, QUANTIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK columns of one row, in groups of 128 columns."""
    TILES: tl.constexpr = triton.cdiv(WIDTH, BLOCK)
    row, tile = (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(0) % TILES
    group = tile * (BLOCK // _GROUP) + tl.arange(0, BLOCK // _GROUP)
    column = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = column < WIDTH
    launch_dependents_then_wait(PDL)
    gate_ptrs = gate_up_ptr + row * (2 * WIDTH) + column
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + WIDTH, mask=inside, other=0.0).to(tl.float32)
    y = swiglu(gate, up, A).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + column, y, mask=inside)
    if QUANTIZE:
        dtype: tl.constexpr = q_ptr.dtype.element_ty
        y = tl.where(inside, y.to(tl.float32), 0.0)
        amax = tl.max(tl.abs(y), axis=1)
        scale = tl.where(amax == 0.0, 1.0, tl.maximum(amax / e4m3_max(dtype), _TINY))
        tl.store(q_ptr + row * WIDTH + column, (y / scale[:, None]).to(dtype), mask=inside)
        groups: tl.constexpr = WIDTH // _GROUP
        tl.store(scale_ptr + row * groups + group, scale, mask=group < groups)


def run(
    gate_up: Tensor, *, activation: SwiGlu, quantize: bool = False
) -> Tensor | QuantizedActivations:
    """Map gate_up [T, 2 * width] to [T, width]; FP8 output (`quantize`) needs width % 128 == 0."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    assert not quantize or width % GROUP == 0, (
        f"FP8 needs a multiple of {GROUP} columns, not {width}"
    )
    out = gate_up.new_empty(num_tokens, width)
    written = outputs(out, quantize=quantize)
    if num_tokens:
        block = min(_BLOCK, max(GROUP, triton.next_power_of_2(width)))
        _swiglu_kernel[(num_tokens * triton.cdiv(width, block),)](
            gate_up, *written,
            A=activation, WIDTH=width, BLOCK=block, QUANTIZE=quantize, num_warps=4,
            **launch_options(gate_up.device),
        )  # fmt: skip
    return result(*written)


KERNELS = (triton_kernel(SWIGLU, run),)
