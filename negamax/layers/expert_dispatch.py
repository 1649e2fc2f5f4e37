"""From the experts that a router names to those that ranks hold, and from what these make of the
tokens to a partial sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from negamax.kernels.activations import QuantizedActivations, ShardedActivations
from negamax.kernels.attention.metadata import StepTokens
from negamax.kernels.dispatch.expert_ranges import ExpertRanges
from negamax.kernels.registry import KernelTable
from negamax.kernels.signatures import COMBINE, DISPATCH, PLACE
from negamax.layers.partial import Partial
from negamax.parallel.collectives import Collective
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout

# Of all ranks that gather tokens together: up to here rows travel unquantised, too, since kernels
# for few tokens read them so.
UNQUANTIZED_ROWS = 64


class ExpertMap:
    """Where experts lie, on the device, and how often each was chosen. Graphs read the tensors:
    their contents change between steps, they never do.
    """

    def __init__(
        self, table: Sequence[int], *, most_copies: int, device: torch.device, counts: Tensor
    ) -> None:
        """`table`: the expert in each slot; no expert is ever in more than `most_copies`. `counts`
        [experts] int64: from now on each choice of an expert is added.
        """
        num_experts = len(counts)
        self._slots = torch.empty(num_experts, most_copies, dtype=torch.int32, device=device)
        self._copies = torch.empty(num_experts, dtype=torch.int32, device=device)
        self._counts = counts
        self.update(table)

    def update(self, table: Sequence[int]) -> None:
        """From the next launch on `table` counts."""
        num_experts, most = self._slots.shape
        slots: list[list[int]] = [[] for _ in range(num_experts)]
        for slot, expert in enumerate(table):
            slots[expert].append(slot)
        # (how many, then which, and the first of them once more where there are fewer)
        rows = [[len(own), *own, *own[:1] * (most - len(own))] for own in slots]
        packed = torch.tensor(rows, dtype=torch.int32)
        if self._slots.is_cuda:
            packed = packed.pin_memory().to(self._slots.device, non_blocking=True)
        self._copies.copy_(packed[:, 0])
        self._slots.copy_(packed[:, 1:])

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Slots, copies and counts, as `moe.place` takes them."""
        return self._slots, self._copies, self._counts


@dataclass(frozen=True)
class Dispatched:
    """Tokens on the rank of their experts: activations of T rows, and slots (-1: none) and weights,
    [T, top_k].
    """

    x: Tensor | QuantizedActivations
    ids: Tensor
    weights: Tensor
    exchange: TokenExchange | None = None  # that has brought them; None: they were here


class TokenExchange:
    """Ranks that each have tokens of their own, and experts for those of all."""

    def __init__(
        self,
        group: Collective,
        ranks: Sequence[int],
        *,
        layout: ParallelLayout,
        num_slots: int,
        device: torch.device,
        kernels: KernelTable,
    ) -> None:
        """`ranks` of the world that are `group`; `num_slots` of experts on all ranks of `layout`
        together.
        """
        slots = [layout.of_rank(rank).experts.experts(num_slots) for rank in ranks]
        firsts = torch.tensor([own.start for own in slots], dtype=torch.int32, device=device)
        self._group, self._experts = group, ExpertRanges(firsts, len(slots[0]))
        self._send, self._sum = kernels[DISPATCH].run, kernels[COMBINE].run

    def send(self, own: Dispatched, num_rows: int) -> Dispatched:
        """This rank's tokens -> those of all ranks, each padded to `num_rows`."""
        x = own.x
        if not isinstance(x, QuantizedActivations):
            ids, weights, x = self._gather(own, [x], num_rows)
            return Dispatched(x, ids, weights, self)
        if num_rows * self._group.size <= UNQUANTIZED_ROWS:
            assert not isinstance(x, ShardedActivations), f"{num_rows} rows are not sharded"
            ids, weights, q, scale, hidden = self._gather(own, [x.q, x.scale, x.hidden], num_rows)
            return Dispatched(QuantizedActivations(hidden, q, scale), ids, weights, self)
        ids, weights, q, scale = self._gather(own, [x.q, x.scale], num_rows)
        unsent = x.hidden[:0]
        sharded = ShardedActivations(unsent, q, scale, group=self._group, first=0)
        return Dispatched(sharded, ids, weights, self)

    def sum(self, out: Tensor, given: Dispatched, num_tokens: int) -> Tensor:
        """What the experts of each rank made of the rows that it was given -> of this rank's tokens
        the sums.
        """
        summed = self._sum(out, given.ids, experts=self._experts, group=self._group)
        return summed[:num_tokens]

    def _gather(self, own: Dispatched, columns: list[Tensor], num_rows: int) -> list[Tensor]:
        """Ids, weights and columns of all ranks."""
        ids, received = self._send(
            own.ids,
            [own.weights, *columns],
            experts=self._experts,
            group=self._group,
            num_rows=num_rows,
        )
        return [ids, *received]


class ExpertDispatch(Protocol):
    """How tokens and experts meet. This rank holds the slots first .. first + len(experts) - 1."""

    first: int
    experts: list[int]  # those that lie in the slots of this rank at start, in order
    table: tuple[int, ...]  # those in all slots at start

    def use_map(self, experts: ExpertMap) -> None:
        """From now on experts lie where the map says."""

    def dispatch(
        self,
        x: Tensor | QuantizedActivations,
        ids: Tensor,
        weights: Tensor,
        tokens: StepTokens,
    ) -> Dispatched:
        """x [T, hidden], the experts that the router chose (-1: none) and weights [T, top_k] ->
        what this rank's experts are given.
        """

    def combine(self, out: Tensor, given: Dispatched, num_tokens: int) -> Partial:
        """out [rows given, P, hidden], what this rank's experts made of it -> [T, ...]."""


