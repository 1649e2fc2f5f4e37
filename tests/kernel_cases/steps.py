from functools import partial

import torch
from torch import Tensor

from negamax.kernels.op import AnyKernel
from negamax.kernels.steps.op import EMBED_TOKENS, PLACE_TOKENS, STORE_TOKENS, ImageRows
from tests.kernel_cases.case import Case, Cost, OpCases, num_bytes, randn, tabled


def place_small(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    cases = []
    for counts, padding, num_drafts in (
        ([1], 0, 0), ([1] * 5, 3, 0), ([4, 2, 1, 4], 5, 3), ([3] * 70, 0, 3), ([1, 90, 7], 30, 0)
    ):  # fmt: skip
        lengths, slot = torch.tensor(counts), len(counts)
        slots = torch.randperm(slot, generator=generator)
        offsets = torch.cat([torch.arange(count) for count in counts])
        none = torch.zeros(padding, dtype=torch.int64)
        columns = (
            slots.repeat_interleave(lengths), none + slot, slots, offsets, none, lengths,
            torch.tensor([0, *lengths.cumsum(0), len(offsets)]),
        )  # fmt: skip
        tensors = {
            "columns": torch.cat(columns),
            "num_computed": torch.randint(0, 30, (slot + 1,), generator=generator),
            "tokens": torch.randint(
                0, 1000, (slot + 1, 130), generator=generator, dtype=torch.int32
            ),
            "drafts": torch.randint(-1, 1000, (slot + 1, max(num_drafts, 1)), generator=generator),
        }
        tensors["num_computed"][slot] = 0
        label = f"T={len(offsets)} rows={slot} padding={padding} drafts={num_drafts}"
        numbers = {"num_tokens": len(offsets) + padding, "num_seqs": slot}
        cases.append(Case(label, tensors, numbers | {"has_drafts": num_drafts > 0}))
    return cases


def apply_place(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    t, numbers = case.tensors, case.numbers
    tokens, slot = t["tokens"].clone(), numbers["num_seqs"]
    new = partial(torch.empty, dtype=torch.int64, device=tokens.device)
    outputs = {
        "places": new(numbers["num_tokens"] + slot),
        "token_ids": new(numbers["num_tokens"]),
        "ends": new(numbers["num_tokens"]),
        "words": new(2 * slot + 2).int(),
    }
    drafts = t["drafts"] if numbers["has_drafts"] else None
    kernel.run(t["columns"], t["num_computed"], tokens, drafts, padding_slot=slot, **outputs)
    return *outputs.values(), tokens


def place_cost(case: Case) -> Cost:
    return Cost(num_bytes=5 * num_bytes(case.tensors["columns"]), flops=0)


def _embed_case(
    dtype: torch.dtype, generator: torch.Generator, num_tokens: int, width: int
) -> Case:
    rows, first = 50, 100
    embeddings = randn(rows + 2, width, dtype=dtype, generator=generator)
    embeddings[0] = embeddings[-1] = 0
    ids = torch.randint(
        first - 9, first + rows + 9, (num_tokens,), generator=generator, device=generator.device
    )
    tensors = {"token_ids": ids, "table": embeddings}
    if num_tokens % 5 == 0:  # Some tokens belong to images.
        tensors["at"] = torch.randint(
            -6, 6, (num_tokens,), generator=generator, device=generator.device, dtype=torch.int32
        ).clamp_min(-1)
        tensors["rows"] = randn(6, width, dtype=dtype, generator=generator)
    return Case(f"T={num_tokens} width={width}", tensors, {"first_id": first})


def apply_embed(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    token_ids, table, *images = case.tensors.values()
    given = ImageRows(*images) if images else None
    outputs: tuple[Tensor, ...] = kernel.run(token_ids, table, given, **case.numbers)
    return outputs


def embed_cost(case: Case) -> Cost:
    token_ids, table, *_ = case.tensors.values()
    return Cost(num_bytes=3 * len(token_ids) * num_bytes(table[0]), flops=0)


def store_small(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    cases = []
    for rows, padding, has_drafts in ((1, 0, False), (4, 3, False), (200, 0, False), (6, 1, True)):
        none = torch.zeros(padding, dtype=torch.int64)
        slots, ends = torch.randperm(rows, generator=generator), torch.arange(rows) % 38 + 1
        tensors = {
            "token_ids": torch.cat([torch.arange(rows) - 1, none]),
            "slots": torch.cat([slots, none + rows]),
            "ends": torch.cat([ends, none]),
            "tokens": torch.full((rows + 1, 40), 7, dtype=torch.int32),
            "num_computed": torch.full((rows + 1,), 5),
        }
        label = f"R={rows} padding={padding} drafts={has_drafts}"
        cases.append(Case(label, tensors, {"has_drafts": has_drafts}))
    return cases


def apply_store(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    *inputs, tokens, num_computed = case.tensors.values()
    tokens, num_computed, out = tokens.clone(), num_computed.clone(), torch.empty_like(inputs[0])
    written = None if case.numbers["has_drafts"] else num_computed
    kernel.run(*inputs, tokens=tokens, num_computed=written, out=out)
    return tokens, num_computed, out


def store_cost(case: Case) -> Cost:
    return Cost(num_bytes=6 * num_bytes(case.tensors["slots"]), flops=0)


_EMBED_SMALL = ((0, 64), (1, 128), (5, 96), (3, 7))
_EMBED_WIDE = ((1, 3072), (64, 3072), (400, 6144))
CASES = {
    PLACE_TOKENS: OpCases(place_small, apply_place, place_cost),
    EMBED_TOKENS: tabled(_embed_case, _EMBED_SMALL, apply_embed, embed_cost, _EMBED_WIDE),
    STORE_TOKENS: OpCases(store_small, apply_store, store_cost),
}
