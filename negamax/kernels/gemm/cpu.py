"""Products on the CPU whose rows do not depend on how many there are, to the bit.

oneDNN's linear with a weight that was put into its blocked layout at load. Measured on two Zen 4
cores, one row, [256 -> 1536], weights not in cache: bf16 25 us, F.linear 46 us; fp32 90 us,
F.linear 184 us. For fp32 the layout must not be the one chosen for a single row; with AMX rows are
alike only after `env.set_batch_invariant_gemms`. PyTorch carries oneDNN; the two ops used are those
its own compiler emits for CPU linears.

oneDNN compiles a kernel for every count of rows and every weight shape: 0.6 ms and 0.56 MiB of heap
each. It keeps the last 1024 of them, and the heap between them, which steps of other sizes leave
behind, cannot be given back: with rows as they came a small model's process took 1.5 GiB after a
minute of mixed requests and went on growing. So rows are cut into tiles of at most 256, and a tile
is padded to one of 80 sizes; with that the same minute ends at 0.7 GiB (docs/serving.md). Mixed
requests, each step run both ways: 1.015 times the speed, because fewer kernels are compiled.

Without oneDNN, fp32 F.linear. A BLAS takes other paths for a few rows: with MKL on Zen 4, over 1, 2
and 4 threads, 1 to 3, 5 to 7 and 9 to 11 rows gave last bits that all other counts up to 300 did
not. Such batches are padded to the next multiple of 4 (measured at one row: 1.35 times the time of
the plain call); 16-bit products of F.linear were alike for all counts.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.formats.floats import plain
from negamax.formats.tensor_format import StoredWeight
from negamax.kernels.activations import Hidden, unquantized
from negamax.kernels.gemm.op import LINEAR, into, keep
from negamax.kernels.op import AnyKernel, Kernel
from negamax.kernels.rowwise import SAFE_ROWS_MULTIPLE

_ROWS_HINT = 4  # the layout is chosen for so many rows; any number of rows can read it
_NO_SCALARS: list[float] = []
TILE_ROWS = 256
_STEPS = 16  # sizes per power of two: padding is less than a sixteenth of the rows
_UNPADDED_ROWS = 2 * _STEPS
_SAFE_ROWS = 12  # of F.linear in fp32: from here on every count was alike


def pack(weight: StoredWeight) -> Tensor:
    """weight [out, in], plain -> the same values in oneDNN's layout (an opaque tensor)."""
    values = weight.values.contiguous()
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(values, _ROWS_HINT)
    return packed


def linear(
    x: Hidden,
    weight: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    in_parts: bool = False,
) -> Tensor:
    """x [T, in], weight from `pack` -> [T, out] in `out_dtype` (None: that of x), in `out` where
    given.
    """
    x = unquantized(x)
    if x.shape[0] <= _UNPADDED_ROWS:
        product: Tensor = _linear_pointwise(x, weight, None, "none", _NO_SCALARS, "")
    else:
        tiles = [_padded_product(tile, weight) for tile in x.split(TILE_ROWS)]
        product = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
    return into(out, product if out_dtype is None else product.to(out_dtype))


def padded_rows(num_rows: int) -> int:
    """The rows that are computed for a tile of `num_rows`."""
    step = 1
    while num_rows > _UNPADDED_ROWS * step:
        step *= 2
    return -(-num_rows // step) * step


def _padded_product(x: Tensor, weight: Tensor) -> Tensor:
    num_rows = x.shape[0]
    extra = padded_rows(num_rows) - num_rows
    if extra:
        x = F.pad(x, (0, 0, 0, extra))
    out: Tensor = _linear_pointwise(x, weight, None, "none", _NO_SCALARS, "")
    return out[:num_rows] if extra else out


def _runs(dtype: torch.dtype) -> bool:
    """Whether this build and this machine run both ops in `dtype`, found out by running them
    once.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        y = linear(torch.ones(3, 16, dtype=dtype), pack(plain(torch.ones(16, 16, dtype=dtype))))
    except (RuntimeError, AttributeError, NameError):
        return False
    return bool((y == 16).all())


def blas_linear(
    x: Hidden,
    weight: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    in_parts: bool = False,
) -> Tensor:
    """x [T, in] fp32, weight [out, in] fp32 -> [T, out] in `out_dtype` (None: fp32)."""
    x = unquantized(x)
    num_rows = x.shape[0]
    if num_rows < _SAFE_ROWS and num_rows % SAFE_ROWS_MULTIPLE != 0:
        x = F.pad(x, (0, 0, 0, -num_rows % SAFE_ROWS_MULTIPLE))
    return into(out, F.linear(x, weight)[:num_rows].to(out_dtype or x.dtype))


ONEDNN: tuple[AnyKernel, ...] = tuple(
    Kernel(LINEAR, "onednn", linear, pack, dtypes=(dtype,), available=partial(_runs, dtype))
    for dtype in (torch.bfloat16, torch.float32)
)
KERNELS = (*ONEDNN, Kernel(LINEAR, "padded", blas_linear, keep, dtypes=(torch.float32,)))

with suppress(AttributeError):  # a PyTorch without oneDNN: _runs says so
    _linear_pointwise = torch.ops.mkldnn._linear_pointwise.default
