"""From the experts that a router names to those that ranks hold, and from what these make of the
tokens to a partial sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from negamax.kernels.activations import QuantizedActivations, ShardedActivations
from negamax.kernels.dispatch.spec import ExpertPlaces
from negamax.kernels.registry import KernelTable
from negamax.kernels.signatures import COMBINE, DISPATCH
from negamax.layers.partial import Partial
from negamax.parallel.context import ParallelContext

# Of all ranks that gather tokens together: up to here rows travel unquantised, too, since kernels
# for few tokens read them so.
UNQUANTIZED_ROWS = 64


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
        self,
        x: Tensor | QuantizedActivations,
        ids: Tensor,
        weights: Tensor,
        *,
        most_tokens: int | None = None,
    ) -> Dispatched:
        """x [T, hidden], the router's logical ids (-1: none) and weights [T, top_k] -> what this
        rank's experts are given. `most_tokens`: of the data-parallel or context-parallel rank that
        has the most; None: all have T.
        """

    def combine(self, out: Tensor, given: Dispatched, num_tokens: int) -> Partial:
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
        self,
        x: Tensor | QuantizedActivations,
        ids: Tensor,
        weights: Tensor,
        *,
        most_tokens: int | None = None,
    ) -> Dispatched:
        """See `ExpertDispatch`."""
        if self._physical is not None:
            ids = self._physical[ids.long()].to(ids.dtype)
        return Dispatched(x, ids, weights)

    def combine(self, out: Tensor, given: Dispatched, num_tokens: int) -> Partial:
        """See `ExpertDispatch`."""
        return Partial(out, self._group)


class AllToAllTokens(ReplicatedTokens):
    """Data-parallel ranks have tokens of their own. Each rank sends them, padded to the largest
    number of them, to the others and is given back the sums of what their experts made of them;
    what the ranks of its attention group made of them is for the next norm to sum.
    """

    def __init__(
        self,
        table: ExpertTable,
        *,
        context: ParallelContext,
        device: torch.device,
        kernels: KernelTable,
    ) -> None:
        super().__init__(table, context=context, device=device)
        layout, self._group = context.layout, context.attention_group
        # (only one of the two is larger than 1)
        self._others = context.data_group if layout.dp > 1 else context.context_group
        firsts = [
            layout.of_rank(rank).experts.experts(len(table.logical)).start
            for rank in (layout.data_ranks if layout.dp > 1 else layout.context_ranks)
        ]
        self._places = ExpertPlaces(
            torch.tensor(firsts, dtype=torch.int32, device=device), len(self.experts)
        )
        self._send, self._sum = kernels[DISPATCH].run, kernels[COMBINE].run

    def dispatch(
        self,
        x: Tensor | QuantizedActivations,
        ids: Tensor,
        weights: Tensor,
        *,
        most_tokens: int | None = None,
    ) -> Dispatched:
        """See `ExpertDispatch`."""
        given = super().dispatch(x, ids, weights)
        num_rows = most_tokens or len(ids)
        if not isinstance(x, QuantizedActivations):
            ids, weights, x = self._exchange(given, [x], num_rows)
            return Dispatched(x, ids, weights)
        if num_rows * self._others.size <= UNQUANTIZED_ROWS:
            assert not isinstance(x, ShardedActivations), f"{num_rows} rows are not sharded"
            ids, weights, q, scale, hidden = self._exchange(
                given, [x.q, x.scale, x.hidden], num_rows
            )
            return Dispatched(QuantizedActivations(hidden, q, scale), ids, weights)
        ids, weights, q, scale = self._exchange(given, [x.q, x.scale], num_rows)
        unsent = x.hidden[:0]
        return Dispatched(
            ShardedActivations(unsent, q, scale, group=self._others, first=0), ids, weights
        )

    def _exchange(self, given: Dispatched, columns: list[Tensor], num_rows: int) -> list[Tensor]:
        """Ids, weights and columns of all ranks."""
        ids, received = self._send(
            given.ids,
            [given.weights, *columns],
            places=self._places,
            group=self._others,
            num_rows=num_rows,
        )
        return [ids, *received]

    def combine(self, out: Tensor, given: Dispatched, num_tokens: int) -> Partial:
        """See `ExpertDispatch`."""
        summed = self._sum(out, given.ids, places=self._places, group=self._others)
        return Partial(summed[:num_tokens], self._group)


class SharedOutTokens(AllToAllTokens):
    """Context-parallel ranks share out the tokens of some steps, which meet the experts as those of
    data-parallel ranks do. In other steps, for which no `most_tokens` is given, every rank has all
    tokens, and what the experts of each made of them is summed.
    """

    def dispatch(
        self,
        x: Tensor | QuantizedActivations,
        ids: Tensor,
        weights: Tensor,
        *,
        most_tokens: int | None = None,
    ) -> Dispatched:
        """See `ExpertDispatch`."""
        way = ReplicatedTokens if most_tokens is None else AllToAllTokens
        return way.dispatch(self, x, ids, weights, most_tokens=most_tokens)

    def combine(self, out: Tensor, given: Dispatched, num_tokens: int) -> Partial:
        """See `ExpertDispatch`."""
        if len(given.ids) > num_tokens:  # of all ranks
            return super().combine(out, given, num_tokens)
        summed = out if out.dim() == 2 else out.sum(1)
        return Partial(self._others.all_reduce(summed), self._group)


def expert_dispatch(
    table: ExpertTable, *, context: ParallelContext, device: torch.device, kernels: KernelTable
) -> ExpertDispatch:
    """The one for the ranks of `context`."""
    layout = context.layout
    if layout.dp == layout.cp == 1:
        return ReplicatedTokens(table, context=context, device=device)
    way = AllToAllTokens if layout.dp > 1 else SharedOutTokens
    return way(table, context=context, device=device, kernels=kernels)
