"""Norms, the token embedding and the output head."""

from __future__ import annotations

import torch
from torch import Tensor

from negamax.kernels.registry import KernelTable
from negamax.layers.linear import ColumnParallel, Part
from negamax.layers.weights import WeightSlot
from negamax.parallel.collectives import Collective


class RmsNorm:
    """Adds to the residual stream, then RMS norm with a learned weight. Replicated on every rank."""

    def __init__(
        self, name: str, width: int, *, eps: float, kernels: KernelTable, dtype: torch.dtype, device: torch.device
    ) -> None:
        kernel = kernels["norm.add_rms"]
        assert kernel.prepare is not None
        weight = torch.empty(width, dtype=dtype, device=device)
        self._run, self._norm = kernel.run, kernel.prepare(weight, eps)
        self.slots = [WeightSlot(name, (width,), target=weight)]

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual += x in place; the norm of the residual. Both [T, width]."""
        out: Tensor = self._run(x, residual, self._norm)
        return out


class VocabEmbedding:
    """Token embedding, its rows split over `group`; every rank gets every token's vector."""

    def __init__(
        self, name: str, shape: tuple[int, int], *, rows: range, group: Collective, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._rows, self._group = rows, group
        self._weight = torch.empty(len(rows), shape[1], dtype=dtype, device=device)
        self.slots = [WeightSlot(name, shape, target=self._weight, region=(rows, range(shape[1])))]

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 -> [T, hidden]."""
        if self._group.size == 1:
            return self._weight.index_select(0, token_ids)
        elsewhere = (token_ids < self._rows.start) | (token_ids >= self._rows.stop)
        local = (token_ids - self._rows.start).masked_fill_(elsewhere, 0)
        found = self._weight.index_select(0, local).masked_fill_(elsewhere[:, None], 0)
        return self._group.all_reduce(found)


class VocabHead:
    """Logits over the vocabulary, its rows split over `group` and gathered to every rank."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        rows: range,
        group: Collective,
        kernels: KernelTable,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._group = group
        self._linear = ColumnParallel([Part(name, shape[0], rows)], shape[1], kernels=kernels, dtype=dtype, device=device)
        self.slots = self._linear.slots

    def finish_loading(self) -> None:
        """Put the weight into the kernel's layout."""
        self._linear.finish_loading()

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> [R, vocab] fp32."""
        return self._group.all_gather(self._linear(hidden), dim=-1).float()
