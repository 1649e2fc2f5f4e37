"""Norms, the token embedding and the output head."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from negamax.kernels.activations import QuantizedActivations
from negamax.kernels.formats import E4M3_GROUPS, ActivationFormat
from negamax.kernels.peers import Collective
from negamax.kernels.registry import KernelTable
from negamax.layers.linear import ColumnParallel, Part
from negamax.layers.weights import WeightSlot
from negamax.quantization.scheme import WeightFormat


class RmsNorm:
    """Completes a sum over the ranks, adds it to the residual stream, then RMS norm with a learned
    weight.

    The residual stream and the norm are replicated on every rank, but for many rows on GPUs: there
    a rank keeps, from the first norm of a step to the last, its share of the rows
    (`kernels/collectives/triton.py`). `group` holds the ranks whose partial results the block
    before left; `activation`: what the block behind wants beside the plain activations.
    """

    def __init__(
        self,
        name: str,
        width: int,
        *,
        eps: float,
        group: Collective,
        activation: ActivationFormat | None,
        kernels: KernelTable,
        weights: WeightFormat,
    ) -> None:
        kernel = kernels["collectives.all_reduce_add_rms" if group.size > 1 else "norm.add_rms"]
        assert kernel.prepare is not None
        weight = torch.empty(width, dtype=weights.dtype, device=weights.device)
        self._norm = kernel.prepare(weight, eps, quantize=activation == E4M3_GROUPS)
        self._run = kernel.run
        self._groups = (group,) if group.size > 1 else ()
        self.slots = [WeightSlot(name, (width,), target=weight)]

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor | QuantizedActivations:
        """residual [T, width] += x in place; the norm of the residual.

        x [T, width] or [T, P, width] is this rank's part, itself P partial results, of the sum.
        """
        out: Tensor | QuantizedActivations = self._run(x, residual, self._norm, *self._groups)
        return out


class VocabEmbedding:
    """Token embedding, its rows split over the ranks; a token's vector is zero on the ranks that do
    not hold its row.
    """

    def __init__(
        self, name: str, shape: tuple[int, int], *, rows: range, weights: WeightFormat
    ) -> None:
        self._rows = rows
        # A row of zeros at either end takes the tokens of the other ranks.
        self._weight = torch.zeros(
            len(rows) + 2, shape[1], dtype=weights.dtype, device=weights.device
        )
        self.slots = [
            WeightSlot(name, shape, target=self._weight[1:-1], region=(rows, range(shape[1])))
        ]

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 -> [T, hidden], to be summed over the ranks."""
        local = (token_ids - (self._rows.start - 1)).clamp_(0, len(self._rows) + 1)
        return self._weight.index_select(0, local)


class VocabHead:
    """Logits over the vocabulary, its rows split over `group`."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        rows: range,
        group: Collective,
        kernels: KernelTable,
        weights: WeightFormat,
    ) -> None:
        self._group = group
        self._linear = ColumnParallel(
            [Part(name, shape[0], rows)],
            shape[1],
            kernels=kernels,
            weights=replace(weights, keep_quantized=False),
        )
        self.slots = self._linear.slots

    def finish_loading(self) -> None:
        """Put the weight into the kernel's layout."""
        self._linear.finish_loading()

    def local(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """hidden [R, hidden] -> [R, rows of this rank] fp32, in `out` where given (GPU kernels
        only).
        """
        return self._linear(hidden, out_dtype=torch.float32, out=out)

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> [R, vocab] fp32 on every rank."""
        return self._group.all_gather(self.local(hidden), dim=-1)
