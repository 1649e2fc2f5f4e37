"""Formats of FP8 and FP4 values, under the names of whichever tool wrote them.

NVFP4 is E2M1 with an E4M3 scale for 16 columns and one number for the matrix; MXFP4 and MXFP8 are
E2M1 and E4M3 with a power of two (E8M0) for 32 columns, as the OCP Microscaling specification says.
Of two FP4 codes in a byte the low nibble is the even column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from negamax.kernels.formats import (
    COLUMNS,
    E2M1,
    E4M3,
    E4M3_FNUZ,
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

E8M0 = ("uint8", "float8_e8m0fnu")  # an exponent, in either spelling
NVFP4_GROUP, MX_GROUP = 16, 32  # columns that share a scale
PER_ROW, PER_MATRIX = (ROWS, ONE), (ONE,)
# Of MI300's values, which reach up to 240: half of 448, so that blocks of E4M3 keep their bits.
FNUZ_LARGEST = 224.0


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
    dtypes, also = ((E4M3_FNUZ, E4M3), ()) if fnuz else ((E4M3,), (E4M3_FNUZ,))
    values = StoredTensor("weight", Role.VALUES, dtypes, (ROWS, COLUMNS), also)
    scales = StoredTensor(scale_name, Role.SCALE, FLOATS, scale)
    tensors = values, scales, *_activation(input_scale)
    layout = _Fp8(scale_name, scale, fnuz)
    name = name.replace("e4m3", "e4m3fnuz") if fnuz else name
    return TensorFormat(name, dtypes[0], tensors, layout, layout.quantize)


@dataclass(frozen=True)
class _Fp8:
    scale: str
    dims: tuple[Dim, ...]
    fnuz: bool

    def __call__(self, tensors: Mapping[str, Tensor]) -> Codes:
        import torch

        from negamax.kernels.codes import Codes

        values, scale = tensors["weight"], tensors[self.scale]
        if self.fnuz:
            values = values.view(torch.float8_e4m3fnuz)
        rows, columns = self._block()
        # one number, or one for each row of the matrices held together, or for rows together
        groups = -(-values.shape[-1] // columns) if columns else 1
        scale = scale.reshape(*values.shape[:-2], -1, groups)
        return Codes(values, scale, (rows or 1, columns or 1))

    def quantize(self, matrix: Tensor) -> Mapping[str, Tensor]:
        """The inverse."""
        import torch

        from negamax.kernels.quantizers import to_e4m3

        rows, columns = (
            size or whole for size, whole in zip(self._block(), matrix.shape, strict=True)
        )
        if self.fnuz:
            fnuz = torch.float8_e4m3fnuz
            codes = to_e4m3(matrix, (rows, columns), largest=FNUZ_LARGEST, dtype=fnuz)
        else:
            codes = to_e4m3(matrix, (rows, columns))
        assert codes.scale is not None
        height, width = matrix.shape
        shape = [dim.size((height, width)) for dim in self.dims]
        return {"weight": codes.values, self.scale: codes.scale.reshape(shape)}

    def _block(self) -> tuple[int, int]:
        """Rows and columns that share a scale, 0 for all of them."""
        rows, columns = (
            max((dim.unit for dim in self.dims if dim.axis is axis), default=0)
            for axis in (Axis.ROWS, Axis.COLUMNS)
        )
        return rows, columns


def mxfp8(*, scale_name: str = "weight_scale") -> TensorFormat:
    """E4M3 with an E8M0 scale for 32 columns."""
    values = StoredTensor("weight", Role.VALUES, (E4M3,), (ROWS, COLUMNS))
    scales = StoredTensor(scale_name, Role.SCALE, E8M0, (ROWS, Dim(Axis.COLUMNS, MX_GROUP)))
    layout = _Mxfp8(scale_name)
    return TensorFormat("mxfp8", E4M3, (values, scales), layout, layout.quantize)


@dataclass(frozen=True)
class _Mxfp8:
    scale: str

    def __call__(self, tensors: Mapping[str, Tensor]) -> Codes:
        from negamax.kernels.codes import Codes

        return Codes(tensors["weight"], _e8m0(tensors[self.scale]), (1, MX_GROUP))

    def quantize(self, matrix: Tensor) -> Mapping[str, Tensor]:
        """The inverse."""
        from negamax.kernels.quantizers import to_e4m3_powers

        codes = to_e4m3_powers(matrix, MX_GROUP)
        return {"weight": codes.values, self.scale: _bits(codes.scale)}


def mxfp4(*, values: str = "weight") -> TensorFormat:
    """E2M1 with an E8M0 scale for 32 columns."""
    tensors = (
        StoredTensor(values, Role.VALUES, ("uint8",), (ROWS, Dim(Axis.COLUMNS, 2))),
        StoredTensor("weight_scale", Role.SCALE, E8M0, (ROWS, Dim(Axis.COLUMNS, MX_GROUP))),
    )
    layout = _Mxfp4(values)
    return TensorFormat("mxfp4", E2M1, tensors, layout, layout.quantize)


@dataclass(frozen=True)
class _Mxfp4:
    values: str

    def __call__(self, tensors: Mapping[str, Tensor]) -> Codes:
        from negamax.kernels.codes import Codes
        from negamax.kernels.packed import nibbles

        codes, scale = nibbles(tensors[self.values]), _e8m0(tensors["weight_scale"])
        return Codes(codes, scale, (1, MX_GROUP), is_e2m1=True)

    def quantize(self, matrix: Tensor) -> Mapping[str, Tensor]:
        """The inverse."""
        from negamax.kernels.packed import pack_nibbles
        from negamax.kernels.quantizers import to_e2m1_powers

        codes = to_e2m1_powers(matrix, MX_GROUP)
        return {self.values: pack_nibbles(codes.values), "weight_scale": _bits(codes.scale)}


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
    layout = _Nvfp4(values, global_scale, divides)
    return TensorFormat("nvfp4", E2M1, tensors, layout, layout.quantize)


@dataclass(frozen=True)
class _Nvfp4:
    values: str
    global_scale: str
    divides: bool

    def __call__(self, tensors: Mapping[str, Tensor]) -> Codes:
        from negamax.kernels.codes import Codes
        from negamax.kernels.packed import nibbles

        whole = tensors[self.global_scale].float()
        return Codes(
            nibbles(tensors[self.values]),
            tensors["weight_scale"],
            (1, NVFP4_GROUP),
            global_scale=whole.reciprocal() if self.divides else whole,
            is_e2m1=True,
        )

    def quantize(self, matrix: Tensor) -> Mapping[str, Tensor]:
        """The inverse."""
        from negamax.kernels.packed import pack_nibbles
        from negamax.kernels.quantizers import to_e2m1

        codes = to_e2m1(matrix, NVFP4_GROUP)
        assert codes.scale is not None and codes.global_scale is not None
        whole = codes.global_scale
        return {
            self.values: pack_nibbles(codes.values),
            "weight_scale": codes.scale,
            self.global_scale: whole.reciprocal() if self.divides else whole,
        }


def with_input_scale(stored: TensorFormat, name: str) -> TensorFormat:
    """`stored` with a scale of the activations, which stay in the compute dtype."""
    return replace(stored, tensors=(*stored.tensors, *_activation(name)))


def _activation(name: str | None) -> tuple[StoredTensor, ...]:
    if name is None:
        return ()
    return (StoredTensor(name, Role.ACTIVATION, FLOATS, PER_MATRIX, optional=True),)


def _e8m0(scale: Tensor) -> Tensor:
    import torch

    return scale.view(torch.float8_e8m0fnu)


def _bits(scale: Tensor | None) -> Tensor:
    import torch

    assert scale is not None
    return scale.view(torch.uint8)
