"""How a checkpoint stores its weights."""

from __future__ import annotations

from dataclasses import dataclass

FP8_BLOCK = (128, 128)  # rows, columns of a weight that share one scale


@dataclass(frozen=True)
class QuantizationSpec:
    """How the checkpoint stores its linear weights. Only "fp8" exists now: e4m3, one fp32
    multiplier per block.
    """

    method: str
    weight_block_size: tuple[int, int]  # rows, columns
    # parts of module names that are stored unquantised
    modules_to_not_convert: tuple[str, ...] = ()
