"""Definitions of the mixture-of-experts ops.

    s = sigmoid(gate x)   (fp32)        ids = top-k of s + bias        weights = s[ids] /
    sum(s[ids]) out = sum_i weights[i] * down[ids[i]] (silu(gate[ids[i]] x) * (up[ids[i]] x))

The bias decides who is chosen, never how much a chosen expert counts; no epsilon in the
renormalisation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.kernels.activations import GROUP, QuantizedActivations, unquantized
from negamax.kernels.formats import E4M3_BLOCKS, E4M3_MAX, PLAIN, StoredWeight, e4m3_blocks, plain
from negamax.kernels.op import (
    AnyKernel,
    Case,
    Cost,
    Kernel,
    Op,
    num_bytes,
    randn,
    rounding_tolerance,
)
from negamax.kernels.rowwise import SAFE_ROWS_MULTIPLE, apply, padded_rows
from negamax.kernels.signatures import EXPERTS, ROUTE

Activated = Tensor | QuantizedActivations


Gate = tuple[Tensor, Tensor]


def pair(gate: Tensor, bias: Tensor) -> Gate:
    """gate [experts, hidden] fp32, bias [experts] fp32, as they are."""
    return gate, bias


def route(
    x: Activated, prepared: Gate, *, top_k: int, active: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x [T, hidden] -> ids [T, top_k] int32, weights [T, top_k] fp32.

    `active` [1] int32: rows from there on are padding and get ids -1 and weights 0. Rows are padded
    so that a token's scores do not depend on how many others there are (`rowwise`,
    `gemm/padded.py`).
    """
    gate, bias = prepared
    x = unquantized(x)
    num_tokens, wide = x.shape[0], x.float()
    rows = padded_rows(num_tokens, width=gate.shape[0], multiple=SAFE_ROWS_MULTIPLE)
    if num_tokens == 1:
        wide = wide.expand(rows, -1)
    elif rows > num_tokens:
        wide = torch.cat((wide, wide.new_zeros(rows - num_tokens, wide.shape[1])))
    scores = apply(torch.sigmoid, F.linear(wide, gate))[:num_tokens]
    ids = torch.topk(scores + bias, top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    return mask_padding(ids.int(), weights.div_(weights.sum(-1, keepdim=True)), active)


def mask_padding(ids: Tensor, weights: Tensor, active: Tensor | None) -> tuple[Tensor, Tensor]:
    """`ids` and `weights` [T, top_k] with -1 and 0 in the rows from active[0] on."""
    if active is None:
        return ids, weights
    padding = (torch.arange(ids.shape[0], device=ids.device) >= active).unsqueeze(-1)
    return ids.masked_fill(padding, -1), weights.masked_fill(padding, 0.0)


Experts = tuple[Tensor, Tensor]


def stack(gate_up: StoredWeight, down: StoredWeight) -> Experts:
    """gate_up [experts, 2 * width, hidden] (gate rows first), down [experts, hidden, width], plain,
    as they are.
    """
    return gate_up.values, down.values


def experts(
    x: Activated, ids: Tensor, weights: Tensor, prepared: Experts, *, first: int, count: int
) -> Tensor:
    """x [T, hidden], ids [T, top_k] int32, weights [T, top_k] fp32 -> [T, hidden], or [T, P,
    hidden] to be summed over P.

    `prepared` holds experts first .. first + count - 1; the choices of other experts (and -1) add
    nothing.
    """
    gate_up, down = prepared
    x = unquantized(x)
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
            "ids": scores.topk(top_k, dim=-1).indices.int(),
            "weights": weights / weights.sum(-1, keepdim=True),
            "gate_up": randn(
                count, 2 * width, hidden, dtype=dtype, generator=generator, scale=hidden**-0.5
            ),
            "down": randn(
                count, hidden, width, dtype=dtype, generator=generator, scale=width**-0.5
            ),
        }
        label = (
            f"T={num_tokens} hidden={hidden} width={width} top_k={top_k} experts "
            f"{first}..{first + count - 1} of {num_experts}"
        )
        cases.append(Case(label, tensors, {"first": first, "count": count}))
    return cases


_WIDE_TOKENS = (1, 4, 16, 64, 100, 1000)
_WIDE_WIDTHS = (1536, 768, 384)  # MiniMax-M2's experts whole, and cut for two and four ranks


