"""Compare every GPU kernel with its op's fp32 definition, on small cases and at real sizes.

A second call runs after the allocator's free memory is filled with NaN. The NaN values reveal
unwritten outputs and reads of uninitialized memory.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor

from negamax.formats.floats import E4M3_BLOCKS, E4M3_GROUPS, PLAIN
from negamax.kernels.moe import tiles
from negamax.kernels.moe.triton_norm_route import norm_route
from negamax.kernels.moe.triton_route import prepare_gate
from negamax.kernels.norm.op import NormWeight
from negamax.kernels.op import Kernel, Op
from negamax.kernels.registry import gpu_kernels
from tests.kernel_cases import CASES, moe
from tests.kernel_cases.bindings import bind, copy_case, map_tensors, tensors_of
from tests.kernel_cases.case import Case, randn

KERNELS = (
    [kernel for kernel in gpu_kernels() if kernel.provider != "reference"]
    if torch.cuda.is_available()
    else []
)
SEEDS = (0, 1, 2)
MANY_CASES = 40  # Each seed runs some of the remaining cases, which mostly take time to compile.
# share of integers (selected experts, tokens) that a near tie may change at full width
OTHER_CHOICES = 1e-3
# These ops are never part of a graph.
PLANNED_ON_THE_HOST = ("attention.prefill", "cache_shards.prefill")
PARTLY_UNDEFINED = ("block_sparse.select_shard",)  # `apply` of this op omits undefined values.

_BY_DTYPE = [
    pytest.param(
        kernel, dtype, id=f"{kernel.op}-{kernel.provider}-{str(dtype).removeprefix('torch.')}"
    )
    for kernel in KERNELS
    for dtype in (torch.bfloat16, torch.float16)
    if dtype in kernel.dtypes
]


def poison() -> None:
    """Fill the caching allocator's free memory with NaN (-1 as integers)."""
    filled = [
        torch.full((2**exponent,), 255, dtype=torch.uint8, device="cuda")
        for exponent in range(9, 29)
        for _ in range(32 if exponent < 21 else 3)
    ]
    del filled


def small_cases(kernel: Kernel, dtype: torch.dtype, *, seed: int) -> list[Case]:
    found = CASES[kernel.op].small(dtype, torch.Generator().manual_seed(seed))
    return [case for case in found if kernel.reads(case.stored)]


def on_gpu(case: Case) -> Case:
    return replace(case, tensors=map_tensors(case.tensors, lambda tensor: tensor.cuda()))


def small_problem(op: Op, want: Tensor, got: Tensor, dtype: torch.dtype) -> str | None:
    if not want.is_floating_point():
        return None if torch.equal(got.cpu().long(), want.cpu().long()) else "other whole numbers"
    tolerance = op.tolerance[dtype]
    error = distance(want, got)
    too_far = ~(error <= tolerance.atol + tolerance.rtol * want.float().abs())  # NaN fails
    if not too_far.any():
        return None
    return f"off by up to {error.max():.3g}, {int(too_far.sum())} of {error.numel()} too far"


def wide_problem(op: Op, want: Tensor, got: Tensor) -> str | None:
    if not want.is_floating_point():
        other, allowed = (got != want).float().mean().item(), OTHER_CHOICES * bool(op.wide_error)
        return None if other <= allowed else f"{other:.2%} other whole numbers"
    size = want.float().nan_to_num(posinf=0.0, neginf=0.0).norm().clamp_min(1e-30)
    error = (distance(want, got).norm() / size).item()
    if error <= op.wide_error:
        return None
    return f"relative error {error:.2e}, allowed {op.wide_error:.0e}"


def distance(want: Tensor, got: Tensor) -> Tensor:
    want, got = want.float(), got.to(want.device).float()
    return torch.where(want == got, torch.zeros_like(want), (got - want).abs())


