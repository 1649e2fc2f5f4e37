"""Definitions of the mixture-of-experts ops.

    s = sigmoid(gate x)   (fp32)        ids = top-k of s + bias        weights = s[ids] / sum(s[ids])
    out = sum_i weights[i] * down[ids[i]] (silu(gate[ids[i]] x) * (up[ids[i]] x))

The bias decides who is chosen, never how much a chosen expert counts; no epsilon in the renormalisation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.kernels.gemm.padded import SAFE_MULTIPLE
from negamax.kernels.op import Case, Cost, Kernel, Op, num_bytes, randn, rounding_tolerance
from negamax.kernels.rowwise import apply, padded_rows


def route(x: Tensor, gate: Tensor, bias: Tensor, *, top_k: int) -> tuple[Tensor, Tensor]:
    """x [T, hidden], gate [experts, hidden] fp32, bias [experts] fp32 -> ids [T, top_k] int64, weights [T, top_k] fp32.

    Rows are padded so that a token's scores do not depend on how many others there are (`rowwise`, `gemm/padded.py`).
    """
    num_tokens, wide = x.shape[0], x.float()
    rows = padded_rows(num_tokens, width=gate.shape[0], multiple=SAFE_MULTIPLE)
    if num_tokens == 1:
        wide = wide.expand(rows, -1)
    elif rows > num_tokens:
        wide = torch.cat((wide, wide.new_zeros(rows - num_tokens, wide.shape[1])))
    scores = apply(torch.sigmoid, F.linear(wide, gate))[:num_tokens]
    ids = torch.topk(scores + bias, top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    return ids, weights.div_(weights.sum(-1, keepdim=True))


Experts = tuple[Tensor, Tensor]


def stack(gate_up: Tensor, down: Tensor) -> Experts:
    """gate_up [experts, 2 * width, hidden] (gate rows first), down [experts, hidden, width], as they are."""
    return gate_up, down


def experts(x: Tensor, ids: Tensor, weights: Tensor, prepared: Experts, *, first: int, count: int) -> Tensor:
    """x [T, hidden], ids [T, top_k] int64, weights [T, top_k] fp32 -> [T, hidden].

    `prepared` holds experts first .. first + count - 1; the choices of other experts add nothing.
    """
    gate_up, down = prepared
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(count):
        tokens, choices = torch.where(ids == first + expert)
        gate, up = F.linear(x[tokens], gate_up[expert]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, down[expert])
        out.index_add_(0, tokens, y * weights[tokens, choices, None])
    return out.to(x.dtype)


def _route_cases(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    cases = []
    for num_tokens, hidden, num_experts, top_k, bias in (
        (0, 16, 4, 2, 1.0),
        (1, 256, 8, 2, 10.0),
        (9, 37, 32, 8, 4.0),
        (40, 56, 5, 5, 0.0),
    ):
        tensors = {
            "x": randn(num_tokens, hidden, dtype=dtype, generator=generator),
            "gate": randn(num_experts, hidden, dtype=torch.float32, generator=generator, scale=0.2),
            "bias": randn(num_experts, dtype=torch.float32, generator=generator, scale=bias),
        }
        label = f"T={num_tokens} hidden={hidden} experts={num_experts} top_k={top_k} bias={bias:g}"
        cases.append(Case(label, tensors, {"top_k": top_k}))
    return cases


def _experts_cases(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    cases = []
    for num_tokens, hidden, width, num_experts, top_k, first, count in (
        (0, 16, 8, 4, 2, 0, 4),
        (1, 256, 512, 8, 2, 0, 8),
        (1, 37, 24, 6, 3, 2, 2),
        (5, 56, 16, 4, 1, 3, 1),
        (70, 64, 32, 8, 2, 0, 8),
    ):
        scores = torch.rand(num_tokens, num_experts, generator=generator)
        weights = torch.rand(num_tokens, top_k, generator=generator) + 0.1
        tensors = {
            "x": randn(num_tokens, hidden, dtype=dtype, generator=generator),
            "ids": scores.topk(top_k, dim=-1).indices,
            "weights": weights / weights.sum(-1, keepdim=True),
            "gate_up": randn(count, 2 * width, hidden, dtype=dtype, generator=generator, scale=hidden**-0.5),
            "down": randn(count, hidden, width, dtype=dtype, generator=generator, scale=width**-0.5),
        }
        label = (
            f"T={num_tokens} hidden={hidden} width={width} top_k={top_k} experts {first}..{first + count - 1} of {num_experts}"
        )
        cases.append(Case(label, tensors, {"first": first, "count": count}))
    return cases


def _route_apply(kernel: Kernel, case: Case) -> tuple[Tensor, ...]:
    t = case.tensors
    ids, weights = kernel.run(t["x"], t["gate"], t["bias"], top_k=case.numbers["top_k"])
    order = ids.argsort(-1)  # the order of the choices is the provider's own
    return ids.gather(1, order), weights.gather(1, order)


def _experts_apply(kernel: Kernel, case: Case) -> tuple[Tensor, ...]:
    t = case.tensors
    assert kernel.prepare is not None
    prepared = kernel.prepare(t["gate_up"], t["down"])
    return (kernel.run(t["x"], t["ids"], t["weights"], prepared, **case.numbers),)


def _route_cost(case: Case) -> Cost:
    t = case.tensors
    return Cost(num_bytes=num_bytes(t["x"], t["gate"], t["bias"]), flops=2 * t["x"].shape[0] * t["gate"].numel())


def _experts_cost(case: Case) -> Cost:
    t, n = case.tensors, case.numbers
    chosen = t["ids"][(t["ids"] >= n["first"]) & (t["ids"] < n["first"] + n["count"])]
    hit = chosen.unique().numel()
    per_expert = t["gate_up"][0].numel() + t["down"][0].numel()
    weight_bytes = hit * per_expert * t["x"].element_size()
    return Cost(num_bytes=weight_bytes + 2 * num_bytes(t["x"]), flops=2 * chosen.numel() * per_expert)


OPS = (
    Op(
        name="moe.route",
        summary="sigmoid scores, biased top-k, renormalised weights",
        reference=Kernel("moe.route", "reference", route),
        cases=_route_cases,
        apply=_route_apply,
        tolerance=rounding_tolerance(reason="fp32 throughout, in every dtype"),
        cost=_route_cost,
    ),
    Op(
        name="moe.experts",
        summary="SwiGLU networks of the chosen experts, weighted sum in fp32",
        reference=Kernel("moe.experts", "reference", experts, stack),
        cases=_experts_cases,
        apply=_experts_apply,
        tolerance=rounding_tolerance(reason="three products and the activation are rounded to the dtype; |out| about 0.5"),
        cost=_experts_cost,
    ),
)
