"""RMS norm: y = x / sqrt(mean(x^2) + eps) * weight, statistics in fp32 over the last dimension.

The normalized x is rounded to the dtype of x and then multiplied by the weight, as in transformers.
The norms of Gemma and MiniMax-M3 multiply by 1 + weight in fp32 and round once.
"""

from dataclasses import dataclass

from torch import Tensor

from negamax.kernels.activations import Hidden
from negamax.kernels.op import Prepared, op, rounding_tolerance
from negamax.kernels.quantize.op import quantize_activations


@dataclass(frozen=True)
class NormWeight:
    """Weight of a norm, and the epsilon under its square root."""

    weight: Tensor  # [width], norm weight
    eps: float
    quantize: bool = False  # whether to return `QuantizedActivations`
    gemma: bool = False  # whether to multiply by 1 + weight


def prepare(
    weight: Tensor, eps: float, /, *, quantize: bool = False, gemma: bool = False
) -> Prepared:
    """Return a `NormWeight`: weight [width], and the epsilon under the square root of the norm."""
    return NormWeight(weight, eps, quantize, gemma)


def rms(x: Tensor, norm: NormWeight) -> Tensor:
    """Return the RMS norm of x [T, width], in the dtype of the weight."""
    wide = x.float()
    mean_square = wide.square().mean(-1, keepdim=True)  # [T, 1] fp32
    x_hat = wide * (mean_square + norm.eps).rsqrt()
    if norm.gemma:
        return (x_hat * (1 + norm.weight.float())).to(x.dtype)
    return x_hat.to(x.dtype) * norm.weight


def sum_parts(x: Tensor) -> Tensor:
    """Sum x [T, P, width] over P in fp32 and round the sum; return x [T, width] unchanged."""
    return x if x.dim() == 2 else x.float().sum(dim=1).to(x.dtype)


def add_rms(x: Tensor, residual: Tensor, norm: Prepared, /) -> Hidden:
    """Add x [T, width] or parts [T, P, width] to residual in place; return the residual's norm."""
    residual += sum_parts(x)
    normed = rms(residual, norm)
    return quantize_activations(normed) if norm.quantize else normed


WIDE_ERROR = 5e-3  # sum of the errors of three roundings to bf16, which has 8 significant bits

ADD_RMS = op(
    "norm.add_rms",
    add_rms,
    prepare,
    "residual += x, then RMS norm of the residual",
    rounding_tolerance(
        scale=2.0, reason="x-hat and the product are rounded to the dtype once each; |y| up to 5"
    ),
    wide_error=WIDE_ERROR,
)