def find_problems(
    kernel: Kernel,
    case: Case,
    here: Case,
    find: Callable[[Op, Tensor, Tensor], str | None],
    turn: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> list[str]:
    """Run a kernel twice on a case on the GPU; compare with the definition, run within `turn`."""
    op, problems = kernel.op, []
    with turn():
        expected = CASES[op].apply(op.reference, case.upcast())
    for when in ("first run", "poisoned memory"):
        if when == "poisoned memory":
            poison()
        for index, (want, got) in enumerate(
            zip(expected, CASES[op].apply(kernel, here), strict=True)
        ):
            problem = f"shape {tuple(got.shape)} instead of {tuple(want.shape)}"
            if got.shape == want.shape:
                problem = find(op, want, got)
            if problem:
                problems.append(f"{case.label}, {when}, output {index}: {problem}")
    return problems


@pytest.mark.parametrize(("kernel", "dtype"), _BY_DTYPE)
@torch.inference_mode()
def test_kernel_computes_its_op_on_small_cases(kernel: Kernel, dtype: torch.dtype) -> None:
    problems = []
    for case in small_cases(kernel, dtype, seed=0):
        # Quantized factors have the tolerance of full sizes.
        find = partial(small_problem, dtype=dtype) if case.stored is PLAIN else wide_problem
        problems += find_problems(kernel, case, on_gpu(case), find)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "kernel", [pytest.param(kernel, id=f"{kernel.op}-{kernel.provider}") for kernel in KERNELS]
)
@torch.inference_mode()
def test_kernel_computes_its_op_at_full_width(
    kernel: Kernel, seed: int, large_turn: Callable[[], AbstractContextManager[None]]
) -> None:
    op, problems, number = kernel.op, [], 0
    generator = torch.Generator(device="cuda").manual_seed(seed)
    found = CASES[op].wide(torch.bfloat16, generator)
    is_large = not isinstance(found, list)
    cases = (case for case in found if kernel.reads(case.stored))
    is_many = is_large or sum(kernel.reads(case.stored) for case in found) > MANY_CASES
    turn = large_turn if is_large else nullcontext
    for number, case in enumerate(cases, 1):
        if not is_many or number % len(SEEDS) == SEEDS.index(seed):
            problems += find_problems(kernel, case, case, wide_problem, turn)
            torch.cuda.empty_cache()
    if not number:
        pytest.skip(f"{op} has no wide cases")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(("kernel", "dtype"), _BY_DTYPE)
@torch.inference_mode()
def test_kernel_gives_the_same_bits_in_a_graph(kernel: Kernel, dtype: torch.dtype) -> None:
    if kernel.op in PLANNED_ON_THE_HOST:
        pytest.skip("its plan depends on lengths that only the host knows")
    op = kernel.op
    for case in map(on_gpu, small_cases(kernel, dtype, seed=1)):
        if any(isinstance(value, Tensor) and value.numel() == 0 for value in case.tensors.values()):
            continue
        eager = bind(kernel, copy_case(case))()
        call = bind(kernel, copy_case(case))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        graph.replay()
        torch.cuda.synchronize()
        if kernel.op in PARTLY_UNDEFINED:
            eager, captured = (
                CASES[op].apply(replace(kernel, run=lambda *_, given=given: given), case)
                for given in (eager, captured)
            )
        for want, got in zip(tensors_of(eager), tensors_of(captured), strict=True):
            assert torch.equal(bits(got), bits(want)), case.label


