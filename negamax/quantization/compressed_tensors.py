"""Method "compressed-tensors", as written by LLM Compressor.

  - float-quantized: E4M3 with a scale per output row, block or matrix
  - nvfp4-pack-quantized, mxfp4-pack-quantized, mxfp8-quantized
  - pack-quantized: 2, 4 or 8 bit integers in words, with a scale per group of columns or per row
  - int-quantized: integers of up to 8 bits, one per byte, with a scale per group or per row
  - dense: weights are not quantized, and only the KV cache has scales

If the description sets 8-bit activations, some kernels round activations with a scale per token.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import groupby
from typing import Any

from negamax.config.quantization import QuantizationSpec
from negamax.config.spellings import fill_strategy
from negamax.formats.floats import (
    PER_MATRIX,
    PER_ROW,
    PLAIN,
    add_input_scale,
    fp8,
    mxfp4,
    mxfp8,
    nvfp4,
    use_rounded_activations,
)
from negamax.formats.tensor_format import (
    FLOATS,
    ROWS,
    Axis,
    CodePacking,
    Dim,
    Known,
    Role,
    Rounding,
    StoredTensor,
    TensorFormat,
)
from negamax.quantization.fp8 import fp8_blocks
from negamax.quantization.integers import (
    cache_format,
    group_name,
    group_size,
    int8_format,
    make_group_dim,
    make_group_index,
)
from negamax.quantization.scheme import (
    Scheme,
    check_fields,
    check_kv_cache,
    check_table,
    matches,
    read_modules,
    refuse,
)

_GROUP_ORDERS = ("group", "dynamic", True)  # `actorder` values for which files store group indices


def read(spec: QuantizationSpec) -> Scheme:
    check_table(spec, "compressed_tensors")
    check_fields(spec, {"format": (None, *_FORMATS, "mixed-precision", "dense")})
    check_kv_cache(spec)
    _check_transforms(spec)
    groups = spec.fields.get("config_groups")
    if spec.fields.get("format") == "dense" and not groups:
        return Scheme((), lambda _: PLAIN)
    if not isinstance(groups, Mapping) or not groups:
        refuse(spec, "config_groups", groups, "an object of groups")
    read_groups = [_group(spec, f"config_groups.{name}", group) for name, group in groups.items()]
    by_class = next((stored for names, stored in read_groups if "Linear" in names), PLAIN)
    # As in the compressed-tensors library, exact names are tried before sorted "re:" patterns.
    targets = sorted(
        ((name, stored) for names, stored in read_groups for name in names),
        key=lambda each: each[0] if each[0].startswith("re:") else "",
    )
    by_name = [
        (tuple(name for name, _ in alike), stored)
        for (_, stored), alike in groupby(targets, key=lambda e: (e[0].startswith("re:"), e[1]))
    ]
    ignored = read_modules(spec, "ignore")

    def format_of(module: str) -> TensorFormat:
        if matches(module, ignored):
            return PLAIN
        return next((stored for names, stored in by_name if matches(module, names)), by_class)

    return Scheme.of((stored for _, stored in read_groups), format_of)


def _check_transforms(spec: QuantizationSpec) -> None:
    """Check that all rotations in `transform_config` are folded into the stored weights.

    Raises `ConfigError` for rotations that the running model would have to apply.
    """
    given = spec.fields.get("transform_config") or {}
    transforms = given.get("config_groups") if isinstance(given, Mapping) else None
    if given and not isinstance(transforms, Mapping):
        refuse(spec, "transform_config", given, "an object with config_groups, or null")
    for name, transform in (transforms or {}).items():
        steps = transform.get("apply") if isinstance(transform, Mapping) else None
        where = QuantizationSpec(spec.method, {}, f"transform_config.config_groups.{name}")
        if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
            refuse(where, "apply", steps, "a list of objects")
        for step in steps:
            if step.get("location") not in ("weight_input", "weight_output"):
                refuse(where, "location", step.get("location"), _IN_THE_WEIGHTS)


_IN_THE_WEIGHTS = "weight_input, weight_output (rotations of activations are not supported)"


def _group(spec: QuantizationSpec, name: str, group: Any) -> tuple[tuple[str, ...], TensorFormat]:
    """Return the targets of a group (modules or module classes), and the group's format."""
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        refuse(spec, name, group, "an object with weights")
    fields = QuantizationSpec(spec.method, {"format": None, **group}, name)
    check_fields(
        fields,
        {"output_activations": (None,), "format": (None, *_FORMATS)},
        beside=("targets", "weights", "input_activations"),
    )
    weights = QuantizationSpec(spec.method, fill_strategy(group["weights"]), f"{name}.weights")
    stored_as = str(group.get("format") or spec.fields.get("format"))
    if stored_as not in _FORMATS:
        refuse(fields, "format", stored_as, ", ".join(_FORMATS))
    stored, inputs = _FORMATS[stored_as](weights), group.get("input_activations")
    is_dynamic = isinstance(inputs, Mapping) and inputs.get("dynamic") is True
    if inputs is not None and not is_dynamic:
        if stored_as not in _INPUT_SCALES or not isinstance(inputs, Mapping):
            refuse(fields, "input_activations", inputs, "null or dynamic activations")
        stored = add_input_scale(stored, _INPUT_SCALES[stored_as])
    if isinstance(inputs, Mapping) and inputs.get("num_bits") == 8:
        same = inputs.get("type") in (None, weights.fields.get("type"))
        stored = use_rounded_activations(stored) if same else stored
    return read_modules(fields, "targets"), stored


