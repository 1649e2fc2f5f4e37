"""The linear layer y = x W^T, with W stored [out, in] in any format."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.formats.floats import PLAIN
from negamax.formats.tensor_format import StoredWeight
from negamax.kernels.activations import Hidden, unquantized
from negamax.kernels.op import Prepared, op, rounding_tolerance
from negamax.kernels.quantize.stored import dequantize


class LinearOutput(NamedTuple):
    """Options for the result of a linear layer."""

    dtype: torch.dtype | None = None  # dtype of the result; None: dtype of x
    out: Tensor | None = None  # tensor to which the result is written
    in_parts: bool = False  # whether the result may consist of rounded partial sums, [T, P, out]


LIKE_INPUT, IN_PARTS = LinearOutput(), LinearOutput(in_parts=True)


def linear(x: Hidden, weight: Prepared, output: LinearOutput = LIKE_INPUT, /) -> Tensor:
    """Multiply x [T, in] with weight [out, in] to [T, out]. The FP8 copy of x is not read."""
    values = unquantized(x)
    dtype = output.dtype or values.dtype
    if weight.dtype != values.dtype:
        values, weight = values.float(), weight.float()
    return copy_into(output.out, F.linear(values, weight).to(dtype))


def copy_into(out: Tensor | None, result: Tensor) -> Tensor:
    """Return `result`, copied to `out` if `out` is given."""
    return result if out is None else out.copy_(result)


def keep(weight: StoredWeight, /) -> Prepared:
    """Return a plain weight [out, in] unchanged; dequantize other weights to fp32."""
    if weight.format is PLAIN:
        return weight.values
    return dequantize(weight.format, weight.tensors)


LINEAR = op(
    "gemm.linear",
    linear,
    keep,
    "x W^T with the weight prepared at load",
    rounding_tolerance(reason="fp32 sums in another order, one rounding to the dtype; |y| about 1"),
    wide_error=4e-3,  # rounding once to bf16 gives an error of 1.7e-3
)
