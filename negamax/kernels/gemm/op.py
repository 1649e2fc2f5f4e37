"""The linear layer y = x W^T, with W stored [out, in] in any format."""

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.formats.floats import PLAIN
from negamax.formats.tensor_format import StoredWeight
from negamax.kernels.activations import Hidden, unquantized
from negamax.kernels.op import Prepared, op, rounding_tolerance
from negamax.kernels.quantize.stored import dequantize


def linear(
    x: Hidden,
    weight: Prepared,
    /,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    in_parts: bool = False,
) -> Tensor:
    """Multiply x [T, in] with weight [out, in] to [T, out] in `out_dtype` (None: that of x).

    The result is written to `out` if given. FP8 activations are read in their plain form. With
    `in_parts` kernels may return partial sums [T, P, out], each rounded.
    """
    values = unquantized(x)
    dtype = out_dtype or values.dtype
    if weight.dtype != values.dtype:
        values, weight = values.float(), weight.float()
    return copy_into(out, F.linear(values, weight).to(dtype))


def copy_into(out: Tensor | None, result: Tensor) -> Tensor:
    """Return `result`, copied to `out` if given."""
    return result if out is None else out.copy_(result)


def keep(weight: StoredWeight, /) -> Prepared:
    """Return a plain weight [out, in] as it is, and any other dequantized to fp32."""
    if weight.format is PLAIN:
        return weight.values
    return dequantize(weight.format, weight.tensors)


LINEAR = op(
    "gemm.linear",
    linear,
    keep,
    summary="x W^T with the weight prepared at load",
    tolerance=rounding_tolerance(
        reason="fp32 sums in another order, one rounding to the dtype; |y| about 1"
    ),
    wide_error=4e-3,  # one rounding to bf16 is 1.7e-3
)
