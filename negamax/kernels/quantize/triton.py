"""Quantize activations without an FP8 copy, reading 2 bytes and writing 1 byte per value."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.formats.platform import Feature
from negamax.kernels.activations import GROUP, QuantizedActivations
from negamax.kernels.launch.triton import e4m3_max, triton_kernel
from negamax.kernels.quantize.native import empty_e4m3
from negamax.kernels.quantize.op import QUANTIZE

_GROUP: tl.constexpr = tl.constexpr(GROUP)
_TINY: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).tiny)

_GROUPS = 16  # number of groups of 128 columns per program; each warp loads 1 KiB of bf16


@triton.jit(do_not_specialize=["num_groups"])
def _quantize_kernel(x_ptr, q_ptr, scale_ptr, num_groups, GROUPS: tl.constexpr):
    """Quantize GROUPS groups of 128 columns of x [T, K], with a scale per group.

    x_ptr, q_ptr  [num_groups, 128]  |<- 128 ->|   GROUPS rows per program
    scale_ptr     [num_groups]
    """
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    offs = group.to(tl.int64)[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = (group < num_groups)[:, None]
    x = tl.load(x_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(x), axis=1)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    scale = tl.where(amax == 0.0, 1.0, tl.maximum(amax / e4m3_max(dtype), _TINY))
    tl.store(q_ptr + offs, (x / scale[:, None]).to(dtype), mask=inside)
    tl.store(scale_ptr + group, scale, mask=group < num_groups)


def quantize(x: Tensor) -> QuantizedActivations:
    """Quantize x [T, K], K % 128 == 0, to e4m3 with an fp32 scale per token and 128 columns."""
    width = x.shape[1]
    assert width % GROUP == 0, f"FP8 activations need a multiple of {GROUP} columns, not {width}"
    assert x.is_contiguous()
    q, scale = empty_e4m3(x)
    if len(x) > 0:
        _quantize_kernel[(triton.cdiv(scale.numel(), _GROUPS),)](
            x, q, scale, scale.numel(), GROUPS=_GROUPS, num_warps=4
        )
    return QuantizedActivations(x, q, scale)


KERNELS = (triton_kernel(QUANTIZE, quantize, requires={Feature.FP8}),)
