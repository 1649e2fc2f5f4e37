from functools import partial

import torch
from torch import Tensor

from negamax.kernels.attention.metadata import PagedShape
from negamax.kernels.drafts import op
from negamax.kernels.kvcache.op import FP8, KvCache
from negamax.kernels.op import AnyKernel
from tests.kernel_cases.attention import describe_lengths, paged_caches
from tests.kernel_cases.case import Case, Cost, OpCases, num_bytes, randn, tabled


def count_small(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    draw, cases = partial(torch.randint, generator=generator), []
    for counts, room, padding in (([0], 1, 0), ([3, 2, 0, 3, 1], 3, 2), ([15] * 40, 15, 0)):
        num_drafts = torch.tensor([*counts, *[0] * padding])
        firsts = (num_drafts + 1).cumsum(0) - num_drafts - 1
        sampled = draw(-1, 3, (int((num_drafts + 1).sum()),))
        index = (firsts.unsqueeze(1) + torch.arange(room)).clamp_max(len(sampled) - 1)
        tensors = {
            "sampled": sampled,
            "drafts": sampled[index].masked_fill(draw(0, 6, (len(num_drafts), room)) == 0, 7),
            "firsts": firsts,
            "num_drafts": num_drafts,
        }
        cases.append(Case(f"R={len(sampled)} rows={len(firsts)} room={room}", tensors))
    return cases


def apply_count(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    return (kernel.run(*case.tensors.values()),)


def count_cost(case: Case) -> Cost:
    written = num_bytes(case.tensors["firsts"])
    return Cost(num_bytes=num_bytes(*case.tensors.values()) + written, flops=0)


def advance_small(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    cases = []
    for counts in ([1], [4, 2, 0, 1, 0], [3] * 40):
        column = torch.tensor(counts)
        most = torch.rand(len(counts), generator=generator) * column
        tensors = {
            "accepted": most.long().clamp_max((column - 1).clamp_min(0)),
            "counts": column,
            "seq_lens": torch.randint(5, 90, (len(counts),), generator=generator) * (column > 0),
            "firsts": column.cumsum(0) - column,
            "slots": torch.arange(len(counts)).masked_fill(column == 0, len(counts)),
            "num_computed": torch.full((len(counts) + 1,), 7),
        }
        cases.append(Case(f"rows={len(counts)}", tensors))
    return cases


def apply_advance(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    *inputs, num_computed = case.tensors.values()
    num_computed = num_computed.clone()
    lengths, ends = (torch.empty_like(inputs[0]) for _ in range(2))
    kernel.run(*inputs, num_computed=num_computed, lengths=lengths, ends=ends)
    return num_computed, lengths, ends


def advance_cost(case: Case) -> Cost:
    return Cost(num_bytes=8 * num_bytes(case.tensors["slots"]), flops=0)


def record_small(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    draw, cases = partial(torch.randint, generator=generator), []
    for rows, place in ((1, 0), (3, 1), (5, 2)):
        tensors = {
            "picked": torch.tensor([-1, 0, 8, 3, 5])[-rows:],
            "ids": torch.cat([draw(0, 1000, (9,)), torch.tensor([-1])]),
            "slots": torch.arange(rows),
            "lengths": torch.tensor([0, 1, 17, 39, 40])[-rows:],
            "drafts": draw(-1, 1000, (rows, 3)),
        }
        numbers = {"place": place, "padding_slot": 4, "last": 38}
        cases.append(Case(f"R={rows} place={place}", tensors, numbers))
    return cases


def apply_record(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    *inputs, drafts = case.tensors.values()
    drafts = drafts.clone()
    return *kernel.run(*inputs, **case.numbers, drafts=drafts), drafts


def record_cost(case: Case) -> Cost:
    return Cost(num_bytes=7 * num_bytes(case.tensors["slots"]), flops=0)


# tokens, width, whether hidden states are normed
_EMBED_SMALL = ((0, 64, True), (1, 128, True), (5, 192, True), (5, 96, False), (2, 7, True))
_EMBED_WIDE = ((1, 3072, True), (4, 3072, False), (400, 3072, True), (16, 6144, True))


def _embed_case(
    dtype: torch.dtype, generator: torch.Generator, num_tokens: int, width: int, has_norm: bool
) -> Case:
    rows, device = 50, generator.device
    embeddings = randn(rows + 2, width, dtype=dtype, generator=generator)
    embeddings[0] = embeddings[-1] = 0
    weights = 1 + randn(2, width, dtype=dtype, generator=generator, scale=0.2)
    tensors = {
        "token_ids": torch.randint(-2, rows + 2, (num_tokens,), generator=generator, device=device),
        "table": embeddings,
        "hidden": randn(num_tokens, width, dtype=dtype, generator=generator, scale=3.0),
        "weights": weights,
    }
    return Case(f"T={num_tokens} width={width} norm={has_norm}", tensors, {"has_norm": has_norm})


def apply_embed(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    *inputs, weights = case.tensors.values()
    hidden_weight = weights[1] if case.numbers["has_norm"] else None
    return (kernel.run(*inputs, weights[0], hidden_weight, eps=1e-6),)


def embed_cost(case: Case) -> Cost:
    hidden = case.tensors["hidden"]
    return Cost(num_bytes=4 * num_bytes(hidden), flops=8 * hidden.numel())


# lengths, rows, KV heads, group, width of a head, block size, window, causal, dtype of the caches
_BLOCK_SMALL = (
    ((0,), 2, 1, 1, 8, 16, 0, False),
    ((1, 70), 4, 2, 3, 12, 5, 9, False),
    ((150, 0, 64, 65), 7, 1, 16, 20, 16, 66, False),
    ((200, 63), 5, 2, 2, 16, 16, 0, True),
)
_BLOCK_WIDE = (
    ((8064,), 7, 1, 16, 128, 128, 4096, False),
    ((8064, 100, 0, 4099), 7, 4, 16, 128, 128, 4096, False, FP8),
    ((1064,) * 64, 7, 1, 16, 128, 128, 4096, False),
    ((60_000,), 16, 2, 4, 128, 64, 0, True),
)


def _block_case(
    dtype: torch.dtype,
    generator: torch.Generator,
    lengths: tuple[int, ...],
    rows: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    window: int,
    is_causal: bool,
    cache_dtype: torch.dtype | None = None,
) -> Case:
    shape, count = PagedShape(kv_heads, group, block_size), len(lengths)
    normal, device = partial(randn, dtype=dtype, generator=generator), generator.device
    tensors = {
        "q": normal(count * rows, kv_heads * group, head_dim),
        "k": normal(count, kv_heads, rows, head_dim),
        "v": normal(count, kv_heads, rows, head_dim),
        **paged_caches(cache_dtype or dtype, generator, lengths, shape=shape, head_dim=head_dim),
        "slots": torch.arange(count, device=device),
        "lengths": torch.tensor(lengths, dtype=torch.int32, device=device),
    }
    label = f"{describe_lengths(lengths)} {rows=} {kv_heads=} {group=} {head_dim=} {window=}"
    return Case(
        f"{label} {is_causal=} {cache_dtype or dtype}",
        tensors,
        {"sliding_window": window, "is_causal": is_causal},
    )


def apply_block(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    q, k, v, k_cache, v_cache, *context = case.tensors.values()
    cache = KvCache(k_cache, v_cache)
    return (kernel.run(q, KvCache(k, v), cache, op.BlockContext(*context), **case.numbers),)


def block_cost(case: Case) -> Cost:
    q, window = case.tensors["q"], case.numbers["sliding_window"]
    (_, kv_heads, rows, head_dim), cache = case.tensors["k"].shape, case.tensors["k_cache"]
    lengths = case.tensors["lengths"].tolist() if q.device.type != "meta" else []
    read = sum(min(length, window or length) for length in lengths)
    return Cost(
        num_bytes=2 * read * kv_heads * head_dim * cache.element_size() + 2 * num_bytes(q),
        flops=4 * (read + rows * len(lengths)) * rows * q.shape[1] * head_dim,
    )


CASES = {
    op.COUNT_ACCEPTED: OpCases(count_small, apply_count, count_cost),
    op.ADVANCE_ROWS: OpCases(advance_small, apply_advance, advance_cost),
    op.RECORD_DRAFTS: OpCases(record_small, apply_record, record_cost),
    op.ATTEND_BLOCK: tabled(_block_case, _BLOCK_SMALL, apply_block, block_cost, _BLOCK_WIDE),
    op.EMBED_NORMS: tabled(_embed_case, _EMBED_SMALL, apply_embed, embed_cost, _EMBED_WIDE),
}
