"""Activations to FP8 in Triton, for where the kernel before could not do it on the way. Moves 3
bytes per element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.activations import GROUP, QuantizedActivations
from negamax.kernels.op import AnyKernel, Kernel
from negamax.kernels.platform import Feature
from negamax.kernels.quantize.native import native_e4m3
from negamax.kernels.quantize.spec import E4M3_MAX
from negamax.kernels.signatures import QUANTIZE

_GROUP: tl.constexpr = tl.constexpr(GROUP)
_E4M3_MAX: tl.constexpr = tl.constexpr(E4M3_MAX)
_E4M3FNUZ_MAX: tl.constexpr = tl.constexpr(240.0)
_TINY: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).tiny)

_GROUPS = 16  # groups of 128 columns per program: half a kilobyte of loads per warp


@triton.jit
def e4m3_max(DTYPE: tl.constexpr):
    """The largest finite value of DTYPE, one of the two forms of e4m3."""
    return _E4M3FNUZ_MAX if tl.float8e4b8 == DTYPE else _E4M3_MAX


@triton.jit(do_not_specialize=["num_groups"])
def _rows(x, values, scales, num_groups, GROUPS: tl.constexpr):
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    at = group.to(tl.int64)[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = (group < num_groups)[:, None]
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(wide), axis=1)
    dtype: tl.constexpr = values.dtype.element_ty
    scale = tl.where(largest == 0.0, 1.0, tl.maximum(largest / e4m3_max(dtype), _TINY))
    tl.store(values + at, (wide / scale[:, None]).to(dtype), mask=inside)
    tl.store(scales + group, scale, mask=group < num_groups)


def rows(x: Tensor) -> QuantizedActivations:
    """x [T, K] bf16 or fp16, K a multiple of 128 -> x, its e4m3 values and one fp32 scale per 128
    columns.
    """
    num_tokens, width = x.shape
    assert width % GROUP == 0, f"FP8 activations need a multiple of {GROUP} columns, not {width}"
    assert x.is_contiguous()
    values = torch.empty(x.shape, dtype=native_e4m3(x.device), device=x.device)
    scales = torch.empty((num_tokens, width // GROUP), dtype=torch.float32, device=x.device)
    if num_tokens > 0:
        _rows[(triton.cdiv(scales.numel(), _GROUPS),)](
            x, values, scales, scales.numel(), GROUPS=_GROUPS, num_warps=4
        )
    return QuantizedActivations(x, values, scales)


KERNELS: tuple[AnyKernel, ...] = (
    Kernel(
        QUANTIZE,
        "triton",
        rows,
        requires=frozenset({Feature.TRITON, Feature.FP8}),
        dtypes=(torch.bfloat16, torch.float16),
    ),
)
