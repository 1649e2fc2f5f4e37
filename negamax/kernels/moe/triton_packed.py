"""The two products of the experts with packed weights of 4 and 8 bits, for decode steps and
prefills alike: a tile of the weight is the tall operand, the tokens the short one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from negamax.kernels.mlp.triton import swiglu
from negamax.kernels.weight_only.triton import multiply


@triton.jit
def packed_gate_up(
    x_ptr, w, expert, num_experts, first_n, tokens, valid,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_M] fp32: columns first_n .. first_n + BLOCK_N - 1 of h of `tokens` [BLOCK_M]
    of one expert. One tile holds the BLOCK_N gate rows and the up rows.
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
def packed_down(
    h_ptr, w, expert, num_experts, first_n, h_rows, valid,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_M] fp32: outputs first_n .. first_n + BLOCK_N - 1 of the rows `h_rows`
    [BLOCK_M] of h, all of one expert.
    """
    P: tl.constexpr = E.DOWN
    h_rows = h_ptr + h_rows.to(tl.int64) * E.WIDTH
    return multiply(h_rows, valid, w, expert * E.HIDDEN + first_n, E.HIDDEN - first_n,
                    num_experts * E.HIDDEN, 0, tl.cdiv(E.WIDTH, BLOCK_K), P, BLOCK_M, BLOCK_N,
                    BLOCK_K, NUM_STAGES, NUM_WARPS)  # fmt: skip
