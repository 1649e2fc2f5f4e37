"""Method "auto-round" (Intel).

Integer weights are stored as in GPTQ or AWQ, and FP4 and MX weights as in compressed-tensors. FP8
has a scale per row, matrix or block. The number of bits may differ between modules.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from negamax.config.quantization import QuantizationSpec, compile_pattern
from negamax.config.spellings import find_data_type
from negamax.formats.floats import (
    MX_GROUP,
    NVFP4_GROUP,
    PER_MATRIX,
    PLAIN,
    fp8,
    mxfp4,
    mxfp8,
    use_rounded_activations,
)
from negamax.formats.tensor_format import ROWS, TensorFormat
from negamax.quantization.awq import awq
from negamax.quantization.fp8 import PACKED_NVFP4, fp8_blocks
from negamax.quantization.gptq import gptq
from negamax.quantization.integers import PACKED_BITS, group_size, read_names
from negamax.quantization.scheme import (
    Scheme,
    canonicalize,
    check_fields,
    check_table,
    read_fields,
    refuse,
    spellings,
)

_GPTQ, _AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
# Layout -> allowed bits, function of (bits, group size) that returns the format. The layout
# "auto_round" is GPTQ with unshifted zero points.
_PACKINGS: Mapping[str, tuple[tuple[int, ...], Callable[[int, int], TensorFormat]]] = {
    _GPTQ: (PACKED_BITS, lambda bits, size: gptq(bits, size, version=1)),
    _AWQ: ((4,), lambda bits, size: awq(size)),
    "auto_round": (PACKED_BITS, lambda bits, size: gptq(bits, size, version=2)),
    "auto_round:gptqmodel": (PACKED_BITS, lambda bits, size: gptq(bits, size, version=2)),
}
# Group size in an FP8 config -> format: -1 means a scale per row, 0 means a scale per matrix.
_FP8 = {
    -1: fp8("fp8_e4m3_channel", (ROWS,), input_scale="input_scale"),
    0: fp8("fp8_e4m3_tensor", PER_MATRIX, input_scale="input_scale"),
}
# (data type, bits) -> (format, number of columns that share a scale).
_FLOATS: Mapping[tuple[str, int], tuple[TensorFormat, int]] = {
    ("mx_fp", 4): (mxfp4(values="weight_packed"), MX_GROUP),
    ("mx_fp", 8): (mxfp8(), MX_GROUP),
    ("nv_fp", 4): (PACKED_NVFP4, NVFP4_GROUP),
}
_WEIGHTS_ONLY, _ = read_fields("weights_only")
_PLAIN_BITS = 16  # Modules with 16 or more bits are not quantized.
_META = frozenset("*+?^$|()[]{}\\")  # Regular expression characters that no module name contains.


def read(spec: QuantizationSpec) -> Scheme:
    spec = QuantizationSpec(spec.method, {"packing_format": _GPTQ, **spec.fields}, spec.source)
    check_table(spec, "auto_round")
    usual = _format(spec)
    by_name: dict[str, TensorFormat] = {}
    by_expression: list[tuple[re.Pattern[str], TensorFormat]] = []
    extra = spec.fields.get("extra_config") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(e, Mapping) for e in extra.values()):
        refuse(spec, "extra_config", extra, "an object whose values are objects")
    for name, changes in extra.items():
        where = f"{spec.source}, extra_config[{name!r}]"
        stored = _format(QuantizationSpec(spec.method, {**spec.fields, **changes}, where))
        if not _META.intersection(name):
            by_name[canonicalize(name)] = stored
            continue
        try:
            by_expression.append((compile_pattern(name), stored))
        except re.error as error:
            refuse(spec, f"extra_config[{name!r}]", str(error), "module names or valid patterns")
    blocks = _blocks(spec)

    def format_of(module: str) -> TensorFormat:
        name = canonicalize(module)
        if name in by_name:
            return by_name[name]
        for expression, stored in by_expression:
            if any(map(expression.search, spellings(module, expression))):
                return stored
        return usual if f"{name}.".startswith(blocks) else PLAIN

    found = (usual, *by_name.values(), *(stored for _, stored in by_expression))
    return Scheme.of(found, format_of)


def _format(spec: QuantizationSpec) -> TensorFormat:
    bits = spec.fields.get("bits")
    if type(bits) is int and bits >= _PLAIN_BITS:
        return PLAIN
    data_type = find_data_type(spec.fields.get("data_type"))
    if data_type in ("fp", *(name for name, _ in _FLOATS)):
        return _floats(spec, data_type)
    spec = replace(spec, fields={**spec.fields, "data_type": data_type})
    check_fields(spec, {"packing_format": tuple(_PACKINGS), **_WEIGHTS_ONLY})
    allowed, make = _PACKINGS[spec.fields["packing_format"]]
    check_fields(spec, {"bits": allowed})
    return make(int(spec.fields["bits"]), group_size(spec))


def _floats(spec: QuantizationSpec, data_type: str) -> TensorFormat:
    """Return the format of FP8, FP4 or MX weights. The scheme may also quantize activations."""
    known = {
        **_WEIGHTS_ONLY, "data_type": (spec.fields["data_type"],),
        "static_attention_dtype": (None, "fp8"),
    }  # fmt: skip
    check_fields(spec, {name: known[name] for name in known if name != "act_bits"})
    if data_type != "fp":
        check_fields(spec, {"bits": tuple(bits for name, bits in _FLOATS if name == data_type)})
        stored, columns = _FLOATS[data_type, int(spec.fields["bits"])]
        check_fields(spec, {"group_size": (columns,)})
        return stored
    check_fields(spec, {"bits": (8,)})
    size = spec.fields.get("group_size")
    if isinstance(size, list):
        return fp8_blocks(spec, "group_size", scale_name="weight_scale_inv")
    if size not in _FP8:
        refuse(spec, "group_size", size, "-1 (per row), 0 (per matrix), or the sizes of a block")
    is_rounded = spec.fields.get("act_bits") == 8
    return use_rounded_activations(_FP8[size]) if is_rounded else _FP8[size]


def _blocks(spec: QuantizationSpec) -> tuple[str, ...]:
    """Return the prefixes of quantized modules. By default all layers are quantized."""
    fields = ("quant_block_list", "block_name_to_quantize", "to_quant_block_names")
    field = next((name for name in fields if spec.fields.get(name)), fields[1])
    names = spec.fields.get(field) or "layers"
    names = names.split(",") if isinstance(names, str) else read_names(spec, field)
    return tuple(f"{canonicalize(name.strip())}." for name in names)
