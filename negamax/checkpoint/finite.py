"""Weights that are NaN or infinite are found at load: a damaged file, or a failed conversion.

Each parameter is looked at once, on its own device, behind the copy that filled it. The results
stay there until the last tensor is written, so that a GPU is waited for once, not once per tensor.
Only of a tensor that is refused are the values counted, in the file.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.checkpoint.reader import CheckpointReader, TensorEntry

_MAX_NAMED = 5
# A value is NaN or infinite where all bits of its exponent are set; e4m3fn has no infinities, and
# its NaN sets all bits but the sign.
_SPECIAL_BITS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float8_e4m3fn: (torch.uint8, 0x7F),
}


@dataclass
class FiniteCheck:
    """Gathers what was written. Single writer: the loader."""

    _entries: list[tuple[TensorEntry, ...]] = field(default_factory=list)
    _flags: list[Tensor] = field(default_factory=list)

    def add(self, values: Tensor, *sources: TensorEntry) -> None:
        """Look at `values`, made from the tensors `sources` of the checkpoint, without waiting."""
        if values.numel() and values.dtype in _SPECIAL_BITS:
            self._entries.append(sources)
            self._flags.append(_some_not_finite(values))

    def finish(self, reader: CheckpointReader) -> None:
        """Errors: `CheckpointError` naming the tensors with such values, how many, and the
        first.
        """
        by_device: dict[torch.device, list[int]] = {}
        for number, flag in enumerate(self._flags):
            by_device.setdefault(flag.device, []).append(number)
        broken: list[int] = []
        for numbers in by_device.values():
            stacked = torch.stack([self._flags[number] for number in numbers])
            flags = stacked.tolist()  # host-sync: once, after the last tensor
            broken += [number for number, flag in zip(numbers, flags, strict=True) if flag]
        if broken:
            found = [
                _describe(reader, self._entries[number]) for number in sorted(broken)[:_MAX_NAMED]
            ]
            more = (
                f"; and {len(broken) - len(found)} more tensors" if len(broken) > len(found) else ""
            )
            raise CheckpointError(
                f"the checkpoint has values that are NaN or infinite: {'; '.join(found)}{more}",
                hint="download the files again; if they are complete, the checkpoint itself is "
                "broken",
            )


def not_finite(values: Tensor) -> Tensor:
    """True where `values` (fp32, bf16, fp16 or e4m3fn, on any device) is NaN or infinite."""
    bits, special = _SPECIAL_BITS[values.dtype]
    return (values.view(bits) & special) == special


def _some_not_finite(values: Tensor) -> Tensor:
    """[] bool. As `not_finite(values).any()`, and several times as fast."""
    bits, special = _SPECIAL_BITS[values.dtype]
    return (values.view(bits) & special).amax() == special


def _describe(reader: CheckpointReader, sources: tuple[TensorEntry, ...]) -> str:
    """Which of `sources` is broken, in how many values, the first of them where."""
    for entry in sources:
        values = reader.read(entry)
        if values.dtype not in _SPECIAL_BITS:
            continue
        places = not_finite(values).nonzero()
        if len(places):
            size = " x ".join(map(str, entry.shape)) or "1"
            return (
                f"{entry.name} in {len(places)} of {size} ({entry.dtype}), first at "
                f"{places[0].tolist()}"
            )
    return f"{sources[0].name}, whose values are too large for the dtype that the model computes in"
