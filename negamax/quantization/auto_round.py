"""Method "auto-round", Intel's: integers in the layouts of GPTQ or AWQ, with other bits or none for
single modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from negamax.config.quantization import QuantizationSpec
from negamax.kernels.formats import PLAIN, TensorFormat
from negamax.quantization.awq import awq
from negamax.quantization.gptq import gptq
from negamax.quantization.integers import PACKED_BITS, group_size
from negamax.quantization.scheme import Scheme, canonical, check_fields, refuse, spellings

_GPTQ, _AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
# The layout's name -> the bits that it has and the format; without its suffix it is GPTQ with zero
# points as they are.
_PACKINGS: Mapping[str, tuple[tuple[int, ...], Callable[[int, int], TensorFormat]]] = {
    _GPTQ: (PACKED_BITS, lambda bits, size: gptq(bits, size, version=1)),
    _AWQ: ((4,), lambda bits, size: awq(size)),
    "auto_round": (PACKED_BITS, lambda bits, size: gptq(bits, size, version=2)),
    "auto_round:gptqmodel": (PACKED_BITS, lambda bits, size: gptq(bits, size, version=2)),
}
_PLAIN_BITS = 16  # from here on a module is stored plain
# How the numbers were found, and options of other readers.
_OF_THE_QUANTISER = (
    "amp", "autoround_version", "backend", "batch_size", "dataset", "enable_alg_ext",
    "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input",
    "gradient_accumulate_steps", "iters", "low_gpu_mem_usage", "lr", "minmax_lr", "model_dtype",
    "model_free", "nsamples", "scale_dtype", "seqlen",
)  # fmt: skip
_META = frozenset("*+?^$|()[]{}\\")  # of a regular expression, which no name of a module has
_ACTIVATIONS = ("act_bits", "act_data_type", "act_dynamic", "act_group_size", "act_sym")


def read(spec: QuantizationSpec) -> Scheme:
    """Errors: `ConfigError` for what is stored in another way."""
    spec = QuantizationSpec(spec.method, {"packing_format": _GPTQ, **spec.fields}, spec.source)
    check_fields(
        spec,
        {"packing_format": tuple(_PACKINGS), "rotation_config": (None, {})},
        beside=(
            "bits", "block_name_to_quantize", "data_type", "extra_config", "group_size",
            "quant_method", "super_bits", "super_group_size", "sym", "to_quant_block_names",
            *_ACTIVATIONS, *_OF_THE_QUANTISER,
        ),
    )  # fmt: skip
    usual = _format(spec)
    by_name: dict[str, TensorFormat] = {}
    by_expression: list[tuple[re.Pattern[str], TensorFormat]] = []
    extra = spec.fields.get("extra_config") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(e, Mapping) for e in extra.values()):
        refuse(spec, "extra_config", extra, "an object of objects")
    for name, changes in extra.items():
        where = f"{spec.source}, extra_config[{name!r}]"
        stored = _format(QuantizationSpec(spec.method, {**spec.fields, **changes}, where))
        if not _META.intersection(name):
            by_name[canonical(name)] = stored
            continue
        try:
            by_expression.append((re.compile(name), stored))
        except re.error as error:
            refuse(spec, f"extra_config[{name!r}]", str(error), "names and regular expressions")
    blocks = _blocks(spec)

    def format_of(module: str) -> TensorFormat:
        name = canonical(module)
        if name in by_name:
            return by_name[name]
        for expression, stored in by_expression:
            if any(map(expression.search, spellings(module))):
                return stored
        return usual if f"{name}.".startswith(blocks) else PLAIN

    found = (usual, *by_name.values(), *(stored for _, stored in by_expression))
    return Scheme(tuple(each for each in dict.fromkeys(found) if each is not PLAIN), format_of)


def _format(spec: QuantizationSpec) -> TensorFormat:
    bits = spec.fields.get("bits")
    if type(bits) is int and bits >= _PLAIN_BITS:
        return PLAIN
    allowed, make = _PACKINGS[spec.fields["packing_format"]]
    check_fields(
        spec,
        {
            "bits": allowed, "data_type": (None, "int"), "act_bits": (None, 16, 32),
            "super_bits": (None,), "super_group_size": (None,), "sym": (None, False, True),
        },
    )  # fmt: skip
    return make(spec.fields["bits"], group_size(spec))


def _blocks(spec: QuantizationSpec) -> tuple[str, ...]:
    """How the names of quantised modules begin; without a word of it, those of all layers."""
    names = spec.fields.get("block_name_to_quantize") or spec.fields.get("to_quant_block_names")
    names = names.split(",") if isinstance(names, str) else names or ["layers"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        refuse(spec, "block_name_to_quantize", names, "a list of names, one string of them or null")
    return tuple(f"{canonical(name.strip())}." for name in names)
