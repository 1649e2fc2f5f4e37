"""Shared parts of the expert kernels: prepared weights, constants, packed GEMMs, scales."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.activations import (
    GROUP,
    SILU,
    Hidden,
    QuantizedActivations,
    SwiGlu,
    unquantized,
)
from negamax.kernels.launch.triton import e4m3_max
from negamax.kernels.mlp.triton import swiglu
from negamax.kernels.moe.op import ExpertWeights
from negamax.kernels.weight_only.layout import PackedTensors, Packing, packed_rows
from negamax.kernels.weight_only.triton import multiply

BLOCK = tl.constexpr(GROUP)  # number of columns that share a scale
_MIN_SCALE = tl.constexpr(1e-30)


@dataclass(frozen=True)
class ExpertConstants:
    """Constants of all kernels of the experts, passed as one argument `E: tl.constexpr`."""

    HIDDEN: int
    WIDTH: int  # width of one expert on this rank
    FP8: bool
    PACKED: bool = False
    GATE_UP: Packing | None = None
    DOWN: Packing | None = None
    ACTIVATION: SwiGlu = SILU
    SHARED: bool = False  # whether the last expert is the last choice of every token except padding


@dataclass(frozen=True)
class PreparedExperts(ExpertWeights):
    """Stacked weights in FP8 (a scale per 128 x 128 block), in the model's dtype, or packed."""

    # [experts, 2 * width, hidden], gate rows first; packed: the tensors of a `PackedWeight`
    gate_up: Tensor | PackedTensors
    down: Tensor | PackedTensors  # [experts, hidden, width], or tensors of a `PackedWeight`
    gate_up_scale: Tensor  # [experts, 2 * width / 128, hidden / 128] fp32; not read without FP8
    down_scale: Tensor  # [experts, hidden / 128, width / 128] fp32; not read without FP8
    constants: ExpertConstants

    def tensors(self, expert: int) -> list[Tensor]:
        """Return views of an expert's tensors (`ExpertWeights`)."""
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


@triton.jit
def multiply_packed_gate_up(
    x_ptr, w, expert, num_experts, first_n, tokens, valid,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N columns of h from first_n on, for `tokens` [BLOCK_M] and one expert ->
    [BLOCK_N, BLOCK_M]. One tile of w has BLOCK_N gate rows and BLOCK_N up rows.
    """
    P: tl.constexpr = E.GATE_UP
    APART: tl.constexpr = E.WIDTH
    x_rows = x_ptr + tokens.to(tl.int64) * E.HIDDEN
    both = multiply(x_rows, valid, w, expert * (2 * E.WIDTH) + first_n, E.WIDTH - first_n,
                    num_experts * (2 * E.WIDTH), 0, tl.cdiv(E.HIDDEN, BLOCK_K), P, BLOCK_M, BLOCK_N,
                    BLOCK_K, NUM_STAGES, NUM_WARPS, PARTS=2, APART=APART)  # fmt: skip
    both = tl.permute(tl.reshape(both, (2, BLOCK_N, BLOCK_M)), (1, 2, 0))
    gate, up = tl.split(both)
    ACTIVATION: tl.constexpr = E.ACTIVATION
    return swiglu(gate, up, ACTIVATION)


@triton.jit
def multiply_packed_down(
    h_ptr, w, expert, num_experts, first_n, h_rows, valid,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """Multiply `h_rows` of h with rows first_n .. of an expert's down -> [BLOCK_N, BLOCK_M]."""
    P: tl.constexpr = E.DOWN
    h_rows = h_ptr + h_rows.to(tl.int64) * E.WIDTH
    return multiply(h_rows, valid, w, expert * E.HIDDEN + first_n, E.HIDDEN - first_n,
                    num_experts * E.HIDDEN, 0, tl.cdiv(E.WIDTH, BLOCK_K), P, BLOCK_M, BLOCK_N,
                    BLOCK_K, NUM_STAGES, NUM_WARPS)  # fmt: skip


@triton.jit
def compute_group_scale(y, axis: tl.constexpr, DTYPE: tl.constexpr):
    """Return the scales with which the values of y along `axis` fit into DTYPE."""
    return tl.maximum(tl.max(tl.abs(y), axis) / e4m3_max(DTYPE), _MIN_SCALE)


def select_operands(x: Hidden, prepared: PreparedExperts) -> tuple[Tensor, Tensor]:
    """Return (x in FP8, its scales) for FP8 experts, and (plain x, plain x) for other experts."""
    if not prepared.constants.FP8:
        q = scale = unquantized(x)
    else:
        assert isinstance(x, QuantizedActivations), "FP8 experts need quantized activations"
        q, scale = x.q, x.scale
    assert q.is_contiguous() and scale.is_contiguous()
    return q, scale


def empty_intermediate(num_pairs: int, like: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Allocate h [num_pairs, width] in like's dtype, and scales [num_pairs, width / 128] fp32."""
    scale_shape = (num_pairs, triton.cdiv(width, GROUP))
    return like.new_empty(num_pairs, width), like.new_empty(scale_shape, dtype=torch.float32)
