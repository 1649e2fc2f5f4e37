"""The activation between the GEMMs of an MLP (`SwiGlu`)."""

from torch import Tensor

from negamax.kernels.activations import Hidden, SwiGlu
from negamax.kernels.op import op, rounding_tolerance
from negamax.kernels.quantize.op import quantize_activations


def swiglu(gate_up: Tensor, /, *, activation: SwiGlu, quantize: bool = False) -> Hidden:
    """Apply `activation` to gate_up [T, 2 * width], gate columns first -> [T, width]."""
    activated = activation(gate_up)
    return quantize_activations(activated) if quantize else activated


SWIGLU = op(
    "mlp.swiglu",
    swiglu,
    None,
    "g * sigmoid(alpha g) * (u + beta) of an MLP's gate and up projection",
    rounding_tolerance(scale=4.0, reason="gate, up and the product are rounded; |y| up to 56"),
)
