"""Functions for all methods that store small integers with a scale per group of columns."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import ParamSpec

from negamax.config.quantization import QuantizationSpec
from negamax.formats.tensor_format import (
    COLUMNS,
    FLOATS,
    ONE,
    ROWS,
    Axis,
    Dim,
    Known,
    Role,
    StoredTensor,
    TensorFormat,
)
from negamax.quantization.scheme import refuse

P = ParamSpec("P")

PACKED_BITS = (2, 4, 8)  # Supported bits per quantized weight, all divisors of 32.
# Fields of AutoAWQ, GPTQModel and AutoRound that do not change the stored tensors.
OF_THE_QUANTIZER = (
    "act_group_aware", "amp", "autoround_version", "backend", "batch_size", "cache_block_outputs",
    "damp_auto_increment", "damp_percent", "dataset", "do_fuse", "enable_alg_ext",
    "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "exllama_config",
    "fuse_max_seq_len", "gradient_accumulate_steps", "hyb_act", "iters", "low_gpu_mem_usage", "lr",
    "max_input_length", "meta", "minmax_lr", "model_dtype", "model_file_base_name", "model_free",
    "model_name_or_path", "model_seqlen", "module_name_preceding_first_block", "modules_to_fuse",
    "mse", "nsamples", "pad_token_id", "provider", "quantizer", "scale_dtype", "seqlen",
    "static_attention_granularity", "static_groups", "static_kv_dtype", "static_kv_granularity",
    "supported_types", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama",
)  # fmt: skip
# Allowed values of fields that AutoAWQ, GPTQModel and AutoRound write. Other values declare
# quantized activations, rotated weights or scales of scales.
UNLESS_MORE: Mapping[str, Sequence[object]] = {
    "adapter": (None,), "act_bits": (None, 16, 32), "data_type": (None, "int"),
    "pack_dtype": (None, "int32"), "rotation": (None,), "rotation_config": (None, {}),
    "rotation_configs": (None, []), "static_attention_dtype": (None,), "super_bits": (None,),
    "super_group_size": (None,), "sym": (None, False, True),
}  # fmt: skip
# These fields have no effect while activations are not quantized.
ACTIVATIONS = ("act_data_type", "act_dynamic", "act_group_size", "act_sym")


def cache_format(make: Callable[P, TensorFormat]) -> Callable[P, TensorFormat]:
    """Cache `make`, so that calls with equal arguments, passed or default, return one object."""
    signature, known = inspect.signature(make), cache(make)

    @wraps(make)
    def get(*args: P.args, **kwargs: P.kwargs) -> TensorFormat:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return known(*bound.args, **bound.kwargs)

    return get


def group_size(spec: QuantizationSpec, name: str = "group_size") -> int:
    """Return the number of columns per scale; -1 means all columns. Raises `ConfigError`."""
    size = spec.fields.get(name)
    if type(size) is not int or not (size == -1 or (size >= 8 and size % 8 == 0)):
        refuse(spec, name, size, "-1, or a multiple of 8")
    return size


def read_names(spec: QuantizationSpec, name: str) -> tuple[str, ...]:
    """Return the names in field `name`, which may be a nested list. Raises `ConfigError`."""
    found = spec.fields.get(name) or []
    parts = found if isinstance(found, list) else [None]
    names = [each for part in parts for each in (part if isinstance(part, list) else [part])]
    spelled = tuple(each for each in names if isinstance(each, str))
    if len(spelled) < len(names):
        refuse(spec, name, found, "a list of names, a list of such lists, or null")
    return spelled


def make_group_dim(size: int) -> Dim:
    """Return the dimension of a tensor with one entry per group of columns."""
    return ONE if size == -1 else Dim(Axis.COLUMNS, size)


def group_name(size: int) -> str:
    return "channel" if size == -1 else f"group_{size}"


def make_group_index(
    name: str, size: int, *, is_stored_order: bool, optional: bool
) -> StoredTensor:
    """Return the tensor of group numbers of columns. `is_stored_order`: in any order."""
    return StoredTensor(
        name,
        Role.PERMUTATION,
        ("int32", "int64"),
        (COLUMNS,),
        optional=optional and not is_stored_order,
        known=None if is_stored_order else Known.GROUPS_IN_ORDER,
        group=size,
    )


def int8_rows(name: str, *others: StoredTensor, scale: Dim = ROWS) -> TensorFormat:
    """Return the int8 format with a weight_scale per row or, if `scale` is ONE, per matrix.

    `others` are further stored tensors, which do not change the values.
    """
    return TensorFormat(
        name,
        "int8",
        (
            StoredTensor("weight", Role.VALUES, ("int8",), (ROWS, COLUMNS)),
            StoredTensor("weight_scale", Role.SCALE, FLOATS, (scale,)),
            *others,
        ),
    )
