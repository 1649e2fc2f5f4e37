"""RMS norm, in place, on CPUs without a C compiler (`kernels/native`).

Constants are tensors, because converting numbers took 5 of the 21 us of a call (256 values, Zen 4).
"""

import torch
from torch import Tensor

from negamax.kernels.norm.op import ADD_RMS, sum_parts
from negamax.kernels.op import Kernel

# a norm's weight [width], width [] fp32, eps [] fp32, whether to multiply by 1 + weight
NormTensors = tuple[Tensor, Tensor, Tensor, bool]


def prepare(
    weight: Tensor, eps: float, *, quantize: bool = False, gemma: bool = False
) -> NormTensors:
    """Make the constants of a norm with weight [width]."""
    assert not quantize, "CPU kernels have no FP8 output; set quantize=False"
    return weight, torch.tensor(float(weight.shape[0])), torch.tensor(eps), gemma


def add_rms(x: Tensor, residual: Tensor, norm: NormTensors) -> Tensor:
    """Compute `norm.add_rms` bit-identically to the reference."""
    weight, width, eps, gemma = norm
    wide = residual.add_(sum_parts(x)).float()
    scale = wide.square().sum(-1, keepdim=True).div_(width).add_(eps).rsqrt_()
    if gemma:
        return (wide * scale).mul_(1 + weight.float()).to(x.dtype)
    return (wide * scale).to(x.dtype).mul_(weight)


KERNELS = (Kernel(ADD_RMS, "cpu", add_rms, prepare),)
