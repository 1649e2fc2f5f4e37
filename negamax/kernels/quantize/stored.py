"""Decode the stored tensors of a matrix, and encode a matrix, as its `TensorFormat` defines."""

from collections.abc import Mapping

import torch
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.formats.floats import E2M1, E4M3_FNUZ, E4M3_MAX, E8M0
from negamax.formats.tensor_format import (
    Axis,
    CodePacking,
    GlobalScale,
    Known,
    Role,
    StoredTensor,
    TensorFormat,
)
from negamax.kernels.quantize.codes import Codes
from negamax.kernels.quantize.packing import AWQ_ORDER, nibbles, pack, pack_nibbles, unpack
from negamax.kernels.quantize.quantizers import (
    to_e2m1,
    to_e2m1_powers,
    to_e4m3,
    to_e4m3_powers,
    to_integers,
)


def dequantize(stored: TensorFormat, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the matrix [..., rows, columns] fp32 that is stored in the named `tensors`."""
    return decode(stored, tensors).dequantize()


def decode(stored: TensorFormat, tensors: Mapping[str, Tensor]) -> Codes:
    """Return the codes of the stored matrix [..., rows, columns], one code per element."""
    values, spec = _unpack(stored, tensors), stored.find(Role.SCALE)
    if spec is None:
        return Codes(values)
    rows, columns = _block(spec)
    scale = _scale(stored, spec, tensors)
    if stored.packing is CodePacking.ENTRIES:
        # the scale tensor has one scale, or one per row of stacked matrices or group of rows
        groups = -(-values.shape[-1] // columns) if columns else 1
        scale = scale.reshape(*values.shape[:-2], -1, groups)
    zeros, zero_point = stored.find(Role.ZERO_POINT), None
    is_words = stored.packing in (CodePacking.WORDS, CodePacking.AWQ_WORDS)
    if is_words:
        values = values[..., : scale.shape[-2], :]
    if zeros is not None:
        zero_point = tensors[zeros.name]
        if is_words:
            zero_point = _unpack_words(stored, zeros, tensors, Axis.ROWS)
            zero_point = zero_point[..., : scale.shape[-2], :]
        zero_point = zero_point + stored.zero_offset if stored.zero_offset else zero_point
    elif values.dtype is torch.uint8 and stored.element != E2M1:  # bytes store code + 2^(bits - 1)
        values = values.sub_(1 << _bits(stored) - 1).view(torch.int8)
    order, whole = stored.find(Role.PERMUTATION), stored.find(Role.SCALE, level=2)
    global_scale = None
    if whole is not None and stored.global_scale is not GlobalScale.IS_INCLUDED:
        global_scale = tensors[whole.name].float()
        if stored.global_scale is GlobalScale.DIVIDES:
            global_scale = global_scale.reciprocal()
    return Codes(
        values,
        scale,
        (rows or 1, columns or 1),
        zero_point=zero_point,
        global_scale=global_scale,
        group_of=None if order is None else tensors[order.name],
        is_e2m1=stored.element == E2M1,
    )


def encode(stored: TensorFormat, matrix: Tensor) -> dict[str, Tensor]:
    """Quantize matrix [rows, columns] fp32 to the tensors of `stored`, by name."""
    codes = _round(stored, matrix)
    values, scale = codes.values, codes.scale
    spec, whole = stored.find(Role.SCALE), stored.find(Role.SCALE, level=2)
    assert scale is not None and spec is not None
    if stored.packing is CodePacking.NIBBLES:
        values = pack_nibbles(values)
    elif stored.packing is CodePacking.WORDS:
        bits = _bits(stored)
        values = pack(values.int() + (1 << bits - 1), bits)
    elif _is_transposed(stored.values):
        values = values.T.contiguous()
    if spec.dtypes == E8M0:
        scale = scale.view(torch.uint8)
    elif scale.dtype is torch.float8_e8m0fnu:
        scale = scale.float()
    height, width = matrix.shape
    scale = scale.T.contiguous() if _is_transposed(spec) else scale
    made = {stored.values.name: values, spec.name: scale.reshape(spec.shape((height, width)))}
    if whole is not None:
        assert codes.global_scale is not None
        divides = stored.global_scale is GlobalScale.DIVIDES
        made[whole.name] = codes.global_scale.reciprocal() if divides else codes.global_scale
    return made | {t.name: known_entries(t, (height, width)) for t in stored.tensors if t.known}


def check_entries(
    stored: StoredTensor,
    found: Tensor,
    part: tuple[range, ...],
    shape: tuple[int, int],
    *,
    name: str,
) -> None:
    """Check part `part` of the tensor `name`. Raises `CheckpointError` for invalid entries."""
    groups = 0
    if stored.group:
        groups = 1 if stored.group == -1 else -(-shape[1] // stored.group)
    if groups and not ((found >= 0) & (found < groups)).all():
        raise CheckpointError(
            f"tensor {name} has entries from {found.min()} to {found.max()}; a matrix of "
            f"{shape[0]} x {shape[1]} needs entries from 0 to {groups - 1}",
            hint="the checkpoint is broken; download it again",
        )
    if stored.known is not None:
        whole = known_entries(stored, shape)
        expected = whole[tuple(slice(each.start, each.stop) for each in part)]
        if not (found == expected).all():
            raise CheckpointError(
                f"tensor {name} contains {_first(found)}; the {stored.role.value} of a matrix of "
                f"{shape[0]} x {shape[1]} must be {_first(expected)}",
                hint="config.json and the weights are from different models",
            )


def known_entries(stored: StoredTensor, shape: tuple[int, int]) -> Tensor:
    """Return the only valid entries of the tensor `stored` for a matrix of `shape`."""
    if stored.known is Known.SHAPE:
        return torch.tensor(shape)
    if stored.known is Known.ZEROS:
        return torch.zeros(stored.shape(shape))
    assert stored.known is Known.GROUPS_IN_ORDER, stored
    return torch.arange(shape[1]) // (shape[1] if stored.group == -1 else stored.group)


def _unpack(stored: TensorFormat, tensors: Mapping[str, Tensor]) -> Tensor:
    values = tensors[stored.values.name]
    if stored.packing is CodePacking.NIBBLES:
        return nibbles(values)
    if stored.packing is CodePacking.ROW_PAIRS:
        return torch.stack((values << 4 >> 4, values >> 4), -2).flatten(-3, -2)
    if stored.packing is not CodePacking.ENTRIES:
        axis = Axis.ROWS if stored.packing is CodePacking.AWQ_WORDS else Axis.COLUMNS
        return _unpack_words(stored, stored.values, tensors, axis)
    if stored.element == E4M3_FNUZ:
        values = values.view(torch.float8_e4m3fnuz)
    return values.mT.contiguous() if _is_transposed(stored.values) else values


def _unpack_words(
    stored: TensorFormat, spec: StoredTensor, tensors: Mapping[str, Tensor], axis: Axis
) -> Tensor:
    """Unpack a tensor, whose words pack numbers along `axis`, to numbers [..., rows, columns]."""
    at, is_awq = spec.axis(axis), stored.packing is CodePacking.AWQ_WORDS
    assert at is not None
    numbers = unpack(
        tensors[spec.name],
        _bits(stored),
        axis=at - len(spec.dims),
        order=AWQ_ORDER if is_awq else (),
    )
    return numbers.mT if _is_transposed(spec) else numbers


def _scale(stored: TensorFormat, spec: StoredTensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the block scales that multiply codes; 2-D scales are [..., rows, columns]."""
    scale = tensors[spec.name]
    if spec.dtypes == E8M0:
        return scale.view(torch.float8_e8m0fnu)
    if stored.global_scale is GlobalScale.IS_INCLUDED:
        whole = stored.find(Role.SCALE, level=2)
        assert whole is not None
        # checkpoints of fp16 models store the bits of fp32 scales as int64
        scale = scale.int().view(torch.float32) if scale.dtype is torch.int64 else scale
        return scale / tensors[whole.name]
    if _is_transposed(spec):
        return scale.mT.contiguous() if stored.packing is CodePacking.ENTRIES else scale.mT
    return scale


def _round(stored: TensorFormat, matrix: Tensor) -> Codes:
    """Round a matrix [rows, columns] fp32 to the nearest codes."""
    rounding, spec = stored.rounding, stored.find(Role.SCALE)
    assert rounding is not None and spec is not None, f"{stored.name} cannot be written"
    rows, columns = (size or whole for size, whole in zip(_block(spec), matrix.shape, strict=True))
    if stored.element == E2M1:
        return to_e2m1_powers(matrix, columns) if rounding.to_powers else to_e2m1(matrix, columns)
    if stored.element.startswith("int"):
        # the tools that pack codes into words write bf16 scales
        dtype = torch.float32 if stored.packing is CodePacking.ENTRIES else torch.bfloat16
        return to_integers(matrix, _bits(stored), columns, scale_dtype=dtype)
    if rounding.to_powers:
        return to_e4m3_powers(matrix, columns, rows=rows)
    dtype = torch.float8_e4m3fnuz if stored.element == E4M3_FNUZ else torch.float8_e4m3fn
    return to_e4m3(matrix, (rows, columns), largest=rounding.largest or E4M3_MAX, dtype=dtype)


def _block(scale: StoredTensor) -> tuple[int, int]:
    """Return the numbers of rows and columns that share a scale; 0 means all."""
    rows, columns = (
        max((dim.unit for dim in scale.dims if dim.axis is axis), default=0)
        for axis in (Axis.ROWS, Axis.COLUMNS)
    )
    return rows, columns


def _bits(stored: TensorFormat) -> int:
    return int(stored.element.removeprefix("u").removeprefix("int"))


def _is_transposed(spec: StoredTensor) -> bool:
    return len(spec.dims) > 1 and spec.dims[-1].axis is Axis.ROWS


def _first(numbers: Tensor) -> str:
    """Format the first six numbers for an error message."""
    shown = ", ".join(str(number) for number in numbers.flatten()[:6].tolist())
    return f"[{shown}{', ...' if numbers.numel() > 6 else ''}]"
