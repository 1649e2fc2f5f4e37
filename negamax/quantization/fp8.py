"""Methods "fp8" and "mxfp8" (MiniMax). The description lists modules that are not quantized.

FP8 is E4M3 with a scale per block, usually of 128 x 128, or per matrix. A kernel that reads the
stored FP8 weights also rounds activations to FP8. Activations have a scale per 128 columns if
weights have blocks, else per token. MXFP8 has a power-of-two scale per 32 columns. Activations of
MXFP8 stay in the compute dtype. With `moe_quant_algo` (MiniMax-M3.1), routed experts are NVFP4.
"""

from typing import Any

from negamax.config.quantization import QuantizationSpec
from negamax.formats.floats import (
    E4M3_BLOCKS,
    E4M3_FNUZ,
    PER_MATRIX,
    fp8,
    mxfp8,
    nvfp4,
    use_rounded_activations,
)
from negamax.formats.tensor_format import Axis, Dim, TensorFormat
from negamax.quantization.scheme import Scheme, check_table, read_modules, refuse

_FNUZ = (E4M3_FNUZ, "e4m3fnuz")
MXFP8 = mxfp8(scale_name="weight_scale_inv")
PACKED_NVFP4 = nvfp4(
    values="weight_packed", global_scale="weight_global_scale", divides=True,
    input_scale="input_global_scale",
)  # fmt: skip
_PLAIN_IN_M31 = ("lm_head", "embed_tokens", "gate")  # modules of M3.1 that are never quantized


def read(spec: QuantizationSpec) -> Scheme:
    check_table(spec, "fp8")
    plain = read_modules(spec, "modules_to_not_convert", "ignored_layers")
    return Scheme.uniform(_format(spec), plain)


def read_mxfp8(spec: QuantizationSpec) -> Scheme:
    """Read the scheme of MXFP8 weights. Options, not config.json, set the dtypes of KV caches."""
    has_nvfp4 = spec.fields.get("moe_quant_algo") is not None
    check_table(spec, "mxfp8_with_nvfp4" if has_nvfp4 else "mxfp8")
    plain = read_modules(spec, "ignored_layers", "modules_to_not_convert")
    if not has_nvfp4:
        return Scheme.uniform(MXFP8, plain)
    return Scheme.uniform(MXFP8, (*plain, *_PLAIN_IN_M31), experts=PACKED_NVFP4)


def _format(spec: QuantizationSpec) -> TensorFormat:
    is_static = spec.fields.get("activation_scheme") == "static"
    fnuz = spec.fields.get("fmt") in _FNUZ
    if spec.fields.get("weight_block_size") is None:
        scale = "input_scale" if is_static else None
        stored = fp8("fp8_e4m3_tensor", PER_MATRIX, input_scale=scale, fnuz=fnuz)
        return use_rounded_activations(stored)
    if is_static:
        refuse(spec, "activation_scheme", "static", "dynamic, if weight_block_size is set")
    stored = fp8_blocks(spec, "weight_block_size", scale_name="weight_scale_inv", fnuz=fnuz)
    return E4M3_BLOCKS if stored.name == E4M3_BLOCKS.name else stored


def fp8_blocks(
    spec: QuantizationSpec, name: str, *, scale_name: str = "weight_scale", fnuz: bool = False
) -> TensorFormat:
    """Return E4M3 with a scale per block, whose size is the field `name`. Raises `ConfigError`."""
    block: Any = spec.fields.get(name)
    is_block = isinstance(block, list | tuple) and len(block) == 2
    if not is_block or not all(type(size) is int and size > 0 for size in block):
        refuse(spec, name, block, "a list of two numbers above 0")
    rows, columns = block
    dims = Dim(Axis.ROWS, rows), Dim(Axis.COLUMNS, columns)
    return fp8(f"fp8_e4m3_block_{rows}x{columns}", dims, scale_name=scale_name, fnuz=fnuz)
