"""Triton kernels of the mixture of experts: routing in one launch, the experts in two (four for
prefills).

Three ways through the experts, by the number of tokens T (`tiles.py`):

- *token* (a handful): one program per (choice, few rows), products on the CUDA cores, FP8 weights
  against plain activations.
- *scan* (decode): one program per (expert, rows). It finds the expert's tokens by looking through
  `ids`, and multiplies W8A8 with the weights as the tall operand, so that few tokens waste no
  tensor-core rows. No sorting launch.
- *sorted* (prefill): the pairs (token, choice) are first put in expert order; then the same tiles
  over many tokens.

The intermediate h = silu(gate x) * (up x) is kept per pair, in FP8 with one scale per GROUP columns
where the weights are FP8. A pair is numbered token * top_k + choice.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from negamax.kernels.activations import GROUP, QuantizedActivations, unquantized
from negamax.kernels.formats import (
    E4M3_BLOCKS,
    E4M3_GROUPS,
    KEPT_FORMATS,
    PLAIN,
    StoredWeight,
    reads_e4m3_blocks,
)
from negamax.kernels.moe import tiles
from negamax.kernels.moe.triton_decode import scan, token
from negamax.kernels.moe.triton_prefill import experts_sorted
from negamax.kernels.moe.triton_route import prepare_gate, route
from negamax.kernels.moe.triton_shared import PreparedExperts
from negamax.kernels.op import Kernel
from negamax.kernels.platform import Feature
from negamax.kernels.quantize.native import to_native
from negamax.kernels.signatures import EXPERTS, ROUTE


def prepare_experts(gate_up: StoredWeight, down: StoredWeight) -> PreparedExperts:
    """The stacked weights, plain or E4M3 blocks."""
    tall, wide = gate_up.values, down.values
    assert tall.is_contiguous() and wide.is_contiguous()
    if gate_up.format is PLAIN:
        return PreparedExperts(tall, wide, tall, wide, fp8=False)
    hidden, width = wide.shape[1:]
    assert hidden % GROUP == 0 and width % GROUP == 0, (
        f"FP8 experts of hidden {hidden}, width {width}: not whole blocks"
    )
    tall, tall_scale = to_native(tall, gate_up.scale.contiguous())
    wide, wide_scale = to_native(wide, down.scale.contiguous())
    return PreparedExperts(tall, wide, tall_scale, wide_scale, fp8=True)


def experts(
    x: Tensor | QuantizedActivations,
    ids: Tensor,
    weights: Tensor,
    prepared: PreparedExperts,
    *,
    first: int,
    count: int,
) -> Tensor:
    """x [T, hidden], ids [T, top_k] int32, weights [T, top_k] fp32 -> [T, P, hidden], to be summed
    over P.
    """
    num_tokens, width = ids.shape[0], prepared.down.shape[2]
    assert ids.is_contiguous() and weights.is_contiguous() and ids.dtype == torch.int32
    if num_tokens == 0:
        return unquantized(x).unsqueeze(1)
    if num_tokens <= tiles.tiles_for(ids.device).max_token(width):
        return token(unquantized(x), ids, weights, prepared, first=first, count=count)
    if num_tokens <= tiles.MAX_SCAN:
        return scan(x, ids, weights, prepared, first=first, count=count)
    return experts_sorted(x, ids, weights, prepared, first=first, count=count)


_GPU = frozenset({Feature.TRITON})
_DTYPES = (torch.bfloat16, torch.float16)
KERNELS = (
    Kernel(
        ROUTE,
        "triton",
        route,
        prepare_gate,
        requires=_GPU | {Feature.SPIN_WAIT},
        dtypes=_DTYPES,
    ),
    Kernel(
        ROUTE,
        "triton_last_arrival",
        route,
        partial(prepare_gate, waits=False),
        requires=_GPU,
        dtypes=_DTYPES,
    ),
    Kernel(EXPERTS, "triton", experts, prepare_experts, requires=_GPU, dtypes=_DTYPES),
    Kernel(
        EXPERTS,
        "triton",
        experts,
        prepare_experts,
        requires=KEPT_FORMATS[E4M3_BLOCKS],
        dtypes=_DTYPES,
        reads=reads_e4m3_blocks,
        activation=E4M3_GROUPS,
    ),
)
