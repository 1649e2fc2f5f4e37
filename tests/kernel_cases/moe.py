from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.formats.floats import E4M3_BLOCKS, mxfp8
from negamax.formats.tensor_format import TensorFormat
from negamax.kernels.activations import SILU, SwiGlu
from negamax.kernels.moe.op import EXPERTS, NORM_ROUTE, PLACE, ROUTE, SelectedExperts
from negamax.kernels.norm.op import NormWeight
from negamax.kernels.op import AnyKernel
from negamax.kernels.quantize import op as quantize
from tests.kernel_cases import norm, weight_only
from tests.kernel_cases.case import Case, Cost, OpCases, both, num_bytes, randn, table, tabled
from tests.kernel_cases.gemm import fp8_weight, stored_weight

_TOKENS = (1, 4, 16, 64, 100, 1000)
_LONG = 8192  # tokens for other tiles or kernels, or for rounded activations
_PACKED_WIDTHS = (1536, 384)
_WIDTHS = (1536, 768, 384)  # widths of MiniMax-M2's experts under TP1, TP2 and TP4
_M3_WIDTHS = (768, 384)  # widths of MiniMax-M3's experts under TP4 and TP8
_M3_PACKED_WIDTHS = (1536,)  # the width under TP2, in 4 bits
_M3_NORM_ROUTE: dict[str, Any] = {"scaling": 2.0, "shared": True, "gemma": True}
M3 = {"activation": SwiGlu(alpha=1.702, limit=7.0, beta=1.0), "shared": True}