def _wide_route(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    gate, bias = (
        _wide_randn(256, 3072, generator=generator) * 3072**-0.5,
        _wide_randn(256, generator=generator),
    )
    return [
        Case(
            f"T={num_tokens} hidden=3072 experts=256 top_k=8",
            {
                "x": _wide_randn(num_tokens, 3072, generator=generator).to(dtype),
                "gate": gate,
                "bias": bias,
            },
            {"top_k": 8},
        )
        for num_tokens in _WIDE_TOKENS
    ]


def _wide_experts(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    """FP8 weights; the cases of a width share them."""
    cases = []
    for width in _WIDE_WIDTHS:
        gate_up, gate_up_scale = _wide_weight(256, 2 * width, 3072, generator=generator)
        down, down_scale = _wide_weight(256, 3072, width, generator=generator)
        for num_tokens in _WIDE_TOKENS:
            shares = torch.rand(num_tokens, 8, generator=generator, device=generator.device) + 0.1
            tensors = {
                "x": _wide_randn(num_tokens, 3072, generator=generator).to(dtype),
                "ids": torch.rand(num_tokens, 256, generator=generator, device=generator.device)
                .topk(8)
                .indices.int(),
                "weights": shares / shares.sum(-1, keepdim=True),
                "gate_up": gate_up,
                "down": down,
                "gate_up_scale": gate_up_scale,
                "down_scale": down_scale,
            }
            cases.append(
                Case(
                    f"fp8 T={num_tokens} hidden=3072 width={width}",
                    tensors,
                    {"first": 0, "count": 256},
                    stored=E4M3_BLOCKS,
                )
            )
    return cases


def _wide_randn(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, device=generator.device)


def _wide_weight(
    count: int, rows: int, columns: int, *, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """`count` FP8 matrices [rows, columns] of standard deviation columns^-1/2, and their scales."""
    values = torch.empty(count, rows, columns, dtype=torch.float8_e4m3fn, device=generator.device)
    for matrix in values:
        matrix.copy_(
            _wide_randn(rows, columns, generator=generator).mul_(100).clamp_(-E4M3_MAX, E4M3_MAX)
        )
    spread = (
        torch.rand(
            count, rows // GROUP, columns // GROUP, generator=generator, device=generator.device
        )
        + 0.5
    )
    return values, spread * (columns**-0.5 / 100)


def quantize_rows(x: Tensor) -> QuantizedActivations:
    """x [T, width] with its FP8 form, one scale for 128 columns."""
    groups = (
        x.float().view(x.shape[0], -1, GROUP)
        if x.numel()
        else x.new_zeros(0, x.shape[1] // GROUP, GROUP)
    )
    scales = (groups.abs().amax(-1) / E4M3_MAX).clamp_min(1e-30).float()
    return QuantizedActivations(
        x, (groups / scales.unsqueeze(-1)).view_as(x).to(torch.float8_e4m3fn), scales
    )


def _route_apply(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    t = case.tensors
    ids, weights = kernel.run(
        t["x"], kernel.prepare(t["gate"], t["bias"]), active=t.get("active"), **case.numbers
    )
    order = ids.argsort(dim=-1, stable=True)  # the order of the choices is the provider's own
    return ids.gather(1, order), weights.gather(1, order)


def _experts_apply(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    """FP8 weights go with FP8 activations; once upcast (see `Case.upcast`), they are multiplied by
    their scales.
    """
    t = case.tensors
    x: Activated = t["x"]
    weights = [plain(t["gate_up"]), plain(t["down"])]
    if case.stored is not PLAIN:
        x = quantize_rows(t["x"])
        weights = [e4m3_blocks(t[name], t[f"{name}_scale"]) for name in ("gate_up", "down")]
    elif "gate_up_scale" in t:
        weights = [plain(_scaled(t[name], t[f"{name}_scale"])) for name in ("gate_up", "down")]
    out = kernel.run(x, t["ids"], t["weights"], kernel.prepare(*weights), **case.numbers)
    return (out if out.dim() == 2 else out.float().sum(1).to(out.dtype),)


def _scaled(weight: Tensor, scale: Tensor) -> Tensor:
    count, rows, columns = scale.shape
    return (weight.view(count, rows, GROUP, columns, GROUP) * scale[:, :, None, :, None]).view_as(
        weight
    )


def _route_cost(case: Case) -> Cost:
    t = case.tensors
    return Cost(
        num_bytes=num_bytes(t["x"], t["gate"], t["bias"]),
        flops=2 * t["x"].shape[0] * t["gate"].numel(),
    )


def _experts_cost(case: Case) -> Cost:
    t, n = case.tensors, case.numbers
    chosen = t["ids"][(t["ids"] >= n["first"]) & (t["ids"] < n["first"] + n["count"])]
    hit = chosen.unique().numel()
    per_expert = t["gate_up"][0].numel() + t["down"][0].numel()
    weight_bytes = hit * per_expert * t["gate_up"].element_size()
    return Cost(
        num_bytes=weight_bytes + 2 * num_bytes(t["x"]), flops=2 * chosen.numel() * per_expert
    )


OPS = (
    Op(
        name=ROUTE,
        summary="sigmoid scores, biased top-k, renormalised weights",
        reference=Kernel(ROUTE, "reference", route, pair),
        cases=_route_cases,
        apply=_route_apply,
        tolerance=rounding_tolerance(reason="fp32 throughout, in every dtype"),
        cost=_route_cost,
        wide=_wide_route,
        wide_error=1e-5,
    ),
    Op(
        name=EXPERTS,
        summary="SwiGLU networks of the chosen experts, weighted sum in fp32",
        reference=Kernel(EXPERTS, "reference", experts, stack),
        cases=_experts_cases,
        apply=_experts_apply,
        tolerance=rounding_tolerance(
            reason="three products and the activation are rounded to the dtype; |out| about 0.5"
        ),
        cost=_experts_cost,
        wide=_wide_experts,
        # both factors of both products in FP8: 4.3e-2 measured; FP8 weights alone: 0.3e-2
        wide_error=6e-2,
    ),
)
