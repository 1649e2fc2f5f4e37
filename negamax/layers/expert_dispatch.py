"""Dispatch of tokens to experts. A dispatch maps selected experts to slots on ranks, sends tokens
to these ranks and combines the expert outputs into a partial sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from negamax.kernels.activations import QuantizedActivations, ShardedActivations
from negamax.kernels.attention.metadata import StepTokens
from negamax.kernels.dispatch.op import COMBINE, DISPATCH, ExpertRanges
from negamax.kernels.moe.op import PLACE
from negamax.layers.weights import LayerSetup
from negamax.parallel.collectives import Collective, Partial

# If all ranks together send at most this many rows, each row is sent quantized and unquantized,
# because kernels for few tokens read unquantized rows.
UNQUANTIZED_ROWS = 64


class ExpertMap:
    """Slots and selection counts of experts, updated in place because CUDA graphs read them."""

    def __init__(
        self, table: Sequence[int], *, most_copies: int, device: torch.device, counts: Tensor
    ) -> None:
        """`table`: the expert in each slot; no expert ever has more than `most_copies` slots.
        `counts` [experts] int64: incremented for each selection of an expert.
        """
        num_experts = len(counts)
        self._slots = torch.empty(num_experts, most_copies, dtype=torch.int32, device=device)
        self._copies = torch.empty(num_experts, dtype=torch.int32, device=device)
        self._counts = counts
        self.update(table)

    def update(self, table: Sequence[int]) -> None:
        """Use `table` from the next launch on."""
        num_experts, most = self._slots.shape
        slots: list[list[int]] = [[] for _ in range(num_experts)]
        for slot, expert in enumerate(table):
            slots[expert].append(slot)
        # one row per expert: number of copies, then slots of the copies, padded with the first slot
        rows = [[len(own), *own, *own[:1] * (most - len(own))] for own in slots]
        packed = torch.tensor(rows, dtype=torch.int32)
        if self._slots.is_cuda:
            packed = packed.pin_memory().to(self._slots.device, non_blocking=True)
        self._copies.copy_(packed[:, 0])
        self._slots.copy_(packed[:, 1:])

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return slots, copies and counts, the arguments of `moe.place`."""
        return self._slots, self._copies, self._counts


@dataclass(frozen=True)
class Dispatched:
    """Activations of T tokens on a rank that stores some of the tokens' selected experts."""

    x: Tensor | QuantizedActivations
    ids: Tensor  # [T, top_k] expert slots, -1: none
    weights: Tensor  # [T, top_k], routing weights
    exchange: "TokenExchange | None" = None  # exchange that sent the rows; None: rows were not sent


class TokenExchange:
    """Exchanges tokens between ranks that have different tokens, and sums the expert outputs."""

    def __init__(
        self, group: Collective, ranks: Sequence[int], *, num_slots: int, setup: LayerSetup
    ) -> None:
        """`ranks`: world ranks of `group`. `num_slots`: number of expert slots of all ranks."""
        layout, device, kernels = setup.context.layout, setup.weights.device, setup.kernels
        slots = [layout.replace_rank(rank).experts.experts(num_slots) for rank in ranks]
        firsts = torch.tensor([own.start for own in slots], dtype=torch.int32, device=device)
        self._group, self._experts = group, ExpertRanges(firsts, len(slots[0]))
        self._send, self._sum = kernels[DISPATCH].run, kernels[COMBINE].run

    def send(self, own: Dispatched, num_rows: int) -> Dispatched:
        """Gather the tokens of all ranks. The tokens of each rank are padded to `num_rows`."""
        x = own.x
        if not isinstance(x, QuantizedActivations):
            ids, weights, x = self._gather(own, [x], num_rows)
            return Dispatched(x, ids, weights, self)
        if num_rows * self._group.size <= UNQUANTIZED_ROWS:
            assert not isinstance(x, ShardedActivations), f"{num_rows} rows must not be sharded"
            ids, weights, q, scale, hidden = self._gather(own, [x.q, x.scale, x.hidden], num_rows)
            return Dispatched(QuantizedActivations(hidden, q, scale), ids, weights, self)
        ids, weights, q, scale = self._gather(own, [x.q, x.scale], num_rows)
        sharded = ShardedActivations(x.hidden[:0], q, scale, group=self._group, first=0)
        return Dispatched(sharded, ids, weights, self)

    def sum(self, out: Tensor, given: Dispatched, num_tokens: int) -> Tensor:
        """Sum the expert outputs over all ranks; return the sums for this rank's tokens."""
        return self._sum(out, given.ids, experts=self._experts, group=self._group)[:num_tokens]

    def _gather(self, own: Dispatched, columns: list[Tensor], num_rows: int) -> list[Tensor]:
        sent, experts, group = [own.weights, *columns], self._experts, self._group
        ids, received = self._send(own.ids, sent, experts=experts, group=group, num_rows=num_rows)
        return [ids, *received]


