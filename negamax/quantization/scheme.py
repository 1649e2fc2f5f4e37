"""`QuantScheme`: how a quantised weight is stored, sharded and applied; `WeightFormat`: what a rank
keeps of that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from negamax.base.errors import ConfigError
from negamax.config.quantization import QuantizationSpec
from negamax.quantization import block_fp8


@dataclass(frozen=True)
class QuantScheme:
    """One storage format of weights. `name` says element and block: the word "fp8" alone would
    leave the scale open.
    """

    name: str
    value_dtype: str  # of the stored weight, as safetensors spells it
    scale_dtype: str
    scale_suffix: str  # after the weight's name, it makes the name of its scale
    scale_shape: Callable[[int, int], tuple[int, int]]  # of a weight's rows and columns
    dequantize: Callable[[Tensor, Tensor], Tensor]  # (values, scale) -> plain fp32 weight
    stored_dtype: torch.dtype = torch.float8_e4m3fn  # `value_dtype`, as PyTorch spells it
    # rows and columns that share a scale: the unit in which stored weights are split
    block: tuple[int, int] = block_fp8.BLOCK

    def __post_init__(self) -> None:
        if self.name in ("fp8", "int8", "int4", "fp4"):
            raise ConfigError(
                f"quantisation scheme {self.name!r} says no scale layout; use a full name"
            )

    def scale_region(
        self, region: tuple[range, range], *, name: str, shape: tuple[int, int]
    ) -> tuple[range, range]:
        """The part of the scale that belongs to the part `region` of the weight `name`, which has
        `shape` in full.

        Errors: `ConfigError` where the part does not start and end on a block.
        """
        rows, columns = (
            _blocks(part, total, block=block, what=f"{what} of {name}")
            for part, total, block, what in zip(
                region, shape, self.block, ("rows", "columns"), strict=True
            )
        )
        return rows, columns


BLOCK_FP8 = QuantScheme(
    name="fp8_e4m3_block_128x128",
    value_dtype="F8_E4M3",
    scale_dtype="F32",
    scale_suffix=block_fp8.SCALE_SUFFIX,
    scale_shape=block_fp8.scale_shape,
    dequantize=block_fp8.dequantize,
)


@dataclass(frozen=True)
class WeightFormat:
    """How one rank holds its weights: plain ones in `dtype`, and matrices as `scheme` stores them,
    but for `plain_modules`.
    """

    dtype: torch.dtype
    device: torch.device
    scheme: QuantScheme | None = None  # None: everything is plain
    # parts of the names of modules that the checkpoint stores plain
    plain_modules: tuple[str, ...] = ()

    def scheme_of(self, names: tuple[str, ...]) -> QuantScheme | None:
        """The scheme of the checkpoint tensors `names`, which share a parameter. Errors:
        `ConfigError` where they differ.
        """
        if self.scheme is None:
            return None
        plain = [_is_within(name, self.plain_modules) for name in names]
        if any(plain) and not all(plain):
            raise ConfigError(
                f"{names[plain.index(True)]} is stored unquantised and "
                f"{names[plain.index(False)]} as {self.scheme.name}",
                hint="they are multiplied as one matrix: modules_to_not_convert must name all of "
                "them or none",
            )
        return None if all(plain) else self.scheme


def detect(spec: QuantizationSpec | None) -> QuantScheme | None:
    """The scheme of a checkpoint, or None for plain weights. Errors: `ConfigError` for a format
    that no scheme reads.
    """
    if spec is None:
        return None
    if spec.method == "fp8" and spec.weight_block_size == block_fp8.BLOCK:
        return BLOCK_FP8
    raise ConfigError(
        f"quantisation {spec.method!r} with blocks of {list(spec.weight_block_size)} is not "
        f"supported yet",
        hint="supported: 'fp8' with blocks of [128, 128]",
    )


def stored_block(spec: QuantizationSpec | None) -> int:
    """The unit in which matrices are cut where they are kept as the checkpoint stores them."""
    scheme = detect(spec)
    return max(scheme.block) if scheme else 1


def choose_format(
    spec: QuantizationSpec | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    keep_quantized: bool | None = None,
) -> WeightFormat:
    """What a rank that computes in `dtype` on `device` holds of a checkpoint with quantisation
    `spec`.

    `keep_quantized` None lets the device decide: a GPU multiplies 16-bit activations with the
    matrices as they are stored; a CPU, and fp32 arithmetic everywhere, get them dequantised at
    load.
    """
    scheme = detect(spec)
    if keep_quantized is None:
        keep_quantized = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if scheme is None or spec is None or not keep_quantized:
        return WeightFormat(dtype, device)
    return WeightFormat(dtype, device, scheme, spec.modules_to_not_convert)


def _blocks(part: range, total: int, *, block: int, what: str) -> range:
    if part.start % block or part.stop % block:
        raise ConfigError(
            f"a rank's share of the {total} {what} is {len(part)}, from {part.start} to "
            f"{part.stop - 1}; "
            f"FP8 blocks of {block} cannot be split",
            hint="use fewer ranks"
            if len(part) < total
            else "use --device cpu, which dequantises the weights",
        )
    return range(part.start // block, part.stop // block)


def _is_within(name: str, modules: tuple[str, ...]) -> bool:
    """Whether `name` lies in one of `modules`: "gate" is in "mlp.gate.weight" and not in
    "mlp.gate_up.weight".
    """
    return any(f".{module}." in f".{name}." for module in modules)
