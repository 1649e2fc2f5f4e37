"""Formats of unquantized, FP8 and FP4 values, with the tensor names that quantization tools write.

NVFP4 has E2M1 values, an E4M3 scale per 16 columns and one scale per matrix. MXFP4 has E2M1 values
and MXFP8 has E4M3 values. In both OCP Microscaling formats (MXFP4 and MXFP8), 32 columns share a
scale that is a power of two (E8M0). The low nibble of a byte is the FP4 code of an even column.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from negamax.formats.tensor_format import (
    COLUMNS,
    FLOATS,
    ONE,
    ROWS,
    ActivationFormat,
    Axis,
    CodePacking,
    Dim,
    GlobalScale,
    Role,
    Rounding,
    StoredTensor,
    StoredWeight,
    TensorFormat,
)

if TYPE_CHECKING:
    from torch import Tensor

E4M3 = "float8_e4m3fn"
E4M3_FNUZ = "float8_e4m3fnuz"  # FP8 of MI300: a byte means half of its value in E4M3; 0x80 is NaN.
E4M3_MAX = 448.0  # Largest value of E4M3, which has no infinity.
E4M3_GROUP = 128  # One scale for 128 columns of activations, or for 128 x 128 weights.
E4M3_GROUPS = ActivationFormat(E4M3, E4M3_GROUP)
E2M1 = "float4_e2m1"
E8M0 = ("uint8", "float8_e8m0fnu")  # Checkpoints store E8M0 exponents in one of these dtypes.
NVFP4_GROUP, MX_GROUP = 16, 32  # Number of columns that share a scale.
PER_ROW, PER_MATRIX = (ROWS, ONE), (ONE,)
# The largest value of E4M3_FNUZ is 240. Blocks are scaled to 224 (half of E4M3's largest value),
# because both dtypes then round a block to the same bits.
FNUZ_LARGEST = 224.0

PLAIN = TensorFormat(
    "plain", "float", (StoredTensor("weight", Role.VALUES, FLOATS, (ROWS, COLUMNS)),)
)


def is_plain(stored: TensorFormat) -> bool:
    """Return whether the format stores a matrix unquantized, in any floating-point dtype."""
    return stored is PLAIN


def plain(weight: Tensor) -> StoredWeight:
    """Wrap an unquantized weight [..., N, K]. GEMMs use the weight's dtype."""
    return StoredWeight(PLAIN, {"weight": weight})


def fp8(
    name: str,
    scale: tuple[Dim, ...],
    *,
    scale_name: str = "weight_scale",
    input_scale: str | None = None,
    fnuz: bool = False,
) -> TensorFormat:
    """Make an E4M3 format. The tensor of scales has the dimensions `scale`.

    `input_scale` is the tensor name of a scale for activations. With `fnuz`, the bytes are MI300's
    e4m3fnuz values, even if the files declare float8_e4m3fn.
    """
    dtypes, also = ((E4M3_FNUZ, E4M3), ()) if fnuz else ((E4M3,), (E4M3_FNUZ,))
    return TensorFormat(
        name.replace("e4m3", "e4m3fnuz") if fnuz else name,
        dtypes[0],
        (
            StoredTensor("weight", Role.VALUES, dtypes, (ROWS, COLUMNS), also),
            StoredTensor(scale_name, Role.SCALE, FLOATS, scale),
            *_input_scale(input_scale),
        ),
        rounding=Rounding(FNUZ_LARGEST if fnuz else E4M3_MAX),
    )


def add_input_scale(stored: TensorFormat, name: str) -> TensorFormat:
    """Return `stored` with one more tensor, a scale of activations, which kernels do not read."""
    return replace(stored, tensors=(*stored.tensors, *_input_scale(name)))


def _input_scale(name: str | None) -> tuple[StoredTensor, ...]:
    if name is None:
        return ()
    return (StoredTensor(name, Role.ACTIVATION, FLOATS, PER_MATRIX, optional=True),)


# The native format of the M2 family. In spite of its name, `weight_scale_inv` is a factor of the
# values. Blocks at the lower and right edge of a matrix may be smaller.
E4M3_BLOCKS = fp8(
    "fp8_e4m3_block_128x128",
    (Dim(Axis.ROWS, E4M3_GROUP), Dim(Axis.COLUMNS, E4M3_GROUP)),
    scale_name="weight_scale_inv",
)


def e4m3_blocks(values: Tensor, scale: Tensor) -> StoredWeight:
    """Wrap values [..., N, K] e4m3 and scale [..., ceil(N / 128), ceil(K / 128)] fp32."""
    return StoredWeight(E4M3_BLOCKS, {"weight": values, "weight_scale_inv": scale})


def mxfp8(*, scale_name: str = "weight_scale") -> TensorFormat:
    """Return the format of E4M3 values with an E8M0 scale per 32 columns."""
    values = StoredTensor("weight", Role.VALUES, (E4M3,), (ROWS, COLUMNS))
    scales = StoredTensor(scale_name, Role.SCALE, E8M0, (ROWS, Dim(Axis.COLUMNS, MX_GROUP)))
    return TensorFormat("mxfp8", E4M3, (values, scales), rounding=Rounding(to_powers=True))


def mxfp4(*, values: str = "weight") -> TensorFormat:
    """Return the format of E2M1 values with an E8M0 scale per 32 columns."""
    tensors = (
        StoredTensor(values, Role.VALUES, ("uint8",), (ROWS, Dim(Axis.COLUMNS, 2))),
        StoredTensor("weight_scale", Role.SCALE, E8M0, (ROWS, Dim(Axis.COLUMNS, MX_GROUP))),
    )
    rounding = Rounding(to_powers=True)
    return TensorFormat("mxfp4", E2M1, tensors, CodePacking.NIBBLES, rounding=rounding)


def nvfp4(
    *,
    values: str = "weight",
    global_scale: str = "weight_scale_2",
    divides: bool = False,
    input_scale: str | None = None,
) -> TensorFormat:
    """Return the format of E2M1 values with an E4M3 scale per 16 columns and one per matrix.

    `global_scale` is the tensor name of the scale of the matrix. The E4M3 scales are multiplied by
    the global scale, or divided by it if `divides` is set.
    """
    tensors = (
        StoredTensor(values, Role.VALUES, ("uint8",), (ROWS, Dim(Axis.COLUMNS, 2))),
        StoredTensor("weight_scale", Role.SCALE, (E4M3,), (ROWS, Dim(Axis.COLUMNS, NVFP4_GROUP))),
        StoredTensor(global_scale, Role.SCALE, FLOATS, PER_MATRIX, level=2),
        *_input_scale(input_scale),
    )
    return TensorFormat(
        "nvfp4",
        E2M1,
        tensors,
        CodePacking.NIBBLES,
        global_scale=GlobalScale.DIVIDES if divides else GlobalScale.MULTIPLIES,
        rounding=Rounding(),
    )


def use_rounded_activations(stored: TensorFormat) -> TensorFormat:
    """Return a format like `stored` that rounds activations to the weights' element type.

    Only int8 and E4M3 formats with scales per row or per matrix are changed.
    """
    scales = [tensor for tensor in stored.tensors if tensor.role is Role.SCALE]
    is_grouped = any(scale.axis(Axis.COLUMNS) is not None for scale in scales)
    if is_grouped or stored.element not in ("int8", E4M3):
        return stored
    return replace(stored, activation=ActivationFormat(stored.element, 0))
