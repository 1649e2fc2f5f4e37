"""Mixture of experts: every rank routes its tokens and runs its routed and shared experts."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.formats.tensor_format import TensorFormat
from negamax.kernels.activations import SILU, QuantizedActivations, SwiGlu
from negamax.kernels.attention.metadata import StepTokens
from negamax.kernels.moe.op import EXPERTS, ROUTE, ExpertWeights, SelectedExperts
from negamax.kernels.norm.op import ADD_RMS
from negamax.kernels.quantize.op import QUANTIZE
from negamax.layers.basic import RmsNorm
from negamax.layers.expert_dispatch import ExpertMap, expert_dispatch
from negamax.layers.mlp import Mlp
from negamax.layers.names import MlpNames, MoeNames
from negamax.layers.weights import LayerSetup, MatrixWeight, WeightSlot, choose_kernel
from negamax.parallel.collectives import Partial
from negamax.quantization.scheme import WeightFormat

ALL_TOKENS = StepTokens()
# Maximum number of tokens for which the shared expert runs on a second stream. The second stream
# makes an M3.1 step on an H200 2 % faster at 1 token, 1 % faster at 16 and 1 % slower at 64.
_FORK_MAX_M = 32


class SparseMoe:
    """A router in fp32 on every rank, and SwiGLU experts that are split by expert and by width.

    The shared expert is one more expert that every token selects. The shared expert is a separate
    `Mlp` if its format or size differs from the routed experts', or if ranks hold different
    experts. The shared `Mlp` is split by width over the ranks that have the same tokens.
    """

    def __init__(
        self,
        names: MoeNames,
        *,
        layer: int,
        hidden_size: int,
        width: int,
        num_experts: int,
        top_k: int,
        activation: SwiGlu = SILU,
        routed_scaling: float = 1.0,
        shared_width: int = 0,
        setup: LayerSetup,
        table: Sequence[int] | None = None,
    ) -> None:
        """`routed_scaling`: factor of the routing weights. `shared_width`: width of the shared
        expert (0: none). `table`: the expert in each slot (None: the layout's table).
        """
        experts = [names.expert(number) for number in range(num_experts)]
        layout, kernels, weights = setup.context.layout, setup.kernels, setup.weights
        table = table or layout.expert_slots(num_experts, layer)
        self._shared_mlp: Mlp | None = None
        if shared_width:
            shared = names.shared
            assert shared is not None
            alike = _formats(experts[0], weights) == _formats(shared, weights)
            if alike and shared_width == width and layout.experts.ep == 1:
                table = (*table, num_experts)
                experts.append(shared)
            else:
                sizes = {"hidden_size": hidden_size, "width": shared_width}
                self._shared_mlp = Mlp(shared, **sizes, activation=activation, setup=setup)
        self._dispatch = expert_dispatch(table, setup=setup)
        self.table = self._dispatch.table  # the initial expert of each slot
        self.num_experts, self.top_k = num_experts, top_k
        self._scaling, self._between = routed_scaling, activation
        self._is_shared = len(experts) > num_experts
        self._route_kernel = kernels[ROUTE]
        self._norm_route = kernels.fusion(ADD_RMS, ROUTE)
        self.slots = [
            *self._allocate_router(names, hidden_size, weights),
            *self._allocate_experts(experts, hidden_size, width, setup),
            *(() if self._shared_mlp is None else self._shared_mlp.slots),
        ]
        self.activation = wanted = self._experts_kernel.activation
        self._quantize: Any = None
        if self._shared_mlp is not None and self._shared_mlp.activation != wanted:
            # the norm returns plain activations, which FP8 GEMMs quantize themselves
            self.activation = None
            self._quantize = None if wanted is None else kernels[QUANTIZE].run
        self._router: Any = None
        self._prepared: ExpertWeights | None = None
        self._observed: Tensor | None = None

    def _allocate_router(
        self, names: MoeNames, hidden_size: int, weights: WeightFormat
    ) -> list[WeightSlot]:
        shape, device = (self.num_experts, hidden_size), weights.device
        self._gate = torch.empty(shape, dtype=torch.float32, device=device)
        self._bias = torch.empty(self.num_experts, dtype=torch.float32, device=device)
        return [
            WeightSlot(names.router, shape, target=self._gate),
            WeightSlot(names.router_bias, shape[:1], target=self._bias),
        ]

    def _allocate_experts(
        self, experts: Sequence[MlpNames], hidden_size: int, width: int, setup: LayerSetup
    ) -> list[WeightSlot]:
        """Create the matrices of this rank's experts. Gate rows come before up rows."""
        here, view = self._dispatch.experts, setup.context.layout.experts
        local = [name for each in here for name in experts[each]]
        kernel, held, reason = choose_kernel(EXPERTS, local, setup, columns=hidden_size)
        self._experts_kernel = kernel
        narrow, unit = held.split_width(width // view.tp, kernel.reads)
        share = view.width(width, unit=unit)
        rows, everything = share.part, range(hidden_size)
        padded = len(rows) < share.size
        allocate = partial(MatrixWeight, weights=setup.weights, padded=padded, reason=reason)
        self._gate_up = allocate((len(here), 2 * share.size, hidden_size), held)
        self._down = allocate((len(here), hidden_size, share.size), narrow)
        slots: list[WeightSlot] = []
        wide, tall = (width, hidden_size), (hidden_size, width)
        for expert, its in enumerate(experts):
            mine = expert in here and len(rows) > 0
            index = here.index(expert) if mine else 0
            across, along = ((rows, everything), (everything, rows)) if mine else (None, None)
            for name, matrix, shape, region, first in (
                (its.gate, self._gate_up, wide, across, 0),
                (its.up, self._gate_up, wide, across, share.size),
                (its.down, self._down, tall, along, 0),
            ):
                slots += matrix.slots(name, shape, region=region, at=(index, first))
        return slots

    def finish_loading(self) -> None:
        """Pack the router and the experts for their kernels and free the unpacked copies."""
        route, experts = self._route_kernel.prepare, self._experts_kernel.prepare
        shared = self._is_shared
        self._router = route(self._gate, self._bias, scaling=self._scaling, shared=shared)
        self._prepared = experts(
            self._gate_up.take(), self._down.take(), activation=self._between, shared=shared
        )
        if self._shared_mlp is not None:
            self._shared_mlp.finish_loading()
        del self._gate, self._bias, self._gate_up, self._down

    def rank_experts(self, x: Tensor) -> Tensor | None:
        """Return the selection scores [T, experts] fp32 of all experts for x [T, hidden], or None
        if the router is packed for a kernel.
        """
        if self._route_kernel is not ROUTE.reference:
            return None
        scores = torch.sigmoid(F.linear(x.float(), self._router.gate))
        return torch.add(scores, self._router.bias)

    @property
    def slots_here(self) -> range:
        """The expert slots of this rank."""
        return self._dispatch.slots

    @property
    def expert_weights(self) -> ExpertWeights:
        """The loaded weights of the experts in this rank's slots."""
        assert self._prepared is not None, "load the expert weights first"
        return self._prepared

    def use_map(self, experts: ExpertMap) -> None:
        """Use the map `experts` from the next call on, except in CUDA graphs captured before."""
        self._dispatch.map = experts

    def observe(self, ids: Tensor | None) -> None:
        """In each later call, write the selected experts of the call's first tokens to `ids`
        [max_tokens, top_k] int32. A CUDA graph writes to the tensor with which it was captured.
        """
        self._observed = ids

    def __call__(
        self, x: Tensor | QuantizedActivations, tokens: StepTokens = ALL_TOKENS
    ) -> Partial:
        """Map x [T, hidden] to P partial sums, [T, P, hidden]. Padding tokens use no expert."""
        return self.run_experts(x, *self._route(x, tokens), tokens)

    def run_after(
        self, norm: RmsNorm, part: Partial, residual: Tensor, tokens: StepTokens = ALL_TOKENS
    ) -> Partial:
        """Run the experts on the output of `norm`, which adds `part` to `residual`."""
        return self.run_experts(*self.route_after(norm, part, residual, tokens), tokens)

    def route_after(
        self, norm: RmsNorm, part: Partial, residual: Tensor, tokens: StepTokens = ALL_TOKENS
    ) -> tuple[Tensor | QuantizedActivations, Tensor, Tensor]:
        """Return the output of `norm` [T, hidden], and ids and weights of the selected experts."""
        if self._norm_route is None or part.group.size > 1:
            x = norm(part, residual)
            return x, *self._route(x, tokens)
        x, ids, weights = self._norm_route.run(
            part.x, residual, norm.prepared, self._router,
            top_k=self.top_k, active=tokens.num_actual_tokens,
        )  # fmt: skip
        return x, ids, weights

    def _route(self, x: Tensor | QuantizedActivations, tokens: StepTokens) -> tuple[Tensor, Tensor]:
        active = tokens.num_actual_tokens
        ids, weights = self._route_kernel.run(x, self._router, top_k=self.top_k, active=active)
        return ids, weights

    def run_experts(
        self,
        x: Tensor | QuantizedActivations,
        ids: Tensor,
        weights: Tensor,
        tokens: StepTokens = ALL_TOKENS,
    ) -> Partial:
        """Run the selected experts. `moe.route` returns `ids` and `weights`, [T, C]."""
        if self._observed is not None:
            count = min(len(ids), len(self._observed))
            self._observed[:count].copy_(ids[:count, : self.top_k])
        shared, beside = None, None
        if self._shared_mlp is not None:
            beside = _fork(ids)
            with nullcontext() if beside is None else torch.cuda.stream(beside):
                shared = self._shared_mlp(x)
        if self._quantize is not None:
            x = self._quantize(x)
        given, slots = self._dispatch.dispatch(x, ids, weights, tokens), self.slots_here
        selected = SelectedExperts(given.ids, given.weights, slots.start, len(slots))
        out: Tensor = self._experts_kernel.run(given.x, selected, self.expert_weights)
        part = self._dispatch.combine(out, given, len(ids))
        if shared is not None:
            if beside is not None:
                torch.cuda.current_stream().wait_stream(beside)
            (part.x if part.x.dim() == 2 else part.x[:, 0]).add_(shared.x)
        return part


def _fork(ids: Tensor) -> torch.cuda.Stream | None:
    """Return a side stream that waits for the current stream, in captured steps of few tokens.

    `ids`: [T, top_k]. Return None if a step is not captured or has many tokens.
    """
    if not ids.is_cuda or len(ids) > _FORK_MAX_M or not torch.cuda.is_current_stream_capturing():
        return None
    stream = _side_stream(ids.device)
    stream.wait_stream(torch.cuda.current_stream())
    return stream


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _formats(names: MlpNames, weights: WeightFormat) -> set[TensorFormat]:
    return {weights.stored(name) for name in names}


def mixtures(layers: Iterable[object]) -> list[SparseMoe]:
    """List the `SparseMoe` parts of `layers`, in order."""
    return [
        part for layer in layers for part in vars(layer).values() if isinstance(part, SparseMoe)
    ]
