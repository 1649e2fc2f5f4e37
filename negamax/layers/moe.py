"""Mixture of experts: every rank routes its tokens and runs its share of the experts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from negamax.kernels.activations import QuantizedActivations
from negamax.kernels.registry import KernelTable
from negamax.kernels.signatures import EXPERTS, ROUTE
from negamax.layers.expert_dispatch import ExpertDispatch, ExpertTable, ReplicatedTokens
from negamax.layers.names import MoeNames
from negamax.layers.partial import Partial
from negamax.layers.weights import MatrixWeight, WeightSlot, choose_kernel
from negamax.parallel.context import ParallelContext
from negamax.quantization.scheme import WeightFormat


class SparseMoe:
    """Router (replicated, fp32) and SwiGLU experts, split by expert and by width as the layout's
    expert view says.
    """

    def __init__(
        self,
        names: MoeNames,
        *,
        hidden_size: int,
        width: int,
        num_experts: int,
        top_k: int,
        context: ParallelContext,
        kernels: KernelTable,
        weights: WeightFormat,
        table: ExpertTable | None = None,
    ) -> None:
        """`table`: where experts lie; None: each in the place of its own number."""
        self._dispatch: ExpertDispatch = ReplicatedTokens(
            table or ExpertTable.identity(num_experts), context=context, device=weights.device
        )
        self.num_experts, self.top_k = num_experts, top_k
        self._route_kernel = kernels[ROUTE]
        self._gate = torch.empty(
            num_experts, hidden_size, dtype=torch.float32, device=weights.device
        )
        self._bias = torch.empty(num_experts, dtype=torch.float32, device=weights.device)
        self.slots = [
            WeightSlot(names.router, (num_experts, hidden_size), target=self._gate),
            WeightSlot(names.router_bias, (num_experts,), target=self._bias),
        ]
        # gate rows, then up rows
        parts = (names.gate, names.up, names.down)
        local = [
            name.replace("*", str(expert)) for expert in self._dispatch.experts for name in parts
        ]
        self._experts_kernel, held, reason = choose_kernel(
            EXPERTS, local, kernels=kernels, weights=weights
        )
        self.activation = self._experts_kernel.activation
        count = len(self._dispatch.experts)
        view, reads = context.layout.experts, self._experts_kernel.reads
        narrow, unit = held.split_width(width // view.tp, reads)
        share = view.width(width, unit=unit)
        rows, everything = share.part, range(hidden_size)
        padded = len(rows) < share.size
        allocate = partial(MatrixWeight, weights=weights, padded=padded, reason=reason)
        self._gate_up = allocate((count, 2 * share.size, hidden_size), held)
        self._down = allocate((count, hidden_size, share.size), narrow)
        wide, tall = (width, hidden_size), (hidden_size, width)
        for expert in range(num_experts):
            mine = expert in self._dispatch.experts and len(rows) > 0
            index = self._dispatch.experts.index(expert) if mine else 0
            across, along = ((rows, everything), (everything, rows)) if mine else (None, None)
            for name, matrix, shape, region, first in (
                (names.gate, self._gate_up, wide, across, 0),
                (names.up, self._gate_up, wide, across, share.size),
                (names.down, self._down, tall, along, 0),
            ):
                self.slots += matrix.slots(
                    name.replace("*", str(expert)), shape, region=region, at=(index, first)
                )
        self._router: Any = None
        self._prepared: Any = None
        self._observed: Tensor | None = None

    def finish_loading(self) -> None:
        """Put the router and the experts into their kernels' layouts; the plain copies are
        freed.
        """
        route, experts = self._route_kernel.prepare, self._experts_kernel.prepare
        self._router = route(self._gate, self._bias)
        self._prepared = experts(self._gate_up.take(), self._down.take())
        del self._gate, self._bias, self._gate_up, self._down

    def observe(self, ids: Tensor | None) -> None:
        """From now on the experts of each call's first tokens are written to `ids` [max_tokens,
        top_k] int32 (None: stop). A graph keeps the tensor that it was captured with.
        """
        self._observed = ids

    def __call__(
        self, x: Tensor | QuantizedActivations, *, active: Tensor | None = None
    ) -> Partial:
        """x [T, hidden] -> [T, P, hidden], P parts of this rank's part.

        `active` [1] int32: rows from there on are padding and reach no expert.
        """
        ids, weights = self._route_kernel.run(x, self._router, top_k=self.top_k, active=active)
        if self._observed is not None:
            count = min(len(ids), len(self._observed))
            self._observed[:count].copy_(ids[:count])
        given = self._dispatch.dispatch(x, ids, weights)
        out: Tensor = self._experts_kernel.run(
            given.x,
            given.ids,
            given.weights,
            self._prepared,
            first=self._dispatch.first,
            count=len(self._dispatch.experts),
        )
        return self._dispatch.combine(out)


def mixtures(layers: Iterable[object]) -> list[SparseMoe]:
    """The mixtures of experts among the parts of `layers`, in order."""
    return [
        part for layer in layers for part in vars(layer).values() if isinstance(part, SparseMoe)
    ]
