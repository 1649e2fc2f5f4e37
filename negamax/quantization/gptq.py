"""Method "gptq" (AutoGPTQ, GPTQModel): 2, 4 or 8 bits with zero points per group of columns.

Version 1 stores each zero point minus 1. Version 2 stores zero points unchanged.
"""

import re
from collections.abc import Iterator, Mapping

from negamax.config.quantization import QuantizationSpec, compile_pattern
from negamax.formats.floats import PLAIN
from negamax.formats.tensor_format import (
    FLOATS,
    ROWS,
    Axis,
    CodePacking,
    Dim,
    Role,
    StoredTensor,
    TensorFormat,
)
from negamax.quantization.integers import (
    PACKED_BITS,
    cache_format,
    group_name,
    group_size,
    make_group_dim,
    make_group_index,
    read_names,
)
from negamax.quantization.scheme import (
    Scheme,
    check_fields,
    check_table,
    is_within,
    refuse,
    spellings,
)

_VERSIONS = {None: 1, "gptq": 1, "gptq_v2": 2}


@cache_format
def gptq(bits: int, size: int, *, version: int, is_stored_order: bool = False) -> TensorFormat:
    """Return GPTQ's format, with a scale per row and group of `size` columns (-1: all columns).

    A value is (number - zero point) * scale. All tensors are transposed. A 32-bit word contains the
    values of adjacent columns, or the zero points of adjacent rows. With `is_stored_order`
    (desc_act), g_idx assigns columns to groups.
    """
    group, word = make_group_dim(size), 32 // bits

    order = "_act_order" if is_stored_order else ""
    return TensorFormat(
        f"gptq_v{version}_uint{bits}_{group_name(size)}{order}",
        f"uint{bits}",
        (
            StoredTensor("qweight", Role.VALUES, ("int32",), (Dim(Axis.COLUMNS, word), ROWS)),
            StoredTensor("qzeros", Role.ZERO_POINT, ("int32",), (group, Dim(Axis.ROWS, word))),
            StoredTensor("scales", Role.SCALE, FLOATS, (group, ROWS)),
            make_group_index("g_idx", size, is_stored_order=is_stored_order, optional=True),
        ),
        CodePacking.WORDS,
        zero_offset=1 if version == 1 else 0,
        regroup=None if size == -1 else lambda columns: gptq(bits, columns, version=version),
    )


def read(spec: QuantizationSpec) -> Scheme:
    check_table(spec, "gptq")
    version = _VERSIONS[spec.fields.get("checkpoint_format") or spec.fields.get("format")]
    usual = _format(spec, version)
    rules = [
        (pattern, PLAIN if is_skipped else _format(changed, version))
        for is_skipped, pattern, changed in _rules(spec)
    ]
    within = read_names(spec, "modules_in_block_to_quantize")
    has_head = spec.fields.get("lm_head") is True

    def format_of(module: str) -> TensorFormat:
        for pattern, stored in rules:
            if any(map(pattern.match, spellings(module, pattern))):
                return stored
        if is_within(module, ("lm_head",)):
            return usual if has_head else PLAIN
        return usual if not within or is_within(module, within) else PLAIN

    return Scheme.of((usual, *(stored for _, stored in rules)), format_of)


def _format(spec: QuantizationSpec, version: int) -> TensorFormat:
    check_fields(spec, {"bits": PACKED_BITS, "desc_act": (None, False, True)})
    return gptq(
        int(spec.fields["bits"]),
        group_size(spec),
        version=version,
        is_stored_order=bool(spec.fields.get("desc_act")),
    )


def _rules(spec: QuantizationSpec) -> Iterator[tuple[bool, re.Pattern[str], QuantizationSpec]]:
    """Yield (excludes modules, pattern, changed `spec`) for each rule in GPTQModel's `dynamic`.

    Only the first rule that matches a module applies. Modules that match a rule with the prefix
    "-:" are not quantized.
    """
    rules = spec.fields.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        refuse(spec, "dynamic", rules, "an object of rules")
    for pattern, changes in rules.items():
        name = f"dynamic[{pattern!r}]"
        try:
            expression = compile_pattern(pattern.removeprefix("+:").removeprefix("-:"))
        except re.error as error:
            refuse(spec, name, str(error), "a regular expression")
        if not isinstance(changes or {}, Mapping):
            refuse(spec, name, changes, "an object of fields")
        changed = QuantizationSpec(spec.method, dict(changes or {}), f"{spec.source}, {name}")
        is_skipped = pattern.startswith("-:")
        if not is_skipped:
            check_table(changed, "gptq_rule")
        whole = QuantizationSpec(spec.method, {**spec.fields, **changed.fields}, changed.source)
        yield is_skipped, expression, whole
