from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from negamax.kernels.attention.metadata import CacheShard
from negamax.kernels.attention.op import DECODE, PREFILL
from negamax.kernels.block_sparse.op import BLOCK_SPARSE_DECODE, BLOCK_SPARSE_PREFILL
from negamax.kernels.block_sparse.selection import BlockSelection
from negamax.kernels.cache_shards import op
from negamax.kernels.kvcache.op import TokenTables
from negamax.kernels.op import AnyKernel
from tests.kernel_cases import attention as dense
from tests.kernel_cases import block_sparse as sparse
from tests.kernel_cases.attention import cache_of
from tests.kernel_cases.case import Apply, Case, Cost, OpCases, num_bytes, randn, tabled

# --- positions of tokens --------------------------------------------------------------------------


def own_rows_small(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    on_device: dict[str, Any] = {"generator": generator, "device": generator.device}
    return [
        Case(
            f"T={num_tokens} heads={heads} block_size={block_size} rank {rank} of {ranks}",
            {
                "positions": torch.randint(0, 6 * block_size, (num_tokens,), **on_device),
                "token_slots": torch.randint(0, 4, (num_tokens,), **on_device),
                "block_tables": torch.randperm(24, **on_device).view(4, 6),
            },
            {"rank": rank, "ranks": ranks, "first": first, "heads": heads,
             "block_size": block_size},
        )
        for num_tokens, heads, block_size, rank, ranks, first in (
            (0, 1, 16, 0, 2, 1), (9, 1, 16, 1, 2, 1), (30, 3, 5, 2, 3, 0), (7, 1, 128, 0, 1, 0),
        )
    ]  # fmt: skip


def apply_own_rows(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    return (kernel.run(TokenTables(*case.tensors.values()), **case.numbers),)


def own_rows_cost(case: Case) -> Cost:
    read = num_bytes(case.tensors["positions"], case.tensors["token_slots"])
    return Cost(num_bytes=read + read // 2 * case.numbers["heads"], flops=0)


# --- attention -----------------------------------------------------------------------------------


def _of_rank(cases: Iterable[Case], *, rank: int, ranks: int) -> list[Case]:
    found = []
    for case in cases:
        shape = replace(case.numbers["shape"], cache=CacheShard(rank, ranks))
        own = 1 - (-len(case.tensors["k_cache"]) // ranks)
        caches = {name: case.tensors[name][:own].contiguous() for name in ("k_cache", "v_cache")}
        label = f"{case.label} rank {rank} of {ranks}"
        found.append(
            Case(label, {**case.tensors, **caches}, {**case.numbers, "shape": shape}, case.stored)
        )
    return found


def _parts(whole: OpCases, apply: Apply, others: slice, ranks: int) -> OpCases:
    """Return cases on one of two ranks. Cases in `others` also run on one of `ranks` ranks."""

    def small(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
        cases = whole.small(dtype, generator)
        return _of_rank(cases, rank=1, ranks=2) + _of_rank(cases[others], rank=0, ranks=ranks)

    def wide(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
        return _of_rank(whole.wide(dtype, generator), rank=1, ranks=2)

    def cost(case: Case) -> Cost:
        of_all, rows = whole.cost(case), 2 * num_bytes(case.tensors["q"])
        ranks = case.numbers["shape"].cache.ranks
        return Cost((of_all.num_bytes - rows) // ranks + rows, of_all.flops // ranks)

    return OpCases(small, apply, cost, wide)


def apply_attention(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    found = kernel.run(case.tensors["q"], cache_of(case), dense.plan_of(kernel, case))
    return found.out, found.lse


def apply_sparse_attention(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    t = case.tensors
    plan = sparse.plan_of(kernel, case, dtype=t["q"].dtype)
    choice = BlockSelection(t["ids"], t["pages"])
    found = kernel.run(t["q"], cache_of(case), choice, plan)
    return found.out, found.lse


# --- merge ---------------------------------------------------------------------------------------


# tokens, ranks, heads, first head and number of heads of this rank, width
_MERGE_SMALL = ((1, 2, 2, 1, 1, 8), (5, 2, 6, 0, 3, 20), (9, 4, 8, 6, 2, 128))
_MERGE_WIDE = tuple((num_tokens, 2, 16, 8, 8, 128) for num_tokens in (1, 64, 8192))


def _merge_case(
    dtype: torch.dtype,
    generator: torch.Generator,
    num_tokens: int,
    ranks: int,
    heads: int,
    first: int,
    count: int,
    head_dim: int,
) -> Case:
    normal = partial(randn, generator=generator)
    lse = normal(ranks, num_tokens, heads, dtype=torch.float32, scale=4.0)
    lse[0, ::3] = -torch.inf
    lse[:, 4::5] = -torch.inf
    return Case(
        f"T={num_tokens} heads {first} to {first + count - 1} of {heads}, {head_dim} wide, of "
        f"{ranks} ranks",
        {"out": normal(ranks, num_tokens, heads * head_dim, dtype=dtype), "lse": lse},
        {"first": first, "count": count},
    )


def apply_merge(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    out, lse = case.tensors.values()
    parts = op.PartialResults(out.new_empty(0, dtype=torch.uint8), out, lse)
    return (kernel.run(parts, None, **case.numbers),)


def merge_cost(case: Case) -> Cost:
    out, lse, count = case.tensors["out"], case.tensors["lse"], case.numbers["count"]
    share = (num_bytes(out) + num_bytes(lse)) * count // lse.shape[2]
    return Cost(num_bytes=share + share // len(out), flops=2 * out.numel() * count // lse.shape[2])


_EVERY = slice(None)
CASES = {
    op.OWN_ROWS: OpCases(own_rows_small, apply_own_rows, own_rows_cost),
    op.PARTIAL_DECODE: _parts(dense.CASES[DECODE], apply_attention, slice(-3, None), 4),
    op.PARTIAL_PREFILL: _parts(dense.CASES[PREFILL], apply_attention, _EVERY, 3),
    op.PARTIAL_SPARSE_DECODE: _parts(
        sparse.CASES[BLOCK_SPARSE_DECODE], apply_sparse_attention, slice(1, 3), 3
    ),
    op.PARTIAL_SPARSE_PREFILL: _parts(
        sparse.CASES[BLOCK_SPARSE_PREFILL], apply_sparse_attention, slice(2, None), 3
    ),
    op.MERGE_PARTIALS: tabled(_merge_case, _MERGE_SMALL, apply_merge, merge_cost, _MERGE_WIDE),
}
