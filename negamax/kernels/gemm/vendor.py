"""oneDNN's linear with a weight that was put into its blocked layout at load.

Measured on two Zen 4 cores, one row, [256 -> 1536], weights not in cache: bf16 25 us, F.linear 46 us; fp32 90 us, F.linear
184 us. Rows do not depend on how many there are, to the bit, in bf16 and in fp32 (for fp32 the layout must not be the one
chosen for a single row). PyTorch carries oneDNN; the two ops used are those its own compiler emits for CPU linears.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from negamax.kernels.gemm.spec import refuse_scale
from negamax.kernels.op import Kernel

_ROWS_HINT = 4  # the layout is chosen for so many rows; any number of rows can read it
_NO_SCALARS: list[float] = []


def pack(weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """weight [out, in] -> the same values in oneDNN's layout (an opaque tensor)."""
    refuse_scale(scale)
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
    return packed


def linear(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [T, in], weight from `pack` -> [T, out] in `out_dtype` (None: that of x)."""
    out: Tensor = _linear_pointwise(x, weight, None, "none", _NO_SCALARS, "")
    return out if out_dtype is None else out.to(out_dtype)


def _runs(dtype: torch.dtype) -> bool:
    """Whether this build and this machine run both ops in `dtype`, found out by running them once."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        y = linear(torch.ones(3, 16, dtype=dtype), pack(torch.ones(16, 16, dtype=dtype)))
    except (RuntimeError, AttributeError, NameError):
        return False
    return bool((y == 16).all())


def _kernel(dtype: torch.dtype) -> Kernel:
    return Kernel("gemm.linear", "onednn", linear, pack, platforms=("cpu",), dtypes=(dtype,), available=lambda: _runs(dtype))


KERNELS = (_kernel(torch.bfloat16), _kernel(torch.float32))

with suppress(AttributeError):  # a PyTorch without oneDNN: _runs says so
    _linear_pointwise = torch.ops.mkldnn._linear_pointwise.default
