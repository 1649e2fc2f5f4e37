"""Linear layers split over the ranks of a group: by output rows (column parallel) or by input columns (row parallel)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from negamax.kernels.registry import KernelTable
from negamax.layers.weights import WeightSlot
from negamax.parallel.collectives import Collective


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor inside a fused weight: its name, its full number of rows and the rows of this rank."""

    name: str
    total_rows: int
    rows: range


class ColumnParallel:
    """y = x W^T, where W stacks this rank's rows of one or more checkpoint tensors; no communication."""

    def __init__(
        self, parts: Sequence[Part], inputs: int, *, kernels: KernelTable, dtype: torch.dtype, device: torch.device
    ) -> None:
        kernel = kernels["gemm.linear"]
        assert kernel.prepare is not None
        self._run, self._prepare = kernel.run, kernel.prepare
        self._weight = torch.empty(sum(len(part.rows) for part in parts), inputs, dtype=dtype, device=device)  # [out, in]
        self.widths = tuple(len(part.rows) for part in parts)
        self.slots = [
            WeightSlot(part.name, (part.total_rows, inputs), target=target, region=(part.rows, range(inputs)))
            for part, target in zip(parts, torch.split(self._weight, list(self.widths)), strict=True)
        ]

    def finish_loading(self) -> None:
        """Put the weight into the kernel's layout; the plain copy is freed."""
        self._weight = self._prepare(self._weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, this rank's rows of all parts]."""
        out: Tensor = self._run(x, self._weight)
        return out


class RowParallel:
    """y = x W^T, where x and W hold this rank's input columns; the sum over the ranks of `group` is on every rank."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        columns: range,
        group: Collective,
        kernels: KernelTable,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        kernel = kernels["gemm.linear"]
        assert kernel.prepare is not None
        self._run, self._prepare, self._group = kernel.run, kernel.prepare, group
        self._weight = torch.empty(shape[0], len(columns), dtype=dtype, device=device)  # [out, in of this rank]
        self.slots = [WeightSlot(name, shape, target=self._weight, region=(range(shape[0]), columns))]

    def finish_loading(self) -> None:
        """Put the weight into the kernel's layout; the plain copy is freed."""
        self._weight = self._prepare(self._weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in of this rank] -> [T, out]."""
        return self._group.all_reduce(self._run(x, self._weight))
