"""Compute exp, sin and cos of rows; the bits of a row do not depend on the number of rows.

PyTorch's CPU loops process 32 floats per step. Scalar code with other last bits processes the
remaining floats of a thread. Rows are therefore padded until steps are full, and a call stays below
the size from which PyTorch uses several threads.
"""

from collections.abc import Callable
from math import gcd

import torch
from torch import Tensor

SAFE_ROWS_MULTIPLE = 4  # fp32 GEMMs pad row counts to multiples of it (`gemm/cpu.py`)
_STEP = 32  # floats per step of a vector loop
_SERIAL_LIMIT = 32_768  # number of elements from which PyTorch uses several threads


def padded_rows(num_rows: int, *, width: int, multiple: int = 1) -> int:
    """Return the least multiple of `multiple` >= `num_rows` with which rows fill vector steps."""
    unit = max(multiple, _STEP // gcd(width, _STEP))
    return -(-num_rows // unit) * unit


def apply(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Apply `function` to contiguous values [rows, ..., width], rows from `padded_rows`."""
    if values.numel() < _SERIAL_LIMIT:
        return function(values)
    rows_per_block = max(1, (_SERIAL_LIMIT - 1) // (values.shape[-1] * _STEP)) * _STEP
    return torch.cat([function(block) for block in torch.split(values, rows_per_block)])
