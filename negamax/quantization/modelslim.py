"""Method "modelslim" (Ascend): quant_model_description.json lists the format of each tensor.

Like ModelSlim, kernels may round activations to 8 bits. Kernels use a scale per token, so the
stored scales of activations are not needed. The tensors `quant_bias` and `deq_scale` only undo the
rounding of activations. `quant_bias` is the layer's bias (M2 has none) minus the contribution of
`input_offset`. QuaRot's rotation is folded into the weights. Only draft models trained on the
unrotated model need the rotation (`checkpoint/quarot.py`).
"""

from functools import cache

from negamax.base.errors import ConfigError
from negamax.config.quantization import DESCRIPTION, QuantizationSpec
from negamax.formats.floats import PLAIN, use_rounded_activations
from negamax.formats.tensor_format import (
    COLUMNS,
    FLOATS,
    ONE,
    ROWS,
    Axis,
    CodePacking,
    Dim,
    GlobalScale,
    Known,
    Role,
    StoredTensor,
    TensorFormat,
)
from negamax.quantization.integers import group_name, group_size, make_group_dim
from negamax.quantization.scheme import Scheme, canonicalize, check_table, refuse

_INT8 = StoredTensor("weight", Role.VALUES, ("int8",), (ROWS, COLUMNS))
# tensors that static quantization of activations adds to a matrix
_STATIC = (
    StoredTensor("input_offset", Role.ACTIVATION, (*FLOATS, "int8"), (ONE,)),
    StoredTensor("quant_bias", Role.ACTIVATION, ("int32",), (ROWS,)),
)
_INPUT_SCALE = StoredTensor("input_scale", Role.ACTIVATION, FLOATS, (ONE,))
_DEQ_SCALE = StoredTensor("deq_scale", Role.ACTIVATION, ("float32", "int64"), (ROWS,))


def _scales(size: int) -> tuple[StoredTensor, StoredTensor]:
    dims = ROWS, make_group_dim(size)
    return (
        StoredTensor("weight_scale", Role.SCALE, FLOATS, dims),
        StoredTensor(
            "weight_offset", Role.ZERO_POINT, FLOATS, dims, optional=True, known=Known.ZEROS
        ),
    )


@cache
def int8(size: int, *, is_static: bool) -> TensorFormat:
    """Return the int8 format with a weight_scale per row and group of `size` columns (-1: all)."""
    static = (*_STATIC, _INPUT_SCALE, _DEQ_SCALE) if is_static else ()
    return TensorFormat(
        f"modelslim_int8_{group_name(size)}{'_static' if is_static else ''}",
        "int8",
        (_INT8, *_scales(size), *static),
        regroup=None if size == -1 else lambda columns: int8(columns, is_static=is_static),
    )


# int8 weights of checkpoints that store deq_scale = input_scale * weight_scale, not weight_scale.
INT8_DEQ_SCALE = TensorFormat(
    "modelslim_int8_deq_scale",
    "int8",
    (
        _INT8,
        StoredTensor("deq_scale", Role.SCALE, ("float32", "int64"), (ROWS,)),
        StoredTensor("input_scale", Role.SCALE, FLOATS, (ONE,), level=2),
        *_STATIC,
    ),
    global_scale=GlobalScale.IS_INCLUDED,
)


@cache
def int4(parts: int) -> TensorFormat:
    """Return the int4 format with a weight_scale per row. Low halves of bytes store even rows.

    scale_bias [rows, `parts` column ranges] corrects the rounding of activations.
    """
    return TensorFormat(
        f"modelslim_int4_channel_{parts}",
        "int4",
        (
            StoredTensor("weight", Role.VALUES, ("int8",), (Dim(Axis.ROWS, 2), COLUMNS)),
            *_scales(-1),
            StoredTensor("scale_bias", Role.ACTIVATION, FLOATS, (ROWS, Dim(Axis.FIXED, parts))),
        ),
        CodePacking.ROW_PAIRS,
    )


_ROW_PARALLEL = (".o_proj", ".w2", ".down_proj")  # matrices whose scale_bias has 16 columns, not 1
_TYPES = ("FLOAT", "W8A8_DYNAMIC", "W8A8", "W8A8_MIX", "W8A16", "W4A8_DYNAMIC")


def read(spec: QuantizationSpec) -> Scheme:
    others = {name: given for name, given in spec.fields.items() if "." not in name}
    check_table(QuantizationSpec(spec.method, others, spec.source), "modelslim")
    formats: dict[str, TensorFormat] = {}
    for name, given in spec.fields.items():
        if name.endswith(".weight"):
            if given not in _TYPES:
                refuse(spec, name, given, ", ".join(_TYPES))
            module = name.removesuffix(".weight")
            formats[canonicalize(module)] = _format(spec, module, given)
    if not formats and spec.source == "config.json":
        raise ConfigError(
            f"the checkpoint is quantized by {spec.method!r} and has no {DESCRIPTION}",
            hint="download this file, which lists the format of each tensor",
        )
    if not formats:
        refuse(spec, "*.weight", None, ", ".join(_TYPES))
    return Scheme.of(formats.values(), lambda module: formats.get(canonicalize(module), PLAIN))


def _format(spec: QuantizationSpec, module: str, given: str) -> TensorFormat:
    size = group_size(spec) if spec.fields.get("group_size") else -1
    if given == "FLOAT":
        return PLAIN
    if given == "W8A8" and f"{module}.weight_scale" not in spec.fields:
        return use_rounded_activations(INT8_DEQ_SCALE)
    if given == "W4A8_DYNAMIC":
        if spec.fields.get("version") != "1.0.0" or size != -1:
            refuse(
                spec, f"{module}.weight", given,
                "W4A8_DYNAMIC of version 1.0.0 without groups (other layouts are unknown)",
            )  # fmt: skip
        return int4(16 if module.endswith(_ROW_PARALLEL) else 1)
    is_static = given in ("W8A8", "W8A8_MIX")
    stored = int8(-1 if is_static else size, is_static=is_static)
    return stored if given == "W8A16" else use_rounded_activations(stored)