@pytest.mark.parametrize(
    "kernel",
    [kernel for kernel in KERNELS if kernel.op == "moe.experts" and kernel.reads(PLAIN)],
    ids=lambda kernel: kernel.provider,
)
@pytest.mark.parametrize(
    "choice",
    ["all tokens to the same experts", "no token to any expert", "every other token to none"],
)
@torch.inference_mode()
def test_experts_with_uneven_loads(kernel: Kernel, choice: str) -> None:
    problems = []
    for case in small_cases(kernel, torch.bfloat16, seed=2):
        ids = case.tensors["ids"].clone()
        if choice.startswith("all"):
            ids[:] = case.numbers["first"] + torch.arange(ids.shape[1], dtype=ids.dtype)
        elif choice.startswith("no"):
            ids.fill_(-1)
        else:
            ids[::2] = -1
        changed = replace(case, tensors={**case.tensors, "ids": ids})
        find = partial(small_problem, dtype=torch.bfloat16)
        problems += find_problems(kernel, changed, on_gpu(changed), find)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("num_tokens", "hidden", "width", "first", "count"),
    [
        (300, 256, 128, 0, 8),
        (257, 3072, 384, 0, 1),
        (2000, 1280, 256, 2, 3),
        (9000, 512, 128, 0, 8),
    ],
)
@torch.inference_mode()
def test_specialized_warps_give_the_same_bits(
    num_tokens: int, hidden: int, width: int, first: int, count: int, monkeypatch: MonkeyPatch
) -> None:
    """Some experts and all other ranks' experts get pairs that are no multiple of a tile."""
    generator = torch.Generator(device="cuda").manual_seed(num_tokens)
    tensors = {
        "x": randn(num_tokens, hidden, dtype=torch.bfloat16, generator=generator),
        **moe.fp8_experts(count, hidden=hidden, width=width, generator=generator),
        "ids": torch.randint(-1, 8, (num_tokens, 3), generator=generator, device="cuda").int() & -3,
        "weights": torch.rand(num_tokens, 3, generator=generator, device="cuda"),
    }
    case = Case(
        "",
        tensors,
        {"first": first, "count": count, "activation": moe.M3["activation"]},
        E4M3_BLOCKS,
    )
    (kernel,) = [k for k in KERNELS if k.op == "moe.experts" and k.activation is E4M3_GROUPS]
    found = []
    for least in (10**9, 0):
        monkeypatch.setattr(tiles, "specialized_min_pairs", lambda hidden, least=least: least)
        poison()
        found += CASES[kernel.op].apply(kernel, case)
    assert torch.equal(*found)


@pytest.mark.parametrize("calls", [(1, 4, 2), (1, 4), (2, 4), (1, 2)])
@pytest.mark.parametrize(
    ("hidden", "experts", "top_k", "of_m3"), [(3072, 256, 8, False), (6144, 128, 4, True)]
)
@torch.inference_mode()
def test_a_router_never_takes_the_words_of_the_call_before(
    hidden: int, experts: int, top_k: int, of_m3: bool, calls: tuple[int, ...]
) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    weight = randn(hidden, dtype=torch.bfloat16, generator=generator, scale=0.2)
    norm = NormWeight(weight, 1e-6, gemma=of_m3)
    router = prepare_gate(
        randn(experts, hidden, dtype=torch.float32, generator=generator, scale=hidden**-0.5),
        randn(experts, dtype=torch.float32, generator=generator),
        **({"scaling": 2.0, "shared": True} if of_m3 else {}),
    )
    x = {M: randn(M, hidden, dtype=torch.bfloat16, generator=generator) for M in calls}
    residual = {M: randn(M, hidden, dtype=torch.bfloat16, generator=generator) for M in calls}
    order = [calls[i % len(calls)] for i in range(120)]
    residuals = [residual[M].clone() for M in order]

    def run() -> list[tuple[Tensor, Tensor]]:
        for M, own in zip(order, residuals, strict=True):
            own.copy_(residual[M])
        return [
            norm_route(x[M], own, norm, router, top_k=top_k)[1:]
            for M, own in zip(order, residuals, strict=True)
        ]

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    expected: dict[int, list[Tensor]] = {}
    for _ in range(30):
        graph.replay()
        for M, choice in zip(order, found, strict=True):
            first = expected.setdefault(M, [tensor.clone() for tensor in choice])
            assert all(map(torch.equal, choice, first))


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
