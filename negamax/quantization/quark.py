"""Method "quark" (AMD): one format for all modules, and other formats for named modules.

If the description sets 8-bit activations, some kernels round activations with a scale per token.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from negamax.config.quantization import QuantizationSpec
from negamax.formats.floats import (
    PER_MATRIX,
    PLAIN,
    add_input_scale,
    fp8,
    mxfp4,
    nvfp4,
    use_rounded_activations,
)
from negamax.formats.tensor_format import FLOATS, ONE, ROWS, Known, Role, StoredTensor, TensorFormat
from negamax.quantization.integers import int8_format
from negamax.quantization.scheme import (
    Scheme,
    check_fields,
    check_table,
    is_within,
    read_modules,
    refuse,
)

_E4M3, _CACHE = "fp8_e4m3", "kv_cache_quant_config"
# Values of `algo_config` whose effect is already part of the stored weights.
_FOLDED = ("awq", "autosmoothquant", "gptq", "gptaq", "smooth", "smoothquant")


def read(spec: QuantizationSpec) -> Scheme:
    check_table(spec, "quark")
    export = QuantizationSpec(spec.method, dict(spec.fields.get("export") or {}), "export")
    check_table(export, "quark_export")
    for step in spec.fields.get("algo_config") or ():
        name = step.get("name") if isinstance(step, Mapping) else step
        if name not in _FOLDED:
            refuse(spec, "algo_config", name, ", ".join(_FOLDED))
    layers = spec.fields.get("layer_quant_config") or {}
    if not isinstance(layers, Mapping):
        refuse(spec, "layer_quant_config", layers, "an object of modules")
    # a config lists patterns of the modules with cached outputs in one of these two fields
    cached = (*read_modules(export, "kv_cache_group"), *(spec.fields.get(_CACHE) or ()))

    def is_cached(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in cached)

    listed = [
        ((name,), _layer(spec, f"layer_quant_config.{name}", given, cached=is_cached(name)))
        for name, given in layers.items()
    ]
    others = _layer(spec, "global_quant_config", spec.fields.get("global_quant_config"))
    excluded = read_modules(spec, "exclude")

    def format_of(module: str) -> TensorFormat:
        if is_within(module, excluded):
            return PLAIN
        return next((stored for names, stored in listed if is_within(module, names)), others)

    return Scheme.of((*(stored for _, stored in listed), others), format_of)


def _layer(spec: QuantizationSpec, name: str, given: Any, *, cached: bool = False) -> TensorFormat:
    """Return the format in `given`, the value of field `name`. `cached`: are the outputs cached?"""
    if given is None:
        return PLAIN
    if not isinstance(given, Mapping):
        refuse(spec, name, given, "an object or null")
    fields = QuantizationSpec(spec.method, dict(given), name)
    outputs = given.get("output_tensors")
    check_fields(
        fields,
        {"output_tensors": (outputs if cached else None, {}), "bias": (None, {})},
        beside=("input_tensors", "target_device", "weight"),
    )
    if cached and outputs:
        _check(fields, "output_tensors", outputs, "quark_output")
    weight, inputs = given.get("weight"), given.get("input_tensors")
    if not weight:
        return PLAIN
    if isinstance(weight, Sequence):
        if len(weight) != 2:
            refuse(fields, "weight", weight, "an object, or a list of two for NVFP4")
        _check(fields, "weight", weight[0], "quark_nvfp4")
        _check(fields, "weight", weight[1], "quark_global_scale")
        return nvfp4(input_scale="input_scale_2" if inputs else None)
    if not isinstance(weight, Mapping):
        refuse(fields, "weight", weight, "an object, or a list of two for NVFP4")
    if weight.get("dtype") not in ("fp4", "int8", _E4M3):
        refuse(fields, "weight.dtype", weight.get("dtype"), f"{_E4M3}, fp4, int8")
    is_static = isinstance(inputs, Mapping) and bool(inputs) and not inputs.get("is_dynamic")
    if weight["dtype"] == "fp4":
        _check(fields, "weight", weight, "quark_mxfp4")
        return add_input_scale(mxfp4(), "input_scale") if is_static else mxfp4()
    if weight["dtype"] == "int8":
        _check(fields, "weight", weight, "quark_int8")
        stored = int8(is_static=is_static, by_row=weight["qscheme"] == "per_channel")
    else:
        _check(fields, "weight", weight, "quark_fp8")
        scale = "input_scale" if is_static else None
        is_by_row = weight["qscheme"] == "per_channel"
        name, dims = ("channel", (ROWS,)) if is_by_row else ("tensor", PER_MATRIX)
        stored = fp8(f"fp8_e4m3_{name}", dims, input_scale=scale)
    return use_rounded_activations(stored) if inputs else stored


def _check(spec: QuantizationSpec, name: str, given: Any, table: str) -> None:
    """Check `given`, the value of `name`, against `table` of fields.toml. Raises `ConfigError`."""
    if not isinstance(given, Mapping):
        refuse(spec, name, given, "an object")
    check_table(QuantizationSpec(spec.method, dict(given), f"{spec.source}.{name}"), table)


@cache
def int8(*, is_static: bool, by_row: bool = True) -> TensorFormat:
    """Return the int8 format with a weight_scale per row or matrix. Zero points are all 0."""
    numbers = ("int8", "int32", *FLOATS)
    dim = ROWS if by_row else ONE
    zero_point = StoredTensor(
        "weight_zero_point", Role.ZERO_POINT, numbers, (dim,), optional=True, known=Known.ZEROS
    )
    activations = (
        StoredTensor("input_scale", Role.ACTIVATION, FLOATS, (ONE,), optional=True),
        StoredTensor("input_zero_point", Role.ACTIVATION, numbers, (ONE,), optional=True),
    )
    name = f"quark_int8_{'channel' if by_row else 'tensor'}{'_static' if is_static else ''}"
    return int8_format(name, zero_point, *(activations if is_static else ()), scale=(dim,))
