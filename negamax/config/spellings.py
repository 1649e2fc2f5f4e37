"""How checkpoints spell quantization methods, data types, scales and model types.

To support another spelling, add the spelling here. `quantization/scheme.py` lists the spellings of
module names, and `models/<family>/names.py` lists the spellings of tensor names.
"""

from collections.abc import Mapping
from typing import Any

# `METHODS` lists other names of each method, and the algorithm that a name implies ("": any).
# Some names select kernels in other engines, but not in Negamax.
METHODS: Mapping[str, Mapping[str, str]] = {
    "auto-round": dict.fromkeys(("inc", "intel/auto-round", "autoround"), ""),
    "awq": dict.fromkeys(("auto_awq", "awq_marlin", "cpu_awq", "marlin", "moe_wna16"), ""),
    "compressed-tensors": {"w8a8_fp8": "float-quantized", "w8a8_int8": "int-quantized"},
    "fp8": {},
    "gptq": dict.fromkeys(("auto_gptq", "gptq_marlin", "marlin", "moe_wna16"), ""),
    "modelopt": {
        "modelopt_fp4": "NVFP4", "modelopt_fp8": "FP8", "modelopt_mixed": "MIXED_PRECISION",
        "modelopt_mxfp8": "MXFP8", "mxfp8": "MXFP8", "petit_nvfp4": "NVFP4",
    },
    "modelslim": {"ascend": ""},
    "mxfp4": {},
    "mxfp8": {"modelopt_mxfp8": ""},
    "neuron_fp8": {},
    "quark": {},
}  # fmt: skip
# `_DATA_TYPES`: data type of AutoRound -> other spellings. The suffix "_rceil" (a rounding mode)
# may follow a spelling.
_DATA_TYPES = {
    "int": "int_sym int_asym",
    "fp": "fp8 fp8_sym fp8_e4m3 fp8_dynamic",
    "mx_fp": "mx_fp4 mx_fp8 mx_fp4e2m1 mx_fp8e4m3 mxfp4 mxfp8",
    "nv_fp": "nv_fp4 nvfp4 nv_fp4_with_static_gs",
}
# The scales of an FP8 or MXFP8 matrix have one of these names. In spite of the suffix "_inv",
# values are multiplied by the scales.
_SCALES = ("weight_scale", "weight_scale_inv")
# Values of model_type that tools write into the `text_config` of a vision-language model.
TEXT_TYPES = (None, "", "minimax_m2", "minimax_m3_vl")


def plain(name: str) -> str:
    """Normalize spellings such as `auto_round`, `auto-round` and `AUTO-ROUND`."""
    return name.lower().replace("_", "-")


def find_method(name: str) -> str:
    """Return the method that checkpoints call `name`, or `name` if no method has this name."""
    given = plain(name)
    found = [method for method in METHODS if plain(method) == given] or [
        method for method, others in METHODS.items() if given in map(plain, others)
    ]
    found = [method for method in found if given.startswith(plain(method))] or found
    return found[0] if len(found) == 1 else name


def find_data_type(name: Any) -> str:
    """Return AutoRound's data type in the spelling of `_DATA_TYPES`. The default is "int"."""
    given = str(name or "int").removesuffix("_rceil")
    return next((own for own, others in _DATA_TYPES.items() if given in others.split()), given)


def other_scale(name: str) -> str | None:
    """Return a scale's name in its other spelling, or None if `name` is not a scale's name."""
    module, _, last = name.rpartition(".")
    if last not in _SCALES:
        return None
    return f"{module}.{_SCALES[1 - _SCALES.index(last)]}"


def fill_strategy(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return `weights` with compressed-tensors' defaults for the fields that it lacks."""
    size = weights.get("group_size")
    strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if weights.get("block_structure") is not None:
        strategy = "block"
    elif size == 16 and weights.get("type") == "float":
        strategy = "tensor_group"
    chosen = {"strategy": strategy} if weights.get("strategy") is None else {}
    return {"num_bits": 8, "type": "int", "symmetric": True, **weights, **chosen}
