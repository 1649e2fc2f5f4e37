"""Method "modelopt" (NVIDIA Model Optimizer).

One algorithm applies to all modules that are not excluded. For MIXED_PRECISION, the description
lists an algorithm per module. If the algorithm is null, no module is quantized, but the KV cache
may have scales. The description is in config.json, or in hf_quant_config.json under "quantization".

Most algorithms also round activations. For FP8 weights with a scale per matrix or row, kernels may
round activations with a scale per token. For other formats, activations stay in the compute dtype.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from negamax.config.quantization import QuantizationSpec
from negamax.formats.floats import (
    E4M3_GROUP,
    MX_GROUP,
    NVFP4_GROUP,
    PER_MATRIX,
    PLAIN,
    add_input_scale,
    fp8,
    mxfp4,
    mxfp8,
    nvfp4,
    use_rounded_activations,
)
from negamax.formats.tensor_format import ONE, ROWS, Axis, Dim, TensorFormat
from negamax.quantization.integers import int8_format
from negamax.quantization.scheme import (
    Scheme,
    check_fields,
    check_kv_cache,
    check_table,
    is_within,
    make_lookup,
    read_modules,
    refuse,
)

_BLOCKS = Dim(Axis.ROWS, E4M3_GROUP), ONE, Dim(Axis.COLUMNS, E4M3_GROUP), ONE
# Algorithm -> format and allowed group sizes.
ALGORITHMS: Mapping[str, tuple[TensorFormat, tuple[int | None, ...]]] = {
    "FP8": (
        use_rounded_activations(fp8("fp8_e4m3_tensor", PER_MATRIX, input_scale="input_scale")),
        (None,),
    ),
    "FP8_PER_CHANNEL_PER_TOKEN": (
        use_rounded_activations(fp8("fp8_e4m3_channel", (ROWS,))),
        (None,),
    ),
    "FP8_PB_WO": (fp8("fp8_e4m3_block_128x128", _BLOCKS), (None, E4M3_GROUP)),
    "NVFP4": (nvfp4(input_scale="input_scale"), (None, NVFP4_GROUP)),
    "W4A16_NVFP4": (nvfp4(), (None, NVFP4_GROUP)),
    "MXFP8": (mxfp8(), (None, MX_GROUP)),
    "MXFP4": (mxfp4(), (None, MX_GROUP)),
    "W4A8_MXFP4_FP8": (add_input_scale(mxfp4(), "input_scale"), (None, MX_GROUP)),
    "W8A16": (int8_format("modelopt_int8_channel"), (None,)),
}
_MIXED = "MIXED_PRECISION"


def read(spec: QuantizationSpec) -> Scheme:
    inner = spec.fields.get("quantization")
    if isinstance(inner, Mapping):
        check_fields(spec, {}, beside=("producer", "quant_method", "quantization"))
        spec = QuantizationSpec(spec.method, dict(inner), spec.source)
    algorithm = _upper(spec.fields.get("quant_algo"))
    is_plain = algorithm is None and "quant_algo" in spec.fields
    spec = replace(spec, fields={**spec.fields, "quant_algo": algorithm})
    check_table(spec, "modelopt")
    check_fields(spec, {"quant_algo": (*ALGORITHMS, _MIXED, *((None,) if is_plain else ()))})
    check_kv_cache(spec)
    if is_plain:
        return Scheme((), lambda _: PLAIN)
    excluded = read_modules(spec, "exclude_modules", "ignore")
    if algorithm != _MIXED:
        stored = _format(replace(spec, fields={**_group_size(spec), **spec.fields}))
        return Scheme.uniform(stored, excluded)
    listed = _listed(spec)
    find = make_lookup(listed)
    return Scheme.of(
        listed.values(),
        lambda module: PLAIN if is_within(module, excluded) else find(module) or PLAIN,
    )


def _listed(spec: QuantizationSpec) -> dict[str, TensorFormat]:
    layers = spec.fields.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        refuse(spec, "quantized_layers", layers, "an object with an entry per module")
    listed = {}
    for module, given in layers.items():
        if not isinstance(given, Mapping):
            refuse(spec, f"quantized_layers.{module}", given, "an object")
        fields = {**given, "quant_algo": _upper(given.get("quant_algo"))}
        one = QuantizationSpec(spec.method, fields, f"quantized_layers.{module}")
        check_fields(one, {"quant_algo": tuple(ALGORITHMS)}, beside=("group_size",))
        listed[module] = _format(one)
    return listed


def _format(spec: QuantizationSpec) -> TensorFormat:
    stored, sizes = ALGORITHMS[spec.fields["quant_algo"]]
    check_fields(spec, {"group_size": sizes})
    return stored


def _group_size(spec: QuantizationSpec) -> dict[str, Any]:
    groups = spec.fields.get("config_groups")
    given = groups.values() if isinstance(groups, Mapping) else ()
    weights = [group.get("weights") for group in given if isinstance(group, Mapping)]
    sizes = [w["group_size"] for w in weights if isinstance(w, Mapping) and "group_size" in w]
    return {"group_size": sizes[0]} if sizes else {}


def _upper(algorithm: Any) -> Any:
    return algorithm.upper() if isinstance(algorithm, str) else algorithm
