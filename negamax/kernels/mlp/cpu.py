"""MLP activation for CPUs without native kernels; `rowwise.py` makes it batch-invariant."""

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.kernels.activations import SwiGlu
from negamax.kernels.mlp.op import SWIGLU
from negamax.kernels.op import Kernel
from negamax.kernels.rowwise import apply, padded_rows


def swiglu(gate_up: Tensor, *, activation: SwiGlu, quantize: bool = False) -> Tensor:
    assert not quantize, "CPU kernels have no FP8 output; set quantize=False"
    return activation(gate_up, sigmoid=_sigmoid)


def _sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid of x [T, width] fp32."""
    num_tokens, width = x.shape
    rows = padded_rows(num_tokens, width=width)
    return apply(torch.sigmoid, F.pad(x, (0, 0, 0, rows - num_tokens)))[:num_tokens]


KERNELS = (Kernel(SWIGLU, "padded", swiglu),)
