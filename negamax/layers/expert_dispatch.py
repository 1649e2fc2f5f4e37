"""From the experts that a router names to those that ranks hold, and from what these make of the
tokens to a partial sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from negamax.kernels.activations import QuantizedActivations
from negamax.layers.partial import Partial
from negamax.parallel.context import ParallelContext


@dataclass(frozen=True)
class ExpertTable:
    """Which expert of the model (a logical one) lies in each place for one (a physical one). Places
    are dealt out to the ranks in order; an expert may have several, on different ranks.
    """

    logical: tuple[int, ...]  # by physical id

    @staticmethod
    def identity(num_experts: int) -> ExpertTable:
        """Every expert in the place of its own number."""
        return ExpertTable(tuple(range(num_experts)))

    def physical(self) -> list[int]:
        """The first place of each logical expert."""
        return [self.logical.index(expert) for expert in range(1 + max(self.logical))]


@dataclass(frozen=True)
class Dispatched:
    """Tokens on the rank of their experts: activations of T rows, and physical ids (-1: none) and
    weights, [T, top_k].
    """

    x: Tensor | QuantizedActivations
    ids: Tensor
    weights: Tensor


class ExpertDispatch(Protocol):
    """How tokens and experts meet. This rank holds the physical experts first ..
    first + len(experts) - 1.
    """

    first: int
    experts: list[int]  # the logical experts of this rank, in order of their physical ids

    def dispatch(
        self, x: Tensor | QuantizedActivations, ids: Tensor, weights: Tensor
    ) -> Dispatched:
        """x [T, hidden], the router's logical ids (-1: none) and weights [T, top_k] -> what this
        rank's experts are given.
        """

    def combine(self, out: Tensor) -> Partial:
        """out [rows given, P, hidden], what this rank's experts made of it -> [T, ...]."""


class ReplicatedTokens:
    """Every rank of the expert group has all tokens and runs the choices that fall on its experts:
    nothing is sent, and the sum over the group is for the next norm. With the identity as the table
    no kernel is launched.
    """

    def __init__(
        self, table: ExpertTable, *, context: ParallelContext, device: torch.device
    ) -> None:
        places = context.layout.experts.experts(len(table.logical))
        self.first, self._group = places.start, context.expert_group
        self.experts = [table.logical[place] for place in places]
        assert len(set(self.experts)) == len(self.experts), "a rank holds an expert once"
        self._physical: Tensor | None = None
        physical = table.physical()
        if physical != list(range(len(physical))):
            # ids of -1 find the -1 at the end
            self._physical = torch.tensor([*physical, -1], dtype=torch.int32, device=device)

    def dispatch(
        self, x: Tensor | QuantizedActivations, ids: Tensor, weights: Tensor
    ) -> Dispatched:
        """See `ExpertDispatch`."""
        if self._physical is not None:
            ids = self._physical[ids.long()].to(ids.dtype)
        return Dispatched(x, ids, weights)

    def combine(self, out: Tensor) -> Partial:
        """See `ExpertDispatch`."""
        return Partial(out, self._group)
