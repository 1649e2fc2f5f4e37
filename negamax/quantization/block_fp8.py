"""The native format of the M2 family: e4m3 weights, one fp32 multiplier per 128 x 128 block, stored beside the weight.

The scale of `x.weight` [N, K] is `x.weight_scale_inv` [ceil(N / 128), ceil(K / 128)]; in spite of its name it multiplies. On
the CPU a weight is applied by turning it into a plain one at load. A device that keeps it quantised can hold only slices that
start on a block and end on one: `BLOCK` is the shard unit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.kernels.quantize import spec as ops

BLOCK = ops.BLOCK
SCALE_SUFFIX = "_scale_inv"


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """The shape of the scale of a `rows` x `columns` weight."""
    return ops.scale_shape(rows, columns, block=BLOCK)


def dequantize(
    weight: Tensor,  # [N, K] float8_e4m3fn
    scale: Tensor,  # [ceil(N / 128), ceil(K / 128)] fp32
) -> Tensor:  # [N, K] fp32
    """The plain weight. Errors: `CheckpointError` for scales that are not finite."""
    if not bool(torch.isfinite(scale).all()):
        raise CheckpointError("a block scale is infinite or not a number", hint="download the checkpoint again")
    return ops.dequantize_block(weight, scale, block=BLOCK, dtype=torch.float32)