def route_small(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    wide, cases = partial(randn, dtype=torch.float32, generator=generator), []
    for num_tokens, active, hidden, num_experts, top_k, bias in (
        (0, 0, 16, 4, 2, 1.0),
        (1, 1, 256, 8, 2, 10.0),
        (3, 2, 136, 40, 6, 1.0),
        (9, 5, 37, 32, 8, 4.0),
        (20, 20, 1100, 5, 5, 0.0),
    ):
        tensors = {
            "x": randn(num_tokens, hidden, dtype=dtype, generator=generator),
            "gate": wide(num_experts, hidden, scale=0.2),
            "bias": wide(num_experts, scale=bias),
            "active": torch.tensor([active], dtype=torch.int32),
        }
        label = f"T={num_tokens} hidden={hidden} experts={num_experts} top_k={top_k} bias={bias:g}"
        cases.append(Case(label, tensors, {"top_k": top_k}))
    return cases + [
        Case(f"{case.label} shared", case.tensors, {**case.numbers, "scaling": 2.0, "shared": True})
        for case in cases[1:4]
    ]


def route_full_size(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    wide = partial(randn, dtype=torch.float32, generator=generator)
    return [
        Case(
            f"T={num_tokens} hidden={hidden} experts={num_experts} top_k={numbers['top_k']}",
            {"x": randn(num_tokens, hidden, dtype=dtype, generator=generator), **router},
            numbers,
        )
        for hidden, num_experts, numbers in (
            (3072, 256, {"top_k": 8}),
            (6144, 128, {"top_k": 4, "scaling": 2.0, "shared": True}),
        )
        for router in (
            {"gate": wide(num_experts, hidden, scale=hidden**-0.5), "bias": wide(num_experts)},
        )
        for num_tokens in _TOKENS
    ]


def norm_route_small(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    """Make cases with such a large bias that rounding selects no other expert."""
    return [
        _norm_route_case(dtype, generator, 30.0, *sizes, **numbers)
        for sizes, numbers in (
            (((0, 64), 0, 4, 2), {}),
            (((1, 256), 1, 8, 2), {}),
            (((2, 1160), 2, 3, 2), {}),  # more columns than a program reads at once
            (((2, 136), 1, 9, 6), {}),
            (((2, 200), 2, 2, 1), {}),  # fewer programs than tokens
            (((3, 37), 3, 8, 2), {}),
            (((9, 64), 7, 8, 2), {}),
            (((1, 4, 264), 1, 3, 2), {}),
            (((2, 3, 64), 2, 8, 2), {}),
            (((2, 5, 64), 1, 4, 2), {}),  # more parts than a launch takes
            (((0, 128), 0, 4, 2), {"quantize": True}),
            (((2, 1152), 2, 8, 2), {"quantize": True}),
            (((2, 384), 1, 8, 2), {"quantize": True, **_M3_NORM_ROUTE}),
            (((2, 2, 1152), 2, 2, 1), {"quantize": True, **_M3_NORM_ROUTE}),
            (((2, 72), 2, 5, 5), _M3_NORM_ROUTE),
        )
    ]


def norm_route_full_size(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    return [
        _norm_route_case(
            dtype, generator, 1.0, (num_tokens, *parts, hidden), num_tokens, *sizes,
            quantize=quantize, **numbers,
        )
        for hidden, sizes, numbers in ((3072, (256, 8), {}), (6144, (128, 4), _M3_NORM_ROUTE))
        for num_tokens in (1, 2, 4)
        for parts in ((), (2,))
        for quantize in (False, True)
    ]  # fmt: skip


def _norm_route_case(
    dtype: torch.dtype,
    generator: torch.Generator,
    bias: float,
    shape: tuple[int, ...],
    active: int,
    num_experts: int,
    top_k: int,
    **numbers: Any,
) -> Case:
    """Make a case with x of `shape`. Rows from `active` on are padding."""
    of_norm = norm.made(
        dtype, generator, shape, numbers.pop("quantize", False), numbers.pop("gemma", False)
    )
    wide = partial(randn, dtype=torch.float32, generator=generator)
    tensors = {
        **of_norm.tensors,
        "gate": wide(num_experts, shape[-1], scale=shape[-1] ** -0.5),
        "bias": wide(num_experts, scale=bias),
        "active": torch.tensor([active], dtype=torch.int32, device=generator.device),
    }
    shared = " shared" * ("shared" in numbers)
    label = f"{of_norm.label} experts={num_experts} top_k={top_k}{shared}"
    return Case(label, tensors, {**of_norm.numbers, "top_k": top_k, **numbers})


# tokens, experts, top-k, largest number of copies of an expert
_PLACE_SMALL = ((0, 4, 2, 1), (1, 8, 8, 1), (3, 6, 3, 2), (70, 40, 6, 4), (300, 5, 1, 3))
_PLACE_WIDE = [(n, *sizes) for sizes in ((256, 8, 4), (128, 4, 8)) for n in _TOKENS]


def _place_case(
    dtype: torch.dtype,
    generator: torch.Generator,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    most: int,
) -> Case:
    draw = partial(torch.randint, generator=generator, device=generator.device)
    ids = _choices(num_tokens, num_experts, top_k, generator)["ids"]
    ids[num_tokens - num_tokens // 5 :] = -1
    tensors = {
        "ids": ids,
        "positions": draw(0, 200_000, (num_tokens,)),
        "slots": draw(0, num_experts * most, (num_experts, most)).int(),
        "copies": draw(1, most + 1, (num_experts,)).int(),
        "counts": draw(0, 2**40, (num_experts,)),
    }
    return Case(f"T={num_tokens} experts={num_experts} top_k={top_k} copies<={most}", tensors)


def experts_small(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    normal, cases = partial(randn, dtype=dtype, generator=generator), []
    for num_tokens, hidden, width, num_experts, top_k, first, count in (
        (0, 16, 8, 4, 2, 0, 4),
        (1, 256, 96, 8, 2, 0, 8),
        (3, 37, 24, 6, 3, 2, 2),
        (5, 72, 70, 4, 2, 2, 2),
        (70, 72, 40, 8, 3, 0, 8),
    ):
        tensors = {
            "x": normal(num_tokens, hidden),
            **_choices(num_tokens, num_experts, top_k, generator),
            "gate_up": normal(count, 2 * width, hidden, scale=hidden**-0.5),
            "down": normal(count, hidden, width, scale=width**-0.5),
        }
        label = (
            f"T={num_tokens} hidden={hidden} width={width} top_k={top_k} experts "
            f"{first}..{first + count - 1} of {num_experts}"
        )
        cases.append(Case(label, tensors, {"first": first, "count": count}))
    packed = zip((*weight_only.FORMATS[:4], weight_only.FORMATS[1]), (3, 26, 1, 8, 2), strict=True)
    rounded = (weight_only.INT8_CHANNEL, weight_only.E4M3_CHANNEL)
    makers = (
        table(_fp8_case, ((0, 4, 0, 4), (3, 6, 0, 6), (5, 12, 0, 12), (9, 8, 2, 3), (24, 6, 0, 6),
                          (88, 6, 1, 4))),
        table(_stored_case, [(form, n, 96, 72, 5, 2, 1, 3) for form, n in packed]),
        table(_stored_case, [(form, 26, 160, 200, 5, 2, 1, 3) for form in rounded]),
        _as_in_m3,
    )  # fmt: skip
    return cases + both(*makers)(dtype, generator)


def _as_in_m3(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    """Make cases of MiniMax-M3. With plain weights the limit is low enough to clamp values."""
    m3 = {"first": 0, "count": 6, **M3, "activation": SwiGlu(alpha=1.702, limit=0.8, beta=1.0)}
    make = partial(randn, dtype=dtype, generator=generator)
    found = []
    for num_tokens, width in ((2, 24), (19, 24)):
        tensors = {
            "x": make(num_tokens, 72),
            **_shared_choices(num_tokens, 5, 2, generator),
            "gate_up": make(6, 2 * width, 72, scale=72**-0.5),
            "down": make(6, 72, width, scale=0.3 * width**-0.5),
        }
        found.append(Case(f"shared T={num_tokens} hidden=72 width={width}", tensors, m3))
    for stored, num_tokens in ((E4M3_BLOCKS, 18), (E4M3_BLOCKS, 26), (weight_only.INT4, 3),
                               (weight_only.INT4, 18), (weight_only.INT8_CHANNEL, 26)):  # fmt: skip
        found.append(_m3_case(dtype, generator, stored, num_tokens, 128, 128, 3, 1))
    return found


def _m3_case(
    dtype: torch.dtype,
    generator: torch.Generator,
    stored: TensorFormat,
    num_tokens: int,
    hidden: int,
    width: int,
    num_experts: int,
    top_k: int,
    weights: dict[str, Tensor] | None = None,
) -> Case:
    """Make a case with `num_experts` and a shared expert. A quarter of the tokens are padding."""
    sizes = (num_tokens, hidden, width, num_experts, top_k, 0, num_experts + 1, weights)
    case = _stored_case(dtype, generator, stored, *sizes)
    choices = _shared_choices(num_tokens, num_experts, top_k, generator)
    choices["ids"][num_tokens - num_tokens // 4 :] = -1
    label = f"shared {stored.name} T={num_tokens} hidden={hidden} width={width}"
    return Case(label, case.tensors | choices, case.numbers | M3, stored)


def _shared_choices(
    num_tokens: int, num_experts: int, top_k: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Double the weights of `_choices`, and add expert `num_experts` as the last of every token."""
    chosen = _choices(num_tokens, num_experts, top_k, generator)
    return {
        "ids": F.pad(chosen["ids"], (0, 1), value=num_experts),
        "weights": F.pad(2.0 * chosen["weights"], (0, 1), value=1.0),
    }


def _fp8_case(
    dtype: torch.dtype,
    generator: torch.Generator,
    num_tokens: int,
    num_experts: int,
    first: int,
    count: int,
) -> Case:
    """Make a case. The last quarter of the tokens are padding; two experts get more than a tile."""
    sizes = (num_tokens, 256, 256, num_experts, 2, first, count)
    case = _stored_case(dtype, generator, E4M3_BLOCKS, *sizes)
    if num_tokens > 16:
        case.tensors["ids"][:] = torch.tensor([4, 1])
    case.tensors["ids"][num_tokens - num_tokens // 4 :] = -1
    label = f"fp8 T={num_tokens} experts {first}..{first + count - 1} of {num_experts}"
    return replace(case, label=label)


def experts_full_size(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Case]:
    m2 = [(E4M3_BLOCKS, width, (*_TOKENS, _LONG)) for width in _WIDTHS]
    m2 += [(form, n, (*_TOKENS, _LONG)) for form in weight_only.FORMATS for n in _PACKED_WIDTHS]
    m3 = [(form, width) for form in (E4M3_BLOCKS, mxfp8()) for width in _M3_WIDTHS]
    m3 += [(weight_only.INT4, width) for width in _M3_PACKED_WIDTHS]
    for stored, width, counts in m2:
        weights = stored_experts(stored, 256, 3072, width, generator)
        for num_tokens in counts:
            sizes = (num_tokens, 3072, width, 256, 8, 0, 256, weights)
            yield _stored_case(dtype, generator, stored, *sizes)
    for stored, width in m3:
        weights = stored_experts(stored, 129, 6144, width, generator)
        for num_tokens in _TOKENS:
            sizes = (num_tokens, 6144, width, 128, 4, weights)
            yield _m3_case(dtype, generator, stored, *sizes)


def _stored_case(
    dtype: torch.dtype,
    generator: torch.Generator,
    stored: TensorFormat,
    num_tokens: int,
    hidden: int,
    width: int,
    num_experts: int,
    top_k: int,
    first: int,
    count: int,
    weights: dict[str, Tensor] | None = None,
) -> Case:
    tensors = {
        "x": randn(num_tokens, hidden, dtype=dtype, generator=generator),
        **_choices(num_tokens, num_experts, top_k, generator),
        **(weights or stored_experts(stored, count, hidden, width, generator)),
    }
    name = "fp8" if stored is E4M3_BLOCKS else stored.name
    label = f"{name} T={num_tokens} hidden={hidden} width={width}"
    return Case(label, tensors, {"first": first, "count": count}, stored)


def stored_experts(
    stored: TensorFormat, count: int, hidden: int, width: int, generator: torch.Generator
) -> dict[str, Tensor]:
    if stored is E4M3_BLOCKS:
        return fp8_experts(count, hidden=hidden, width=width, generator=generator)
    make = partial(weight_only.tensors_of, stored, generator=generator)
    return {**make("gate_up", count, 2 * width, hidden), **make("down", count, hidden, width)}


def fp8_experts(
    count: int, *, hidden: int, width: int, generator: torch.Generator
) -> dict[str, Tensor]:
    shapes = {"gate_up": (2 * width, hidden), "down": (hidden, width)}
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        values, scale = fp8_weight(count, *shape, generator=generator)
        tensors |= {f"{name}.weight": values, f"{name}.weight_scale_inv": scale}
    return tensors


def _choices(
    num_tokens: int, num_experts: int, top_k: int, generator: torch.Generator
) -> dict[str, Tensor]:
    uniform = partial(torch.rand, generator=generator, device=generator.device)
    weights = uniform(num_tokens, top_k) + 0.1
    return {
        "ids": uniform(num_tokens, num_experts).topk(top_k, dim=-1).indices.int(),
        "weights": weights / weights.sum(-1, keepdim=True),
    }


def apply_route(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    t = case.tensors
    router = {name: case.numbers[name] for name in ("scaling", "shared") if name in case.numbers}
    prepared, top_k = kernel.prepare(t["gate"], t["bias"], **router), case.numbers["top_k"]
    return _by_number(*kernel.run(t["x"], prepared, active=t.get("active"), top_k=top_k))


def _by_number(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    order = ids.argsort(dim=-1, stable=True)
    return ids.gather(1, order), weights.gather(1, order)


def apply_norm_route(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    t, numbers = case.tensors, case.numbers
    residual = t["residual"].clone()
    router = {name: numbers[name] for name in ("scaling", "shared") if name in numbers}
    weight = NormWeight(t["weight"], numbers["eps"], norm.quantizes(kernel, case), numbers["gemma"])
    prepared = kernel.prepare(t["gate"], t["bias"], **router)
    out, ids, weights = kernel.run(
        t["x"], residual, weight, prepared, top_k=numbers["top_k"], active=t["active"]
    )
    return (*norm.case_outputs(out, case), residual, *_by_number(ids, weights))


def apply_place(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    *inputs, counts = case.tensors.values()
    counts = counts.clone()
    return kernel.run(*inputs, counts), counts


def apply_experts(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    t = case.tensors
    x = t["x"] if kernel.activation is None else quantize.quantize_activations(t["x"])
    n, parts = case.numbers, [stored_weight(case, name) for name in ("gate_up", "down")]
    options = {"activation": n.get("activation", SILU), "shared": n.get("shared", False)}
    prepared, own = kernel.prepare(*parts, **options), (n["first"], n["count"])
    out = kernel.run(x, SelectedExperts(t["ids"], t["weights"], *own), prepared)
    return (out if out.dim() == 2 else out.float().sum(1).to(out.dtype),)


def route_cost(case: Case) -> Cost:
    t = case.tensors
    return Cost(
        num_bytes=num_bytes(t["x"], t["gate"], t["bias"]),
        flops=2 * t["x"].shape[0] * t["gate"].numel(),
    )


def norm_route_cost(case: Case) -> Cost:
    t, of_norm = case.tensors, norm.cost(case)
    return Cost(
        num_bytes=of_norm.num_bytes + num_bytes(t["gate"], t["bias"]),
        flops=of_norm.flops + 2 * t["residual"].shape[0] * t["gate"].numel(),
    )


def place_cost(case: Case) -> Cost:
    t = case.tensors
    return Cost(num_bytes=num_bytes(*t.values(), t["ids"], t["counts"]), flops=0)


def experts_cost(case: Case) -> Cost:
    t, n = case.tensors, case.numbers
    chosen = t["ids"][(t["ids"] >= n["first"]) & (t["ids"] < n["first"] + n["count"])]
    weights = {name: each for name, each in t.items() if name.startswith(("gate_up", "down"))}
    share = chosen.unique().numel() / n["count"]
    width = stored_weight(case, "gate_up").values.shape[1] // 2
    return Cost(
        num_bytes=round(share * num_bytes(*weights.values())) + 2 * num_bytes(t["x"]),
        flops=6 * chosen.numel() * width * t["x"].shape[1],
    )


CASES = {
    ROUTE: OpCases(route_small, apply_route, route_cost, route_full_size),
    NORM_ROUTE: OpCases(norm_route_small, apply_norm_route, norm_route_cost, norm_route_full_size),
    PLACE: tabled(_place_case, _PLACE_SMALL, apply_place, place_cost, _PLACE_WIDE),
    EXPERTS: OpCases(experts_small, apply_experts, experts_cost, experts_full_size),
}
