"""What the ways through the experts share: the prepared weights and the product of two tiles."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.activations import GROUP, QuantizedActivations, unquantized
from negamax.kernels.moe import tiles

INTERPRETED = bool(triton.knobs.runtime.interpret)
BLOCK = tl.constexpr(GROUP)  # columns that share a scale
SMALLEST = tl.constexpr(1e-30)  # a scale's lower bound


@triton.jit
def dot(a, b, acc, WIDE: tl.constexpr):
    """acc + a b; WIDE multiplies in fp32 on the CUDA cores, for what the tensor cores (or the
    interpreter) cannot do.
    """
    if WIDE:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@dataclass(frozen=True)
class PreparedExperts:
    """The stacked weights, in FP8 with scales per 128 x 128 or in the model's dtype."""

    gate_up: Tensor  # [experts, 2 * width, hidden], gate rows first
    down: Tensor  # [experts, hidden, width]
    # [experts, 2 * width / 128, hidden / 128] fp32; without FP8 anything, it is not read
    gate_up_scale: Tensor
    down_scale: Tensor  # [experts, hidden / 128, width / 128] fp32; likewise
    fp8: bool


def operands(x: Tensor | QuantizedActivations, prepared: PreparedExperts) -> tuple[Tensor, Tensor]:
    """What the tile kernels multiply: values and scales, or the plain activations (twice; the
    second is not read).
    """
    if not prepared.fp8:
        values = scales = unquantized(x)
    else:
        assert isinstance(x, QuantizedActivations), "experts in FP8 need activations that carry FP8"
        values, scales = x.q, x.scale
    assert values.is_contiguous() and scales.is_contiguous()
    return values, scales


def even(prepared: PreparedExperts, tile: tiles.Tile, columns: int) -> tuple[bool, bool]:
    """Whether tiles cover the weights without a rest: gate and up, down (`columns` at a time)."""
    hidden, width = prepared.down.shape[1:]
    gate_up = hidden % tile.gate_up_columns == 0 and width % tile.gate_up_rows == 0
    return gate_up, width % columns == 0 and hidden % tile.down_rows == 0
