"""Norms, the token embedding and the output head."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.formats.floats import E4M3_GROUPS
from negamax.formats.tensor_format import ActivationFormat
from negamax.kernels.activations import QuantizedActivations
from negamax.kernels.collectives.op import ALL_REDUCE_ADD_RMS, COMPLETE_RESIDUAL
from negamax.kernels.gemm.op import LinearOutput
from negamax.kernels.norm.op import ADD_RMS
from negamax.kernels.peers import Collective
from negamax.layers.linear import ColumnParallel, ProjectionPart
from negamax.layers.weights import LayerSetup, WeightSlot
from negamax.parallel.collectives import Partial, SingleRank
from negamax.quantization.scheme import WeightFormat

_ROWS = 4096  # number of embedding rows that `map_rows` changes at a time


class RmsNorm:
    """Completes a sum over ranks, adds it to the residual stream, and applies RMS norm.

    On the CPU and with small batches, every rank has all rows of the residual stream. With large
    batches on GPUs, a rank has only some rows of the stream from the first to the last norm of a
    step (`kernels/collectives/triton.py`). `activation`: quantized format that the next layer
    reads. `gemma`: the checkpoint stores the weights minus 1.
    """

    def __init__(
        self,
        name: str,
        width: int,
        *,
        eps: float,
        activation: ActivationFormat | None,
        gemma: bool = False,
        setup: LayerSetup,
    ) -> None:
        kernels, weights = setup.kernels, setup.weights
        add_rms, sum_add_rms = kernels[ADD_RMS], kernels[ALL_REDUCE_ADD_RMS]
        weight = torch.empty(width, dtype=weights.dtype, device=weights.device)
        self._add_rms, self._sum_add_rms = add_rms.run, sum_add_rms.run
        self._complete = kernels[COMPLETE_RESIDUAL].run
        self.weight, self.eps = weight, eps
        quantize = activation == E4M3_GROUPS
        self.prepared = add_rms.prepare(weight, eps, quantize=quantize, gemma=gemma)
        self._sum_norm = sum_add_rms.prepare(weight, eps, quantize=quantize, gemma=gemma)
        self.slots = [WeightSlot(name, (width,), target=weight)]

    def __call__(self, part: Partial, residual: Tensor) -> Tensor | QuantizedActivations:
        """Add `part`, summed over part.group, to residual [T, width]; return the RMS norm."""
        if part.group.size == 1:
            return self._add_rms(part.x, residual, self.prepared)
        return self._sum_add_rms(part.x, residual, self._sum_norm, part.group)

    def complete(
        self, residual: Tensor, group: Collective, *, copy: bool = True, out: Tensor | None = None
    ) -> Tensor:
        """Return the whole residual stream [T, width] after this norm's sum over `group`. With
        `copy` the result is a copy (in `out`, if given); without `copy` it may be `residual`.
        """
        stream: Tensor = self._complete(residual, group, copy=copy, out=out)
        return stream


class VocabEmbedding:
    """The token embedding's weight, with rows split over `group`."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        rows: range,
        group: Collective,
        weights: WeightFormat,
    ) -> None:
        self._group, width = group, shape[1]
        # [rows + 2, hidden]; tokens of other ranks read the first or last row, which are zeros
        self.table = torch.zeros(len(rows) + 2, width, dtype=weights.dtype, device=weights.device)
        region = rows, range(width)
        self.slots = [WeightSlot(name, shape, target=self.table[1:-1], region=region)]

    def whole(self) -> "VocabEmbedding":
        """Return this embedding, or a copy with all rows on this rank if the rows are split."""
        if self._group.size == 1:
            return self
        other = copy(self)
        rows = self._group.all_gather(self.table[1:-1].contiguous(), dim=0)
        other.table, other._group = F.pad(rows, (0, 0, 1, 1)), SingleRank()
        return other

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> "VocabEmbedding":
        """Return a copy with `change` applied to the rows, a chunk [n, hidden] at a time."""
        other = copy(self)
        other.table = torch.empty_like(self.table)
        for rows, changed in zip(self.table.split(_ROWS), other.table.split(_ROWS), strict=True):
            changed.copy_(change(rows))
        return other


class VocabHead:
    """The output head, which computes logits. The attention group shards the vocabulary."""

    def __init__(
        self, name: str, shape: tuple[int, int], *, rows: range, setup: LayerSetup
    ) -> None:
        self._group = setup.context.attention_group
        setup = replace(setup, weights=replace(setup.weights, keep_quantized=False))
        self._linear = ColumnParallel([ProjectionPart(name, shape[0], rows)], shape[1], setup=setup)
        self.slots = self._linear.slots

    def finish_loading(self) -> None:
        self._linear.finish_loading()

    def local(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Map hidden [R, hidden] to [R, vocab of this rank] fp32, in `out` if given (GPU only)."""
        return self._linear(hidden, LinearOutput(torch.float32, out))

    def __call__(self, hidden: Tensor) -> Tensor:
        """Map hidden [R, hidden] to logits [R, vocab] fp32 on every rank."""
        return self._group.all_gather(self.local(hidden), dim=-1)
