"""Compute exp, sin and cos of rows; the bits of a row do not depend on the number of rows.

PyTorch's CPU loops process 32 floats per step. Scalar code processes the remaining floats of a
thread, and its results may differ in the last bits. Rows are therefore padded until every step is
full, and each call processes fewer values than PyTorch would split over several threads.
"""

from collections.abc import Callable
from math import gcd

import torch
from torch import Tensor

SAFE_ROWS_MULTIPLE = 4  # fp32 GEMMs pad the number of rows to a multiple of 4 (`gemm/cpu.py`)
_STEP = 32  # number of floats per iteration of PyTorch's CPU loops
_SERIAL_LIMIT = 32_768  # PyTorch uses several threads from this number of elements on


def padded_rows(num_rows: int, *, width: int, multiple: int = 1) -> int:
    """Round `num_rows` up to a multiple of `multiple` such that rows fill whole vector steps."""
    unit = max(multiple, _STEP // gcd(width, _STEP))
    return -(-num_rows // unit) * unit


def apply(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Apply `function` to contiguous values [rows, ..., width]; `padded_rows` computes `rows`."""
    if values.numel() < _SERIAL_LIMIT:
        return function(values)
    rows_per_block = max(1, (_SERIAL_LIMIT - 1) // (values.shape[-1] * _STEP)) * _STEP
    return torch.cat([function(block) for block in torch.split(values, rows_per_block)])
