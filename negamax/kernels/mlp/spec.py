"""The activation between the products of an MLP: `SwiGlu`."""

from __future__ import annotations

from torch import Tensor

from negamax.kernels.activations import SwiGlu
from negamax.kernels.mlp import cases
from negamax.kernels.op import Kernel, Op, rounding_tolerance
from negamax.kernels.signatures import SWIGLU


def swiglu(gate_up: Tensor, *, activation: SwiGlu, quantize: bool = False) -> Tensor:
    """gate_up [T, 2 * width], gate first -> [T, width]."""
    assert not quantize, "FP8 output is made on the GPU only"
    return activation(gate_up)


OPS = (
    Op(
        name=SWIGLU,
        summary="g * sigmoid(alpha g) * (u + beta) of an MLP's gate and up projection",
        reference=Kernel(SWIGLU, "reference", swiglu),
        cases=cases.small,
        apply=cases.apply,
        tolerance=rounding_tolerance(
            scale=4.0, reason="gate, up and the product are rounded; |y| up to 56"
        ),
        cost=cases.cost,
        wide=cases.full_size,
    ),
)
