"""Formats of 4 and 8 bits for weight-only kernels, and random weights in them.

Checkpoints store integers in several orders, but all formats share `Codes`.
"""

import torch
from torch import Tensor

from negamax.formats.floats import PER_ROW, fp8, mxfp4, mxfp8, nvfp4, use_rounded_activations
from negamax.formats.tensor_format import (
    ONE,
    ROWS,
    Axis,
    CodePacking,
    Dim,
    Role,
    StoredTensor,
    TensorFormat,
)
from negamax.kernels.weight_only.draw import draw


def _integers(
    name: str, element: str, scale: str, group: int = 0, *, zeros: bool = False
) -> TensorFormat:
    """Make a format with a scale per `group` columns (0: all). A byte holds two 4-bit codes."""
    per_byte = 2 if element == "uint4" else 1
    dtype = "uint8" if element == "uint4" else element
    groups = Dim(Axis.COLUMNS, group) if group else ONE
    tensors = [
        StoredTensor("weight", Role.VALUES, (dtype,), (ROWS, Dim(Axis.COLUMNS, per_byte))),
        StoredTensor("weight_scale", Role.SCALE, (scale,), (ROWS, groups)),
    ]
    if zeros:
        tensors.append(StoredTensor("zero_point", Role.ZERO_POINT, ("uint8",), (ROWS, groups)))
    packing = CodePacking.NIBBLES if element == "uint4" else CodePacking.ENTRIES
    return TensorFormat(name, element, tuple(tensors), packing)


INT4 = _integers("int4_group_128", "uint4", "bfloat16", 128)
INT8_CHANNEL = use_rounded_activations(_integers("int8_channel", "int8", "float32"))
E4M3_CHANNEL = use_rounded_activations(fp8("fp8_e4m3_channel", PER_ROW))
FORMATS = (INT4, nvfp4(), mxfp4(), mxfp8(), INT8_CHANNEL, E4M3_CHANNEL)
SMALL_FORMATS = (
    *FORMATS,
    _integers("uint4_group_32", "uint4", "float16", 32, zeros=True),
    _integers("uint4_group_64", "uint4", "float16", 64, zeros=True),
    _integers("int8_group_128", "int8", "bfloat16", 128),
    _integers("uint8_channel", "uint8", "float32", zeros=True),
)


def tensors_of(
    stored: TensorFormat, name: str, *shape: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Make matrices [..., N, K] of standard deviation K^-1/2 as tensors "name.<tensor>"."""
    *lead, rows, columns = shape
    made, options = {}, {"std": columns**-0.5, "generator": generator}
    for tensor in stored.tensors:
        size = (*lead, *tensor.held().shape((rows, columns)))
        made[f"{name}.{tensor.name}"] = draw(stored, tensor, size, **options)
    return made
