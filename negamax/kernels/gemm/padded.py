"""fp32 F.linear whose rows do not depend on how many there are.

A BLAS takes other paths for a few rows: with MKL on Zen 4, over 1, 2 and 4 threads, 1 to 3, 5 to 7
and 9 to 11 rows gave last bits that all other counts up to 300 did not. Such batches are padded to
the next multiple of 4 (measured at one row: 1.35 times the time of the plain call). This is for
machines without the oneDNN kernel, which needs no padding and is faster; 16-bit products of
F.linear were alike for all counts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.kernels.activations import QuantizedActivations, unquantized
from negamax.kernels.gemm.spec import into, keep
from negamax.kernels.op import Kernel
from negamax.kernels.rowwise import SAFE_ROWS_MULTIPLE
from negamax.kernels.signatures import LINEAR

_SAFE_ROWS = 12  # from here on every count was alike


def linear(
    x: Tensor | QuantizedActivations,
    weight: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [T, in] fp32, weight [out, in] fp32 -> [T, out] in `out_dtype` (None: fp32)."""
    x = unquantized(x)
    num_rows = x.shape[0]
    if num_rows < _SAFE_ROWS and num_rows % SAFE_ROWS_MULTIPLE != 0:
        x = F.pad(x, (0, 0, 0, -num_rows % SAFE_ROWS_MULTIPLE))
    return into(out, F.linear(x, weight)[:num_rows].to(out_dtype or x.dtype))


KERNELS = (Kernel(LINEAR, "padded", linear, keep, dtypes=(torch.float32,)),)
