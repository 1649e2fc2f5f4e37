"""Where the tensors of a checkpoint go: one slot per tensor, which takes this rank's part of it exactly once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from negamax.base.errors import CheckpointError


class WeightSlot:
    """The place of one checkpoint tensor on this rank. Its single writer is the loader.

    `shape` is the full shape in the checkpoint. `target` is the parameter (or a view of a fused one) that receives the part
    `region` of the tensor, one range per dimension; `target` None means that this rank keeps nothing (`needed` is False).
    The slot lets go of its target once written, so that a layer can free the plain copy when it packs its weights.
    """

    def __init__(self, name: str, shape: tuple[int, ...], *, target: Tensor | None, region: tuple[range, ...] = ()) -> None:
        if target is not None:
            region = region or tuple(range(size) for size in shape)
            assert tuple(target.shape) == tuple(len(part) for part in region), f"{name}: {tuple(target.shape)} <- {region}"
        self.name = name
        self.shape = shape
        self.needed = target is not None
        self.written = False
        self._target = target
        self._region = region

    def write(self, tensor: Tensor) -> None:
        """Copy this rank's part of `tensor` (the full checkpoint tensor, any float dtype) and cast it to the parameter's dtype.

        Errors: `CheckpointError` for a second write, another shape than `shape`, or values that are not floating point.
        """
        if self.written:
            raise CheckpointError(f"tensor {self.name} is in the checkpoint twice")
        if tuple(tensor.shape) != self.shape:
            raise CheckpointError(
                f"tensor {self.name} has shape {list(tensor.shape)}; config.json asks for {list(self.shape)}",
                hint="config.json and the weights are not of the same model",
            )
        if not tensor.is_floating_point():
            raise CheckpointError(f"tensor {self.name} has dtype {tensor.dtype}; a floating-point dtype is needed")
        if self._target is not None:
            part = tensor
            for dim, wanted in enumerate(self._region):
                part = part.narrow(dim, wanted.start, len(wanted))
            with torch.inference_mode():
                self._target.copy_(part)
        self.written = True
        self._target = None

    def __repr__(self) -> str:
        state = "written" if self.written else "needed" if self.needed else "not needed"
        return f"WeightSlot({self.name!r}, {self.shape}, {state})"


def slots_by_name(slots: Iterable[WeightSlot]) -> dict[str, WeightSlot]:
    """The slots keyed by name, in order."""
    table: dict[str, WeightSlot] = {}
    for slot in slots:
        assert slot.name not in table, f"two slots named {slot.name}"
        table[slot.name] = slot
    return table


def check_all_written(slots: dict[str, WeightSlot]) -> None:
    """Errors: `CheckpointError` that names the needed slots nothing was written to."""
    missing = [name for name, slot in slots.items() if slot.needed and not slot.written]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise CheckpointError(f"{len(missing)} tensors are missing from the checkpoint: {shown}")
