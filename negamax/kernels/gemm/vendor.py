"""oneDNN's linear with a weight that was put into its blocked layout at load.

Measured on two Zen 4 cores, one row, [256 -> 1536], weights not in cache: bf16 25 us, F.linear 46
us; fp32 90 us, F.linear 184 us. Rows do not depend on how many there are, to the bit, in bf16 and
in fp32 (for fp32 the layout must not be the one chosen for a single row); with AMX only as
`env.settle_cpu_products` has it. PyTorch carries oneDNN; the two ops used are those its own
compiler emits for CPU linears.

oneDNN compiles a kernel for every count of rows and every weight shape: 0.6 ms and 0.56 MiB of heap
each. It keeps the last 1024 of them, and the heap between them, which steps of other sizes leave
behind, cannot be given back: with rows as they came a small model's process took 1.5 GiB after a
minute of mixed requests and went on growing. So rows are cut into tiles of at most 256, and a tile
is padded to one of 80 sizes; with that the same minute ends at 0.7 GiB (docs/serving.md). Mixed
requests, each step run both ways: 1.015 times the speed, because fewer kernels are compiled.
"""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.kernels.activations import QuantizedActivations, unquantized
from negamax.kernels.formats import StoredWeight, plain
from negamax.kernels.gemm.spec import into
from negamax.kernels.op import Kernel
from negamax.kernels.signatures import LINEAR, Linear, PrepareLinear

_ROWS_HINT = 4  # the layout is chosen for so many rows; any number of rows can read it
_NO_SCALARS: list[float] = []
TILE_ROWS = 256
_STEPS = 16  # sizes per power of two: padding is less than a sixteenth of the rows
_UNPADDED_ROWS = 2 * _STEPS


def pack(weight: StoredWeight) -> Tensor:
    """weight [out, in], plain -> the same values in oneDNN's layout (an opaque tensor)."""
    values = weight.values.contiguous()
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(values, _ROWS_HINT)
    return packed


def linear(
    x: Tensor | QuantizedActivations,
    weight: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
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


def _kernel(dtype: torch.dtype) -> Kernel[PrepareLinear, Linear]:
    return Kernel(
        LINEAR,
        "onednn",
        linear,
        pack,
        dtypes=(dtype,),
        available=lambda: _runs(dtype),
    )


KERNELS = (_kernel(torch.bfloat16), _kernel(torch.float32))

with suppress(AttributeError):  # a PyTorch without oneDNN: _runs says so
    _linear_pointwise = torch.ops.mkldnn._linear_pointwise.default
