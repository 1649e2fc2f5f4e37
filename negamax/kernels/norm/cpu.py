"""RMS norm where the CPU has no C compiler (`kernels/native`): in place, with the constants as
tensors, whose conversion in every call took 5 of 21 us (one row of 256 on Zen 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from negamax.kernels.norm.spec import sum_parts
from negamax.kernels.op import Kernel
from negamax.kernels.signatures import ADD_RMS


@dataclass(frozen=True)
class NormTensors:
    """A norm's weight [width] and its constants [] fp32."""

    weight: Tensor
    width: Tensor
    eps: Tensor


def prepare(weight: Tensor, eps: float, *, quantize: bool = False) -> NormTensors:
    """weight [width], eps under the root."""
    assert not quantize, "FP8 output is made on the GPU only"
    return NormTensors(weight, torch.tensor(float(weight.shape[0])), torch.tensor(eps))


def add_rms(x: Tensor, residual: Tensor, norm: NormTensors) -> Tensor:
    """As the definition, to the bit."""
    wide = residual.add_(sum_parts(x)).float()
    mean_square = wide.square().sum(-1, keepdim=True).div_(norm.width)
    return (wide * mean_square.add_(norm.eps).rsqrt_()).to(x.dtype).mul_(norm.weight)


KERNELS = (Kernel(ADD_RMS, "cpu", add_rms, prepare),)