class ReplicatedTokens:
    """The dispatch for an expert group in which every rank has all tokens. Each rank runs the
    experts in its own slots. No token is sent; the next norm sums outputs over the group. Without
    an `ExpertMap` in `map`, expert i is in slot i and no kernel is launched. `slots`: this rank's
    slots. `experts`: the initial expert of each of these slots.
    """

    def __init__(self, table: Sequence[int], *, setup: LayerSetup) -> None:
        self.table, context = tuple(table), setup.context  # initial expert of each slot
        self.slots, self._group = context.layout.experts.experts(len(table)), context.expert_group
        self.experts = [table[slot] for slot in self.slots]
        assert len(set(self.experts)) == len(self.experts), "a rank has two copies of an expert"
        self._place = setup.kernels[PLACE].run
        self.map: ExpertMap | None = None
        if self.table != tuple(range(len(table))):
            device = setup.weights.device
            counts = torch.zeros(1 + max(table), dtype=torch.int64, device=device)
            most = max(map(self.table.count, table))
            self.map = ExpertMap(table, most_copies=most, device=device, counts=counts)

    def dispatch(
        self, x: Tensor | QuantizedActivations, ids: Tensor, weights: Tensor, tokens: StepTokens
    ) -> Dispatched:
        """Map x [T, hidden], expert ids and weights [T, top_k] to inputs of this rank's experts."""
        return Dispatched(x, self._slots_of(ids, tokens.positions), weights)

    def _slots_of(
        self, ids: Tensor, positions: Tensor | None, *, are_counted: bool = True
    ) -> Tensor:
        """Find the slots of the experts `ids` of tokens at `positions`."""
        if self.map is None:
            return ids
        if positions is None:
            positions = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
        slots, copies, counts = self.map.tensors
        counts = counts if are_counted else torch.empty_like(counts)
        return self._place(ids, positions, slots, copies, counts)

    def combine(self, out: Tensor, given: Dispatched, num_tokens: int) -> Partial:
        """Return this rank's expert outputs, out [input rows, P, hidden], as partial sums."""
        return Partial(out, self._group)


class DistributedTokens(ReplicatedTokens):
    """The dispatch for data-parallel ranks, which have different tokens. Each rank pads its tokens
    to the largest number on any rank, sends them to the other ranks, and receives summed outputs.

    In a sharded step, context-parallel ranks also exchange their shards of tokens. In an unsharded
    step, context-parallel ranks have the same tokens. In unsharded steps, only ranks with the same
    context-parallel index exchange tokens, and results are summed over context-parallel ranks.
    """

    def __init__(self, table: Sequence[int], *, setup: LayerSetup) -> None:
        super().__init__(table, setup=setup)
        context, layout = setup.context, setup.context.layout
        self._context = context.context_group
        self._group = context.attention_group
        # `TokenExchange` of sharded steps and of other steps; None: the group has one rank
        self._sharded, self._between = (
            TokenExchange(group, ranks, num_slots=len(self.table), setup=setup)
            if len(ranks) > 1
            else None
            for group, ranks in (
                (context.token_group, layout.token_ranks),
                (context.data_group, layout.data_ranks),
            )
        )

    def dispatch(
        self, x: Tensor | QuantizedActivations, ids: Tensor, weights: Tensor, tokens: StepTokens
    ) -> Dispatched:
        is_counted = tokens.is_share or self._context.rank == 0
        own = Dispatched(x, self._slots_of(ids, tokens.positions, are_counted=is_counted), weights)
        exchange = self._sharded if tokens.is_share else self._between
        return own if exchange is None else exchange.send(own, tokens.most_tokens or len(ids))

    def combine(self, out: Tensor, given: Dispatched, num_tokens: int) -> Partial:
        if given.exchange is not None:
            summed = given.exchange.sum(out, given, num_tokens)
        else:
            summed = out if out.dim() == 2 else out.sum(1)
        if given.exchange is None or given.exchange is not self._sharded:
            summed = self._context.all_reduce(summed)
        return Partial(summed, self._group)


def expert_dispatch(table: Sequence[int], *, setup: LayerSetup) -> ReplicatedTokens:
    """Return the dispatch for the ranks of `setup`. `table`: the expert in each slot. Every rank
    has the same number of consecutive slots.
    """
    layout = setup.context.layout
    kind = ReplicatedTokens if layout.dp == layout.cp == 1 else DistributedTokens
    return kind(table, setup=setup)
