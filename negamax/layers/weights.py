"""Where the tensors of a checkpoint go: slots, which take this rank's part of a tensor once, and
the matrices behind them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.quantization.scheme import WeightFormat


class WeightSlot:
    """The place of one checkpoint tensor on this rank. Its single writer is the loader.

    `shape` is the full shape in the checkpoint. `target` is the parameter (or a view of a fused
    one) that receives the part `region` of the tensor, one range per dimension; `target` None means
    that this rank keeps nothing (`needed` is False). `exact`: values of the target's own dtype
    only, nothing is cast. `optional`: a checkpoint may lack the tensor. The slot lets go of its
    target once written, so that a layer can free the plain copy when it packs its weights.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        target: Tensor | None,
        region: tuple[range, ...] = (),
        exact: bool = False,
        optional: bool = False,
    ) -> None:
        region = region or tuple(range(size) for size in shape)
        if target is not None:
            assert tuple(target.shape) == tuple(len(part) for part in region), (
                f"{name}: {tuple(target.shape)} <- {region}"
            )
        self.name = name
        self.shape = shape
        self.region = region
        self.optional = optional
        self.needed = target is not None
        self.written = False
        self.dtype = None if target is None else target.dtype
        self.device = None if target is None else target.device
        self._target = target
        self._exact = exact

    def write(self, tensor: Tensor) -> None:
        """Copy this rank's part of `tensor` (the full checkpoint tensor) and cast it to the
        parameter's dtype.

        Errors: `CheckpointError` for a second write, another shape than `shape`, or values that are
        not floating point.
        """
        self._check_shape(tensor, self.shape)
        for dim, wanted in enumerate(self.region):
            if len(wanted) != self.shape[dim]:
                tensor = tensor.narrow(dim, wanted.start, len(wanted))
        self.write_part(tensor)

    def write_part(self, part: Tensor) -> Tensor:
        """As `write`, of the part `region` of the tensor alone; returns what was written, in the
        parameter.
        """
        if self.written:
            raise CheckpointError(f"tensor {self.name} is in the checkpoint twice")
        self._check_shape(part, tuple(len(wanted) for wanted in self.region))
        if not part.is_floating_point():
            raise CheckpointError(
                f"tensor {self.name} has dtype {part.dtype}; a floating-point dtype is needed"
            )
        if self._exact and self._target is not None and part.dtype != self._target.dtype:
            raise CheckpointError(
                f"tensor {self.name} has dtype {part.dtype}; {self._target.dtype} is needed, as "
                f"stored"
            )
        target, self._target = self._target, None
        self.written = True
        if target is None:
            return part
        with torch.inference_mode():
            # The pinned memory of `part` is not reused before the copy is done.
            return target.copy_(part, non_blocking=True)

    def _check_shape(self, tensor: Tensor, expected: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != expected:
            raise CheckpointError(
                f"tensor {self.name} has shape {list(tensor.shape)}; config.json asks for "
                f"{list(expected)}",
                hint="config.json and the weights are not of the same model",
            )

    def __repr__(self) -> str:
        state = "written" if self.written else "needed" if self.needed else "not needed"
        return f"WeightSlot({self.name!r}, {self.shape}, {state})"


class MatrixWeight:
    """One rank's matrices in one parameter: plain, or as their quantisation scheme stores them,
    with the scales of the blocks.

    `shape` is [..., rows, columns] on this rank; checkpoint tensors fill it window by window
    through `slots`.
    """

    def __init__(
        self, names: tuple[str, ...], shape: tuple[int, ...], weights: WeightFormat
    ) -> None:
        """`names`: the checkpoint tensors that go here (of experts, those of one expert)."""
        self._scheme = scheme = weights.scheme_of(names)
        self._values = torch.empty(
            shape, dtype=scheme.stored_dtype if scheme else weights.dtype, device=weights.device
        )
        self._scale = None
        if scheme:
            scale_shape = (*shape[:-2], *scheme.scale_shape(*shape[-2:]))
            self._scale = torch.empty(scale_shape, dtype=torch.float32, device=weights.device)

    @property
    def quantized(self) -> bool:
        """Whether the values are as the checkpoint stores them, with scales."""
        return self._scheme is not None

    def slots(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        region: tuple[range, range] | None,
        at: tuple[int, ...] = (0,),
    ) -> list[WeightSlot]:
        """The slots of checkpoint tensor `name` (and of its scale), of which this rank keeps
        `region` (None: nothing).

        `at`: where it goes, as leading indices and the first row. Errors: `ConfigError` for a
        region that cuts a block.
        """
        values = None if region is None else self._window(self._values, region, at)
        if self._scheme is None:
            return [WeightSlot(name, shape, target=values, region=region or ())]
        slots = [WeightSlot(name, shape, target=values, region=region or (), exact=True)]
        scale_name, scale_shape = name + self._scheme.scale_suffix, self._scheme.scale_shape(*shape)
        if region is None:
            return [*slots, WeightSlot(scale_name, scale_shape, target=None)]
        blocks = self._scheme.scale_region(region, name=name, shape=shape)
        assert self._scale is not None and at[-1] % self._scheme.block[0] == 0, (
            f"{name} at row {at[-1]}"
        )
        scale = self._window(self._scale, blocks, (*at[:-1], at[-1] // self._scheme.block[0]))
        return [*slots, WeightSlot(scale_name, scale_shape, target=scale, region=blocks)]

    def take(self) -> tuple[Tensor, Tensor | None]:
        """(values, scale or None) for a kernel's `prepare`; nothing is kept here."""
        values, scale = self._values, self._scale
        del self._values, self._scale
        return values, scale

    @staticmethod
    def _window(tensor: Tensor, region: tuple[range, range], at: tuple[int, ...]) -> Tensor:
        matrix = tensor[at[:-1]] if len(at) > 1 else tensor
        return matrix.narrow(0, at[-1], len(region[0]))


def slots_by_name(slots: Iterable[WeightSlot]) -> dict[str, WeightSlot]:
    """The slots keyed by name, in order."""
    table: dict[str, WeightSlot] = {}
    for slot in slots:
        assert slot.name not in table, f"two slots named {slot.name}"
        table[slot.name] = slot
    return table


def check_all_written(slots: dict[str, WeightSlot]) -> None:
    """Errors: `CheckpointError` that names the needed slots nothing was written to."""
    missing = [
        name for name, slot in slots.items() if slot.needed and not (slot.written or slot.optional)
    ]
    if missing:
        shown = ", ".join(missing[:5]) + (
            f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        )
        raise CheckpointError(f"{len(missing)} tensors are missing from the checkpoint: {shown}")