class ReplicatedTokens:
    """Every rank of the expert group has all tokens and runs the choices that fall on its experts:
    nothing is sent, and the sum over the group is for the next norm. Without a map, where each
    expert lies in the slot of its own number, no kernel is launched.
    """

    def __init__(
        self,
        table: Sequence[int],
        *,
        context: ParallelContext,
        device: torch.device,
        kernels: KernelTable,
    ) -> None:
        self.table = tuple(table)
        slots = context.layout.experts.experts(len(self.table))
        self.first, self._group = slots.start, context.expert_group
        self.experts = [self.table[slot] for slot in slots]
        assert len(set(self.experts)) == len(self.experts), "a rank has an expert once at start"
        self._place = kernels[PLACE].run
        self._map: ExpertMap | None = None
        if self.table != tuple(range(len(self.table))):
            counts = torch.zeros(1 + max(self.table), dtype=torch.int64, device=device)
            most = max(map(self.table.count, self.table))
            self._map = ExpertMap(self.table, most_copies=most, device=device, counts=counts)

    def use_map(self, experts: ExpertMap) -> None:
        """See `ExpertDispatch`."""
        self._map = experts

    def dispatch(
        self,
        x: Tensor | QuantizedActivations,
        ids: Tensor,
        weights: Tensor,
        tokens: StepTokens,
    ) -> Dispatched:
        """See `ExpertDispatch`."""
        return Dispatched(x, self._slots_of(ids, tokens.positions), weights)

    def _slots_of(
        self, ids: Tensor, positions: Tensor | None, *, are_counted: bool = True
    ) -> Tensor:
        """Where the experts `ids` of tokens at `positions` lie."""
        if self._map is None:
            return ids
        if positions is None:
            positions = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
        slots, copies, counts = self._map.tensors
        counts = counts if are_counted else torch.empty_like(counts)
        return self._place(ids, positions, slots, copies, counts)

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
        table: Sequence[int],
        *,
        context: ParallelContext,
        device: torch.device,
        kernels: KernelTable,
    ) -> None:
        super().__init__(table, context=context, device=device, kernels=kernels)
        layout, self._group = context.layout, context.attention_group
        self._exchange = TokenExchange(
            context.token_group,
            layout.token_ranks,
            layout=layout,
            num_slots=len(self.table),
            device=device,
            kernels=kernels,
        )

    def dispatch(
        self,
        x: Tensor | QuantizedActivations,
        ids: Tensor,
        weights: Tensor,
        tokens: StepTokens,
    ) -> Dispatched:
        """See `ExpertDispatch`."""
        own = super().dispatch(x, ids, weights, tokens)
        return self._exchange.send(own, tokens.most_tokens or len(ids))

    def combine(self, out: Tensor, given: Dispatched, num_tokens: int) -> Partial:
        """See `ExpertDispatch`."""
        return Partial(self._exchange.sum(out, given, num_tokens), self._group)


class SharedOutTokens(AllToAllTokens):
    """Context-parallel ranks share out the tokens of some steps, which meet the experts as those of
    data-parallel ranks do. In other steps each has all tokens of its data-parallel rank, and is
    sent those of the others with its place; what the experts of each place made of them is summed.
    """

    def __init__(
        self,
        table: Sequence[int],
        *,
        context: ParallelContext,
        device: torch.device,
        kernels: KernelTable,
    ) -> None:
        super().__init__(table, context=context, device=device, kernels=kernels)
        layout, self._context = context.layout, context.context_group
        self._between: TokenExchange | None = None  # data-parallel ranks
        if layout.dp > 1:
            self._between = TokenExchange(
                context.data_group,
                layout.data_ranks,
                layout=layout,
                num_slots=len(self.table),
                device=device,
                kernels=kernels,
            )

    def dispatch(
        self,
        x: Tensor | QuantizedActivations,
        ids: Tensor,
        weights: Tensor,
        tokens: StepTokens,
    ) -> Dispatched:
        """See `ExpertDispatch`."""
        if tokens.is_share:
            return super().dispatch(x, ids, weights, tokens)
        slots = self._slots_of(ids, tokens.positions, are_counted=self._context.rank == 0)
        own = Dispatched(x, slots, weights)
        if self._between is None:
            return own
        return self._between.send(own, tokens.most_tokens or len(ids))

    def combine(self, out: Tensor, given: Dispatched, num_tokens: int) -> Partial:
        """See `ExpertDispatch`."""
        if given.exchange is self._exchange:
            return super().combine(out, given, num_tokens)
        if self._between is None:
            summed = out if out.dim() == 2 else out.sum(1)
        else:
            summed = self._between.sum(out, given, num_tokens)
        return Partial(self._context.all_reduce(summed), self._group)


def expert_dispatch(
    table: Sequence[int], *, context: ParallelContext, device: torch.device, kernels: KernelTable
) -> ExpertDispatch:
    """The one for the ranks of `context`. `table`: the expert in each slot; slots are dealt out to
    the ranks in order, and an expert may have several, on different ranks.
    """
    layout = context.layout
    if layout.dp == layout.cp == 1:
        return ReplicatedTokens(table, context=context, device=device, kernels=kernels)
    way = AllToAllTokens if layout.cp == 1 else SharedOutTokens
    return way(table, context=context, device=device, kernels=kernels)
