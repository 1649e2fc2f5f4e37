"""`QuantScheme`: how a quantised weight is stored, sharded and applied; chosen once from the model spec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from negamax.base.errors import ConfigError
from negamax.config.model_spec import QuantizationSpec
from negamax.quantization import block_fp8


@dataclass(frozen=True)
class QuantScheme:
    """One storage format of weights. `name` says element and block: the word "fp8" alone would leave the scale open."""

    name: str
    value_dtype: str  # of the stored weight, as safetensors spells it
    scale_dtype: str
    scale_suffix: str  # after the weight's name, it makes the name of its scale
    scale_shape: Callable[[int, int], tuple[int, int]]  # of a weight's rows and columns
    dequantize: Callable[[Tensor, Tensor], Tensor]  # (values, scale) -> plain fp32 weight

    def __post_init__(self) -> None:
        if self.name in ("fp8", "int8", "int4", "fp4"):
            raise ConfigError(f"quantisation scheme {self.name!r} says no scale layout; use a full name")


BLOCK_FP8 = QuantScheme(
    name="fp8_e4m3_block_128x128",
    value_dtype="F8_E4M3",
    scale_dtype="F32",
    scale_suffix=block_fp8.SCALE_SUFFIX,
    scale_shape=block_fp8.scale_shape,
    dequantize=block_fp8.dequantize,
)


def detect(spec: QuantizationSpec | None) -> QuantScheme | None:
    """The scheme of a checkpoint, or None for plain weights. Errors: `ConfigError` for a format that no scheme reads."""
    if spec is None:
        return None
    if spec.method == "fp8" and spec.weight_block_size == block_fp8.BLOCK:
        return BLOCK_FP8
    raise ConfigError(
        f"quantisation {spec.method!r} with blocks of {list(spec.weight_block_size)} is not supported yet",
        hint="supported: 'fp8' with blocks of [128, 128]",
    )
