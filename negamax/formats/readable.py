"""Functions for `Kernel.reads`, which decide whether a kernel reads a format directly."""

from negamax.formats.floats import E2M1, E4M3, E4M3_BLOCKS
from negamax.formats.platform import Feature, Platform
from negamax.formats.tensor_format import ActivationFormat, Axis, Role, TensorFormat

_PACKED = ("uint4", "int4", E2M1, "uint8", "int8", E4M3)
_PACKED_GROUPS = frozenset({16, 32, 64, 128})  # columns per scale that weight-only kernels support


def reads_e4m3_blocks(stored: TensorFormat) -> bool:
    """Return whether a format (with any names) is E4M3 with fp32 scales of 128 x 128 blocks."""
    return stored.element == E4M3 and [
        (tensor.dtypes[0], tensor.dims) for tensor in stored.tensors if tensor.is_kept
    ] == [(tensor.dtypes[0], tensor.dims) for tensor in E4M3_BLOCKS.tensors]


def reads_packed(stored: TensorFormat) -> bool:
    """Return whether weight-only kernels read the elements and scales of `stored` directly."""
    scales = [t for t in stored.tensors if t.role is Role.SCALE and t.level == 1]
    groups = {dim.unit for t in scales for dim in t.dims if dim.axis is Axis.COLUMNS}
    return (
        stored.element in _PACKED
        and not stored.permuted
        and len(scales) == 1
        and groups <= _PACKED_GROUPS
    )


def reads_w8a8(stored: TensorFormat, *, element: str) -> bool:
    """Return whether weights (one scale per row) and activations (one per token) are `element`."""
    return stored.activation == ActivationFormat(element, 0) and reads_packed(stored)


def is_kept(stored: TensorFormat, platform: Platform) -> bool:
    """Return whether the kernels of `platform` read this format without conversion.

    If tensor cores cannot multiply the elements, weight-only kernels multiply in the compute dtype.
    """
    return Feature.TRITON in platform.features and stored.stacks and reads_packed(stored)
