"""Mixture of experts: the router, the placement of experts, and the experts.

    s = sigmoid(gate x)   (fp32)        ids = top-k of s + bias
    weights = scaling * s[ids] / sum(s[ids])
    out = sum_i weights[i] * down[ids[i]] (silu(gate[ids[i]] x) * (up[ids[i]] x))

The bias affects the selection only, not the weights. The renormalization has no epsilon. silu(a) *
b stands for the model's `SwiGlu`. A shared expert is every token's last selection, with weight 1.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.formats.floats import PLAIN
from negamax.formats.tensor_format import StoredWeight
from negamax.kernels.activations import SILU, Hidden, SwiGlu, unquantized
from negamax.kernels.norm.op import WIDE_ERROR, add_rms
from negamax.kernels.op import EXACT, Prepared, op, rounding_tolerance
from negamax.kernels.quantize.stored import dequantize


@dataclass(frozen=True)
class Router:
    """Weights of the router, and the factor of the routing weights."""

    gate: Tensor  # [experts, hidden] fp32
    bias: Tensor  # [experts] fp32, added to the scores before the top-k selection
    _: KW_ONLY
    scaling: float = 1.0
    shared: bool = False  # whether every token also selects a shared expert with index `experts`


def prepare_router(
    gate: Tensor, bias: Tensor, /, *, scaling: float = 1.0, shared: bool = False
) -> Prepared:
    """Return a `Router` with gate [experts, hidden] fp32 and bias [experts] fp32."""
    return Router(gate, bias, scaling=scaling, shared=shared)


def route(
    x: Hidden, router: Prepared, /, *, top_k: int, active: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Select experts for x [T, hidden]: ids [T, C] int32 and weights [T, C] fp32.

    C is top_k, or top_k + 1 with a shared expert. Rows with index `active` ([1] int32) or above are
    padding and get ids -1 and weights 0.
    """
    scores = torch.sigmoid(F.linear(unquantized(x).float(), router.gate))  # [T, experts]
    ids = torch.topk(scores + router.bias, top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    return complete(ids.int(), weights / weights.sum(-1, keepdim=True), router, active)


def complete(
    ids: Tensor, weights: Tensor, router: Router, active: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Multiply routing weights by the scaling factor, append the shared expert, mask padding."""
    if router.scaling != 1.0:
        weights = weights * router.scaling
    if router.shared:
        ids = F.pad(ids, (0, 1), value=len(router.gate))
        weights = F.pad(weights, (0, 1), value=1.0)
    if active is None:
        return ids, weights
    padding = (torch.arange(ids.shape[0], device=ids.device) >= active).unsqueeze(-1)
    return ids.masked_fill(padding, -1), weights.masked_fill(padding, 0.0)


def norm_route(
    x: Tensor,
    residual: Tensor,
    norm: Prepared,
    router: Prepared,
    /,
    *,
    top_k: int,
    active: Tensor | None = None,
) -> tuple[Hidden, Tensor, Tensor]:
    """Run `add_rms`, then `route`; return the norm, expert ids and routing weights."""
    normed = add_rms(x, residual, norm)
    return normed, *route(normed, router, top_k=top_k, active=active)


def place(
    ids: Tensor, positions: Tensor, slots: Tensor, copies: Tensor, counts: Tensor, /
) -> Tensor:
    """Map selected experts ids [T, C] int32 (-1: none) to expert slots [T, C] int32.

    positions [T] int64 are the tokens' positions. Expert e has copies in slots[e, : copies[e]]
    (slots [E, max_copies], copies [E], int32). A token's position and ids select the copy,
    independent of the batch composition. Each selection of expert e adds 1 to counts[e] ([E]
    int64).
    """
    is_chosen = ids >= 0
    expert = ids.clamp_min(0).long()
    counts.copy_(counts.index_add(0, expert.flatten(), is_chosen.flatten().to(counts.dtype)))
    turn = (positions + ids.sum(1)).unsqueeze(1) % copies[expert]
    return torch.where(is_chosen, slots[expert, turn], -1)


class SelectedExperts(NamedTuple):
    """The selected experts of T tokens, and the range of experts that a rank has."""

    ids: Tensor  # [T, C] int32; -1 and experts of other ranks add nothing to the output
    weights: Tensor  # [T, C] fp32, routing weights of the selected experts
    first: int  # index of the rank's first expert
    num_local: int  # number of experts that the rank has


class ExpertWeights(Protocol):
    """Weights from the `prepare` of `EXPERTS`; the tensors of an expert can be replaced."""

    def tensors(self, expert: int) -> list[Tensor]:
        """Return all tensors of the expert with index `expert`, as copies or views."""

    def replace(self, expert: int, tensors: Sequence[Tensor]) -> None:
        """Overwrite the tensors of `expert` with `tensors`, which have the same sizes."""
        for own, tensor in zip(self.tensors(expert), tensors, strict=True):
            own.copy_(tensor)


@dataclass(frozen=True)
class StackedExperts(ExpertWeights):
    """Plain weights of all experts, stacked."""

    gate_up: Tensor  # [experts, 2 * width, hidden], gate rows first
    down: Tensor  # [experts, hidden, width]
    activation: SwiGlu

    def tensors(self, expert: int) -> list[Tensor]:
        return [self.gate_up[expert], self.down[expert]]


def stack(
    gate_up: StoredWeight, down: StoredWeight, /, *, activation: SwiGlu = SILU, shared: bool = False
) -> ExpertWeights:
    """Stack gate_up [experts, 2 * width, hidden], gate rows first, and down [experts, hidden,
    width].

    Plain weights are kept; other weights are dequantized to fp32. With `shared` the last expert is
    the last selection of every token except padding, so kernels need not search for the tokens of
    this expert.
    """
    return StackedExperts(_values(gate_up), _values(down), activation)


def _values(weight: StoredWeight) -> Tensor:
    if weight.format is PLAIN:
        return weight.values
    count = len(weight.values)
    experts = ({name: t[index] for name, t in weight.tensors.items()} for index in range(count))
    return torch.stack([dequantize(weight.format, tensors) for tensors in experts])


def experts(x: Hidden, selected: SelectedExperts, stacked: Prepared, /) -> Tensor:
    """Run the experts `stacked` on x [T, hidden] -> [T, hidden] or partial sums [T, P, hidden]."""
    gate_up, down, activation = stacked.gate_up, stacked.down, stacked.activation
    x = unquantized(x)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(selected.num_local):
        tokens, choices = torch.where(selected.ids == selected.first + expert)
        y = F.linear(activation(F.linear(x[tokens], gate_up[expert])), down[expert])
        out = out.index_add(0, tokens, y * selected.weights[tokens, choices, None])
    return out.to(x.dtype)


ROUTE = op(
    "moe.route",
    route,
    prepare_router,
    "sigmoid scores, biased top-k, renormalized weights",
    rounding_tolerance(reason="fp32 throughout, in every dtype"),
    wide_error=1e-5,
)
NORM_ROUTE = op(
    "moe.norm_route",
    norm_route,
    prepare_router,
    "the norm before the experts, and the router",
    rounding_tolerance(scale=2.0, reason="as norm.add_rms"),
    sequence=("norm.add_rms", "moe.route"),
    wide_error=WIDE_ERROR,
)
PLACE = op("moe.place", place, None, "slots of the selected experts, with counts", EXACT)
EXPERTS = op(
    "moe.experts",
    experts,
    stack,
    "SwiGLU networks of the selected experts, weighted sum in fp32",
    rounding_tolerance(
        reason="three products and the activation are rounded to the dtype; |out| about 0.5"
    ),
    # measured error: 4.3e-2 with FP8 weights and activations, 0.3e-2 with FP8 weights only
    wide_error=6e-2,
)
