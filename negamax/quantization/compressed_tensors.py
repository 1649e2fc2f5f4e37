"""Method "compressed-tensors", of it "float-quantized" only: E4M3 matrices with one scale per
output row (channel) or one in all (tensor), as LLM Compressor's FP8_DYNAMIC writes them.

Activations stay in the compute dtype, where the method would round them to FP8, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from negamax.config.quantization import QuantizationSpec
from negamax.kernels.formats import (
    COLUMNS,
    E4M3,
    FLOATS,
    PLAIN,
    ROWS,
    Axis,
    Dim,
    Role,
    StoredTensor,
    TensorFormat,
)
from negamax.quantization.scheme import Scheme, check_fields, matches, module_list, refuse

if TYPE_CHECKING:
    from torch import Tensor

    from negamax.kernels.codes import Codes


def _unpack(tensors: Mapping[str, Tensor]) -> Codes:
    from negamax.kernels.codes import Codes

    scale = tensors["weight_scale"]  # [N, 1], or one for all
    return Codes(tensors["weight"], scale.reshape(-1, 1))


def _quantize(matrix: Tensor) -> Mapping[str, Tensor]:
    from negamax.kernels.quantizers import to_e4m3

    return to_e4m3(matrix, (1, matrix.shape[1])).tensors("weight", "weight_scale")


def _e4m3(name: str, scale: tuple[Dim, ...]) -> TensorFormat:
    values = StoredTensor("weight", Role.VALUES, (E4M3,), (ROWS, COLUMNS))
    scales = StoredTensor("weight_scale", Role.SCALE, FLOATS, scale)
    quantize = _quantize if scale[0] is ROWS else None
    return TensorFormat(name, E4M3, (values, scales), _unpack, quantize)


_ONE = Dim(Axis.FIXED, 1)
STRATEGIES = {
    "channel": _e4m3("fp8_e4m3_channel", (ROWS, _ONE)),
    "tensor": _e4m3("fp8_e4m3_tensor", (_ONE,)),
}
# What a group may say of its weights beside the strategy: anything else is another format.
_WEIGHTS = {
    "num_bits": (8,), "type": ("float",), "symmetric": (True,), "dynamic": (False,),
    "group_size": (None,), "block_structure": (None,), "actorder": (None,), "zp_dtype": (None,),
    "strategy": tuple(STRATEGIES),
}  # fmt: skip
# and of how the scales were found
_OBSERVED = ("observer", "observer_kwargs", "scale_dtype")


def read(spec: QuantizationSpec) -> Scheme:
    """Errors: `ConfigError` for what is stored in another way."""
    check_fields(
        spec,
        {
            "format": ("float-quantized",),
            "quantization_status": (None, "compressed"),
            "kv_cache_scheme": (None,),
            "sparsity_config": (None, {}),
            "transform_config": (None, {}),
        },
        beside=("config_groups", "global_compression_ratio", "ignore", "quant_method", "version"),
    )
    groups = spec.fields.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        refuse(spec, "config_groups", groups, "an object of groups")
    targets = [_group(spec, f"config_groups.{name}", group) for name, group in groups.items()]
    ignored = module_list(spec, "ignore")

    def format_of(module: str) -> TensorFormat:
        if matches(module, ignored):
            return PLAIN
        by_name = (stored for names, stored in targets if matches(module, names))
        by_class = (stored for names, stored in targets if "Linear" in names)
        return next(by_name, next(by_class, PLAIN))

    return Scheme(tuple(dict.fromkeys(stored for _, stored in targets)), format_of)


def _group(spec: QuantizationSpec, name: str, group: Any) -> tuple[tuple[str, ...], TensorFormat]:
    """The targets of a group, modules and classes of them, and how these are stored."""
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        refuse(spec, name, group, "an object with weights")
    weights = QuantizationSpec(spec.method, dict(group["weights"]), f"{name}.weights")
    check_fields(weights, _WEIGHTS, beside=_OBSERVED)
    fields = QuantizationSpec(spec.method, dict(group), name)
    check_fields(
        fields,
        {"output_activations": (None,), "format": (None, "float-quantized")},
        beside=("targets", "weights", "input_activations"),
    )
    inputs = group.get("input_activations")
    is_dynamic = isinstance(inputs, Mapping) and inputs.get("dynamic") is True
    if inputs is not None and not is_dynamic:
        refuse(fields, "input_activations", inputs, "null or dynamic ones")
    return module_list(fields, "targets"), STRATEGIES[weights.fields["strategy"]]
