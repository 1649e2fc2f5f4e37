"""Formats of FP8 and FP4 values, under the names of whichever tool wrote them.

NVFP4 is E2M1 with an E4M3 scale for 16 columns and one number for the matrix; MXFP4 and MXFP8 are
E2M1 and E4M3 with a power of two (E8M0) for 32 columns, as the OCP Microscaling specification says.
Of two FP4 codes in a byte the low nibble is the even column.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import TYPE_CHECKING

from negamax.kernels.formats import (
    COLUMNS,
    E4M3,
    FLOATS,
    ONE,
    ROWS,
    Axis,
    Dim,
    Role,
    StoredTensor,
    TensorFormat,
)

if TYPE_CHECKING:
    from torch import Tensor

    from negamax.kernels.codes import Codes

E2M1 = "float4_e2m1"
E4M3_FNUZ = "float8_e4m3fnuz"  # of MI300: half the values of E4M3's bits, and 0x80 is NaN
E8M0 = ("uint8", "float8_e8m0fnu")  # an exponent, in either spelling
NVFP4_GROUP, MX_GROUP = 16, 32  # columns that share a scale
PER_ROW, PER_MATRIX = (ROWS, ONE), (ONE,)


@cache
def fp8(
    name: str,
    scale: tuple[Dim, ...],
    *,
    scale_name: str = "weight_scale",
    input_scale: str | None = None,
    fnuz: bool = False,
) -> TensorFormat:
    """E4M3 with a scale for each part that `scale` says. `input_scale`: the name of a scale of the
    activations. `fnuz`: the bits are MI300's, whichever of the two dtypes the files say.
    """
    dtypes = (E4M3_FNUZ, E4M3) if fnuz else (E4M3,)
    name = name.replace("e4m3", "e4m3fnuz") if fnuz else name
    values = StoredTensor("weight", Role.VALUES, dtypes, (ROWS, COLUMNS))
    scales = StoredTensor(scale_name, Role.SCALE, FLOATS, scale)
    block = (
        next(d.unit for d in (*scale, ROWS) if d.axis is Axis.ROWS),
        next((d.unit for d in scale if d.axis is Axis.COLUMNS), 1),
    )
    unpack = partial(_unpack_fp8, scale_name=scale_name, block=block, fnuz=fnuz)
    return TensorFormat(name, dtypes[0], (values, scales, *_activation(input_scale)), unpack)


def _unpack_fp8(
    tensors: Mapping[str, Tensor], *, scale_name: str, block: tuple[int, int], fnuz: bool
) -> Codes:
    import torch

    from negamax.kernels.codes import Codes

    values, scale = tensors["weight"], tensors[scale_name]
    if fnuz:
        values = values.view(torch.float8_e4m3fnuz)
    lead = values.shape[:-2]
    if block == (1, 1):
        return Codes(values, scale.reshape(*lead, -1, 1))
    return Codes(values, scale.reshape(*lead, -1, -(-values.shape[-1] // block[1])), block)


@cache
def mxfp8(*, scale_name: str = "weight_scale") -> TensorFormat:
    """E4M3 with an E8M0 scale for 32 columns."""
    values = StoredTensor("weight", Role.VALUES, (E4M3,), (ROWS, COLUMNS))
    scales = StoredTensor(scale_name, Role.SCALE, E8M0, (ROWS, Dim(Axis.COLUMNS, MX_GROUP)))
    unpack = partial(_unpack_mxfp8, scale_name=scale_name)
    return TensorFormat("mxfp8", E4M3, (values, scales), unpack)


def _unpack_mxfp8(tensors: Mapping[str, Tensor], *, scale_name: str) -> Codes:
    from negamax.kernels.codes import Codes

    return Codes(tensors["weight"], _e8m0(tensors[scale_name]), (1, MX_GROUP))


@cache
def mxfp4(*, values: str = "weight") -> TensorFormat:
    """E2M1 with an E8M0 scale for 32 columns."""
    tensors = (
        StoredTensor(values, Role.VALUES, ("uint8",), (ROWS, Dim(Axis.COLUMNS, 2))),
        StoredTensor("weight_scale", Role.SCALE, E8M0, (ROWS, Dim(Axis.COLUMNS, MX_GROUP))),
    )
    return TensorFormat("mxfp4", E2M1, tensors, partial(_unpack_mxfp4, values=values))


def _unpack_mxfp4(tensors: Mapping[str, Tensor], *, values: str) -> Codes:
    from negamax.kernels.codes import Codes

    codes, scale = _nibbles(tensors[values]), _e8m0(tensors["weight_scale"])
    return Codes(codes, scale, (1, MX_GROUP), is_e2m1=True)


@cache
def nvfp4(
    *,
    values: str = "weight",
    global_scale: str = "weight_scale_2",
    divides: bool = False,
    input_scale: str | None = None,
) -> TensorFormat:
    """E2M1 with an E4M3 scale for 16 columns and one, `global_scale`, for the matrix, which
    multiplies, or `divides`.
    """
    tensors = (
        StoredTensor(values, Role.VALUES, ("uint8",), (ROWS, Dim(Axis.COLUMNS, 2))),
        StoredTensor("weight_scale", Role.SCALE, (E4M3,), (ROWS, Dim(Axis.COLUMNS, NVFP4_GROUP))),
        StoredTensor(global_scale, Role.SCALE, FLOATS, PER_MATRIX, level=2),
        *_activation(input_scale),
    )
    unpack = partial(_unpack_nvfp4, values=values, global_scale=global_scale, divides=divides)
    return TensorFormat("nvfp4", E2M1, tensors, unpack)


def _unpack_nvfp4(
    tensors: Mapping[str, Tensor], *, values: str, global_scale: str, divides: bool
) -> Codes:
    from negamax.kernels.codes import Codes

    whole = tensors[global_scale].float()
    return Codes(
        _nibbles(tensors[values]), tensors["weight_scale"], (1, NVFP4_GROUP),
        global_scale=whole.reciprocal() if divides else whole, is_e2m1=True,
    )  # fmt: skip


def _activation(name: str | None) -> tuple[StoredTensor, ...]:
    """The scale of the activations, which stay in the compute dtype."""
    if name is None:
        return ()
    return (StoredTensor(name, Role.ACTIVATION, FLOATS, PER_MATRIX, optional=True),)


def _nibbles(packed: Tensor) -> Tensor:
    """[..., K / 2] uint8 -> [..., K], one code each."""
    import torch

    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _e8m0(scale: Tensor) -> Tensor:
    import torch

    return scale.view(torch.float8_e8m0fnu)
