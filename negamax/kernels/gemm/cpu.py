"""Linear layers on the CPU. The bits of a row do not depend on the number of rows.

oneDNN reads weights in its own blocked layout, to which `pack` converts a weight at load. For one
row and an uncached weight [1536, 256], a layer takes 25 us in bf16 and 90 us in fp32 on two Zen 4
cores; F.linear takes 46 us and 184 us. oneDNN's layout for single rows is not used. With AMX the
bits are equal for all row counts only after `env.set_batch_invariant_gemms`. PyTorch's compiler
emits the same two oneDNN ops for linear layers on CPUs.

oneDNN compiles a kernel for every row count and weight shape, which takes 0.6 ms and 0.56 MiB of
heap. oneDNN keeps the last 1024 kernels, and heap fragmentation prevents the release of older
kernels. Rows are therefore split into tiles of at most 256 rows, and tiles are padded to one of 80
sizes. After a minute of mixed requests, the process of a small model takes 0.7 GiB with tiles, and
1.5 GiB without tiles. Tiles make the process 1.015 times as fast.

Without oneDNN, F.linear multiplies fp32 matrices. A BLAS library uses different code for few rows.
With MKL on Zen 4, the last bits for 1 to 3, 5 to 7 and 9 to 11 rows differ from the bits for all
other counts up to 300. Batches of up to 11 rows are therefore padded to a multiple of 4, so one row
takes 1.35 times as long. In 16 bits, F.linear returns the same bits for all row counts.
"""

from contextlib import suppress
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.formats.floats import plain
from negamax.formats.tensor_format import StoredWeight
from negamax.kernels.activations import Hidden, unquantized
from negamax.kernels.gemm.op import LIKE_INPUT, LINEAR, LinearOutput, copy_into, keep
from negamax.kernels.op import AnyKernel, Kernel
from negamax.kernels.rowwise import SAFE_ROWS_MULTIPLE

_ROWS_HINT = 4  # oneDNN optimizes the layout of a weight for inputs with this number of rows
_NO_SCALARS: list[float] = []
TILE_ROWS = 256
_STEPS = 16  # row counts are padded to 16 sizes per power of two, so under 1/16 of rows are padding
_UNPADDED_ROWS = 2 * _STEPS
_SAFE_ROWS = 12  # with 12 or more rows, the row count did not affect the bits of F.linear in fp32


def pack(weight: StoredWeight) -> Tensor:
    """Put a plain weight [out, in] into oneDNN's layout (an opaque tensor)."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.values.contiguous(), _ROWS_HINT)
    return packed


def linear(x: Hidden, weight: Tensor, output: LinearOutput = LIKE_INPUT) -> Tensor:
    """Multiply x [T, in] with a weight from `pack` to [T, out], as `LINEAR` defines."""
    x = unquantized(x)
    if x.shape[0] <= _UNPADDED_ROWS:
        product: Tensor = _linear_pointwise(x, weight, None, "none", _NO_SCALARS, "")
    else:
        tiles = [_padded_product(tile, weight) for tile in x.split(TILE_ROWS)]
        product = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
    return copy_into(output.out, product if output.dtype is None else product.to(output.dtype))


def padded_rows(num_rows: int) -> int:
    """Return the number of rows, with padding, that are computed for a tile of `num_rows`."""
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
    """Run oneDNN's pack and linear ops in `dtype` once; return whether both ops are supported."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        y = linear(torch.ones(3, 16, dtype=dtype), pack(plain(torch.ones(16, 16, dtype=dtype))))
    except (RuntimeError, AttributeError, NameError):
        return False
    return bool((y == 16).all())


def blas_linear(x: Hidden, weight: Tensor, output: LinearOutput = LIKE_INPUT) -> Tensor:
    """Multiply x [T, in] fp32 with weight [out, in] fp32, as `LINEAR` defines."""
    x = unquantized(x)
    num_rows = x.shape[0]
    if num_rows < _SAFE_ROWS and num_rows % SAFE_ROWS_MULTIPLE != 0:
        x = F.pad(x, (0, 0, 0, -num_rows % SAFE_ROWS_MULTIPLE))
    return copy_into(output.out, F.linear(x, weight)[:num_rows].to(output.dtype or x.dtype))


ONEDNN: tuple[AnyKernel, ...] = tuple(
    Kernel(LINEAR, "onednn", linear, pack, dtypes=(dtype,), available=partial(_runs, dtype))
    for dtype in (torch.bfloat16, torch.float32)
)
KERNELS = (*ONEDNN, Kernel(LINEAR, "padded", blas_linear, keep, dtypes=(torch.float32,)))

with suppress(AttributeError):  # without oneDNN, this op is missing and `_runs` returns False
    _linear_pointwise = torch.ops.mkldnn._linear_pointwise.default
