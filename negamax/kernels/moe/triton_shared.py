"""What the three ways through the experts share: the prepared weights, their constants, the
activation between the two products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.activations import GROUP, SILU, QuantizedActivations, SwiGlu, unquantized
from negamax.kernels.quantize.triton import e4m3_max
from negamax.kernels.weight_only.layout import PackedTensors, Packing, packed_rows

BLOCK = tl.constexpr(GROUP)  # columns that share a scale
_MIN_SCALE = tl.constexpr(1e-30)


@dataclass(frozen=True)
class ExpertConstants:
    """Constants of all kernels of the experts, one argument `E: tl.constexpr`."""

    HIDDEN: int
    WIDTH: int  # of one expert, on this rank
    FP8: bool
    PACKED: bool = False
    GATE_UP: Packing | None = None
    DOWN: Packing | None = None
    ACTIVATION: SwiGlu = SILU
    SHARED: bool = False  # the last expert is the last choice of every token but padding


@dataclass(frozen=True)
class PreparedExperts:
    """The stacked weights, in FP8 with scales per 128 x 128, in the model's dtype, or packed."""

    # [experts, 2 * width, hidden], gate rows first; packed: the tensors of a `PackedWeight`
    gate_up: Tensor | PackedTensors
    down: Tensor | PackedTensors  # [experts, hidden, width]; likewise
    # [experts, 2 * width / 128, hidden / 128] fp32; without FP8 anything, it is not read
    gate_up_scale: Tensor
    down_scale: Tensor  # [experts, hidden / 128, width / 128] fp32; likewise
    constants: ExpertConstants

    def tensors(self, expert: int) -> list[Tensor]:
        """See `ExpertWeights`: views."""
        own = self.constants
        if isinstance(self.gate_up, tuple) and isinstance(self.down, tuple):
            assert own.GATE_UP is not None and own.DOWN is not None
            return [
                *packed_rows(self.gate_up, own.GATE_UP, expert, 2 * own.WIDTH),
                *packed_rows(self.down, own.DOWN, expert, own.HIDDEN),
            ]
        held = [self.gate_up, self.down]
        if own.FP8:
            held += [self.gate_up_scale, self.down_scale]
        return [tensor[expert] for tensor in held if isinstance(tensor, Tensor)]

    def replace(self, expert: int, tensors: Sequence[Tensor]) -> None:
        """See `ExpertWeights`."""
        for own, tensor in zip(self.tensors(expert), tensors, strict=True):
            own.copy_(tensor)


@triton.jit
def group_scale(y, axis: tl.constexpr, DTYPE: tl.constexpr):
    """The scale with which the values of y along `axis` fit into DTYPE."""
    return tl.maximum(tl.max(tl.abs(y), axis) / e4m3_max(DTYPE), _MIN_SCALE)


def operands(x: Tensor | QuantizedActivations, prepared: PreparedExperts) -> tuple[Tensor, Tensor]:
    """What the tensor cores multiply: x and its scales, or the plain activations (twice; the second
    is not read).
    """
    if not prepared.constants.FP8:
        q = scale = unquantized(x)
    else:
        assert isinstance(x, QuantizedActivations), "experts in FP8 need activations that carry FP8"
        q, scale = x.q, x.scale
    assert q.is_contiguous() and scale.is_contiguous()
    return q, scale


def empty_intermediate(num_pairs: int, like: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """h [num_pairs, width] in the dtype of `like`, and room for its scales [num_pairs, width / 128]
    fp32.
    """
    scale_shape = (num_pairs, triton.cdiv(width, GROUP))
    return like.new_empty(num_pairs, width), like.new_empty(scale_shape, dtype=torch.float32)