# --- float-quantized -----------------------------------------------------------------------------


STRATEGIES = {
    "channel": fp8("fp8_e4m3_channel", PER_ROW),
    "tensor": fp8("fp8_e4m3_tensor", PER_MATRIX),
}


def _read_e4m3(weights: QuantizationSpec) -> TensorFormat:
    check_table(weights, "compressed_e4m3")
    strategy = str(weights.fields.get("strategy"))
    if strategy == "block":
        return fp8_blocks(weights, "block_structure")
    check_fields(weights, {"block_structure": (None,)})
    return STRATEGIES[strategy]


# --- nvfp4-pack-quantized, mxfp4-pack-quantized, mxfp8-quantized ---------------------------------

_NVFP4 = nvfp4(values="weight_packed", global_scale="weight_global_scale", divides=True)


def _read_floats(weights: QuantizationSpec, *, stored: TensorFormat, table: str) -> TensorFormat:
    check_table(weights, table)
    return stored


# --- pack-quantized ------------------------------------------------------------------------------


@cache_format
def packed(
    bits: int, size: int, *, symmetric: bool = True, is_stored_order: bool = False
) -> TensorFormat:
    """Return the format of integers, stored as number + 2^(bits - 1) in words along columns.

    Each group of `size` columns of a row (-1: all columns) has a scale. If `symmetric` is false,
    each group also has a zero point.
    """
    group, word = make_group_dim(size), 32 // bits
    tensors = [
        StoredTensor("weight_packed", Role.VALUES, ("int32",), (ROWS, Dim(Axis.COLUMNS, word))),
        StoredTensor("weight_scale", Role.SCALE, FLOATS, (ROWS, group)),
        StoredTensor(
            "weight_shape", Role.SHAPE, ("int64", "int32"), (Dim(Axis.FIXED, 2),), known=Known.SHAPE
        ),
    ]
    if not symmetric:
        dims = (Dim(Axis.ROWS, word), group)
        zero_point = StoredTensor("weight_zero_point", Role.ZERO_POINT, ("int32",), dims)
        tensors.append(zero_point)
    if is_stored_order:
        order = make_group_index("weight_g_idx", size, is_stored_order=True, optional=False)
        tensors.append(order)

    element = f"int{bits}" if symmetric else f"uint{bits}"
    order_name = "_act_order" if is_stored_order else ""
    return TensorFormat(
        f"packed_{element}_{group_name(size)}{order_name}",
        element,
        tuple(tensors),
        CodePacking.WORDS,
        rounding=Rounding() if symmetric and not is_stored_order else None,
        regroup=None if size == -1 else lambda columns: packed(bits, columns, symmetric=symmetric),
    )


def _read_packed(weights: QuantizationSpec) -> TensorFormat:
    is_grouped = weights.fields.get("strategy") == "group"
    check_table(weights, "compressed_packed_groups" if is_grouped else "compressed_packed")
    return packed(
        int(weights.fields["num_bits"]),
        group_size(weights) if is_grouped else -1,
        symmetric=weights.fields["symmetric"],
        is_stored_order=weights.fields.get("actorder") in _GROUP_ORDERS,
    )


# --- int-quantized -------------------------------------------------------------------------------


@cache
def int8(size: int) -> TensorFormat:
    """Return the int8 format with a scale per row and group of `size` columns (-1: all columns)."""
    return int8_format(
        f"int8_{group_name(size)}",
        scale=(ROWS, make_group_dim(size)),
        rounding=Rounding() if size == -1 else None,
        regroup=None if size == -1 else int8,
    )


INT8_CHANNEL = int8(-1)


def _read_int8(weights: QuantizationSpec) -> TensorFormat:
    is_grouped = weights.fields.get("strategy") == "group"
    check_table(weights, "compressed_int8")
    return int8(group_size(weights) if is_grouped else -1)


# To add a format of this method, write a reader and add the reader to this table.
_FORMATS: Mapping[str, Callable[[QuantizationSpec], TensorFormat]] = {
    "float-quantized": _read_e4m3,
    "nvfp4-pack-quantized": partial(_read_floats, stored=_NVFP4, table="compressed_nvfp4"),
    "mxfp4-pack-quantized": partial(
        _read_floats, stored=mxfp4(values="weight_packed"), table="compressed_mxfp4"
    ),
    "mxfp8-quantized": partial(_read_floats, stored=mxfp8(), table="compressed_mxfp8"),
    "pack-quantized": _read_packed,
    "int-quantized": _read_int8,
}
# Format -> tensor name of the scale of static activations.
_INPUT_SCALES = {"float-quantized": "input_scale", "nvfp4-pack-quantized": "input_global_scale"}
