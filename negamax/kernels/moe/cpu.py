"""Router and experts on the CPU; a token's results do not depend on the batch composition.

For its GEMM, the router pads the tokens as `kernels/rowwise.py` describes. Experts run on tokens
sorted by expert: each selected expert runs once, on one slice of these tokens. A token's outputs
are summed in the order of its selections. A `gemm.linear` kernel runs the GEMMs, with one prepared
weight per expert and projection.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.formats.floats import plain
from negamax.formats.tensor_format import StoredWeight
from negamax.kernels.activations import SILU, Hidden, SwiGlu, unquantized
from negamax.kernels.mlp.cpu import swiglu
from negamax.kernels.moe.op import EXPERTS, ROUTE, Router, SelectedExperts, complete
from negamax.kernels.op import AnyKernel, Kernel, Prepared
from negamax.kernels.rowwise import SAFE_ROWS_MULTIPLE, apply, padded_rows


@dataclass(frozen=True)
class SeparateExperts:
    """One prepared `gemm.linear` weight per expert and projection."""

    gate_up: list[Tensor]  # [2 * width, hidden] per expert
    down: list[Tensor]  # [hidden, width] per expert
    activation: SwiGlu
    prepare: Callable[[StoredWeight], Prepared]

    def tensors(self, expert: int) -> list[Tensor]:
        weights = (self.gate_up[expert], self.down[expert])
        return [weight.to_dense() if weight.is_mkldnn else weight for weight in weights]

    def replace(self, expert: int, tensors: Sequence[Tensor]) -> None:
        """Replace the weights of `expert` with the `tensors` of another expert."""
        for weights, tensor in zip((self.gate_up, self.down), tensors, strict=True):
            if weights[expert].is_mkldnn:
                weights[expert] = self.prepare(plain(tensor))
            else:
                weights[expert].copy_(tensor)


def route(
    x: Hidden, router: Router, *, top_k: int, active: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    gate, bias = router.gate, router.bias
    wide = unquantized(x).float()
    num_tokens = wide.shape[0]
    rows = padded_rows(num_tokens, width=gate.shape[0], multiple=SAFE_ROWS_MULTIPLE)
    if num_tokens == 1:
        wide = wide.expand(rows, -1)
    elif rows > num_tokens:
        wide = F.pad(wide, (0, 0, 0, rows - num_tokens))
    scores = apply(torch.sigmoid, F.linear(wide, gate))[:num_tokens]
    ids = torch.topk(scores + bias, top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    return complete(ids.int(), weights.div_(weights.sum(-1, keepdim=True)), router, active)


ROUTE_KERNEL = Kernel(ROUTE, "padded", route, Router)


def kernel(linear: AnyKernel) -> AnyKernel:
    """Make the `moe.experts` kernel that multiplies with `linear`, a `gemm.linear` kernel."""
    prepare_weight, product = linear.prepare, linear.run

    def prepare(
        gate_up: StoredWeight,
        down: StoredWeight,
        *,
        activation: SwiGlu = SILU,
        shared: bool = False,
    ) -> SeparateExperts:
        return SeparateExperts(
            [prepare_weight(plain(w)) for w in gate_up.values],
            [prepare_weight(plain(w)) for w in down.values],
            activation,
            prepare_weight,
        )

    def run(x: Hidden, selected: SelectedExperts, experts: SeparateExperts) -> Tensor:
        x = unquantized(x)
        compute = _run_one_token if x.shape[0] == 1 else _run_many_tokens
        return compute(x, selected, experts, product)

    return Kernel(
        EXPERTS,
        f"sorted+{linear.provider}",
        run,
        prepare,
        linear.requires,
        linear.dtypes,
        available=linear.available,
    )


def _run_one_token(
    x: Tensor, selected: SelectedExperts, experts: SeparateExperts, product: Callable[..., Tensor]
) -> Tensor:
    """Run the selected experts of one token one after another, without sorting or gathering."""
    gate_up, down, activation = experts.gate_up, experts.down, experts.activation
    (ids, weights, first, count), outputs = selected, []
    for expert in ids[0].tolist():  # host-sync: the host needs the selected experts
        if not first <= expert < first + count:
            outputs.append(torch.zeros_like(x))
            continue
        mixed = swiglu(product(x, gate_up[expert - first]), activation=activation)
        outputs.append(product(mixed, down[expert - first]))
    return _combine(torch.cat(outputs), weights)


def _run_many_tokens(
    x: Tensor, selected: SelectedExperts, experts: SeparateExperts, product: Callable[..., Tensor]
) -> Tensor:
    """Sort (token, selection) pairs by expert, run experts on slices, restore the pairs' order."""
    gate_up, down, activation = experts.gate_up, experts.down, experts.activation
    ids, weights, first, count = selected
    num_tokens, top_k = ids.shape
    if num_tokens == 0:
        return torch.zeros_like(x)
    by_expert, order = ids.flatten().sort(stable=True)
    edges = torch.arange(first, first + count + 1, device=ids.device)
    bounds = torch.searchsorted(by_expert, edges).tolist()  # host-sync: the host slices the rows
    low, high = bounds[0], bounds[-1]
    pairs = order[low:high]
    rows = x.index_select(0, pairs.div(top_k, rounding_mode="floor"))
    slices = [
        (expert, start - low, stop - low)
        for expert, (start, stop) in enumerate(pairwise(bounds))
        if stop > start
    ]
    if not slices:
        return torch.zeros_like(x)
    hidden = torch.cat(
        [product(rows[start:stop], gate_up[expert]) for expert, start, stop in slices]
    )
    mixed = swiglu(hidden, activation=activation)
    y = torch.cat([product(mixed[start:stop], down[expert]) for expert, start, stop in slices])
    is_local = high - low == num_tokens * top_k  # whether this rank has all selected experts
    placed = (y.new_empty if is_local else y.new_zeros)(num_tokens * top_k, x.shape[1])
    return _combine(placed.index_copy_(0, pairs, y), weights)


def _combine(outputs: Tensor, weights: Tensor) -> Tensor:
    """Sum weighted outputs [T * top_k, hidden] to [T, hidden], in the order of selections."""
    num_tokens, top_k = weights.shape
    return (outputs.view(num_tokens, top_k, -1) * weights.unsqueeze(-1)).sum(1).to(outputs.dtype)
