"""FP8 activations: e4m3 values with one fp32 scale per token and 128 columns.

If the unquantized values of a group contain NaN or infinity, all its FP8 values become NaN.
"""

import torch
from torch import Tensor

from negamax.formats.floats import E4M3_MAX
from negamax.kernels.activations import GROUP, QuantizedActivations
from negamax.kernels.op import op, rounding_tolerance


def quantize_activations(x: Tensor, /) -> QuantizedActivations:
    """Quantize x [T, K] to e4m3; a scale per token and 128 columns is max / 448, or 1 for zeros."""
    assert x.shape[1] % GROUP == 0, f"FP8 activations need a multiple of {GROUP} columns: {x.shape}"
    groups = x.float().unflatten(1, (-1, GROUP))  # [T, K / 128, 128]
    largest = groups.abs().amax(dim=-1)
    # the clamp prevents a scale of 0, with which zeros would become NaN
    scale = (largest / E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny).where(largest != 0, 1.0)
    q = (groups / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(1)
    return QuantizedActivations(x, q, scale)


QUANTIZE = op(
    "quantize.activations",
    quantize_activations,
    None,
    "activations to e4m3 values and one fp32 scale per token and 128 columns",
    rounding_tolerance(
        scale=0.0, reason="`cases.outputs` accepts either of two neighboring e4m3 values"
    ),
)
