"""Method "awq": AutoAWQ's layout "gemm", 4 bits with a zero point per group of columns."""

from functools import cache

from negamax.config.quantization import QuantizationSpec
from negamax.formats.tensor_format import (
    COLUMNS,
    FLOATS,
    ROWS,
    Axis,
    CodePacking,
    Dim,
    Role,
    StoredTensor,
    TensorFormat,
)
from negamax.quantization.integers import group_name, group_size, make_group_dim
from negamax.quantization.scheme import Scheme, check_table, read_modules

_WORD = Dim(Axis.ROWS, 8)  # an entry is a 32-bit word with 4-bit numbers of eight rows


@cache
def awq(size: int) -> TensorFormat:
    """Return AWQ's format, with a scale per row and group of `size` columns (-1: all columns).

    A value is (number - zero point) * scale. All tensors are transposed. A 32-bit word contains the
    values of eight rows in AWQ's order.
    """
    group = make_group_dim(size)
    return TensorFormat(
        f"awq_uint4_{group_name(size)}",
        "uint4",
        (
            StoredTensor("qweight", Role.VALUES, ("int32",), (COLUMNS, _WORD)),
            StoredTensor("qzeros", Role.ZERO_POINT, ("int32",), (group, _WORD)),
            StoredTensor("scales", Role.SCALE, FLOATS, (group, ROWS)),
        ),
        CodePacking.AWQ_WORDS,
        regroup=None if size == -1 else awq,
    )


def read(spec: QuantizationSpec) -> Scheme:
    check_table(spec, "awq")
    stored = awq(group_size(spec))
    # The head is never quantized. If `zero_point` is false, all stored zero points are 8.
    return Scheme.uniform(stored, (*read_modules(spec, "modules_to_not_convert"), "lm_head"))
