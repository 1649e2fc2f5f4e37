from functools import partial

import torch
from torch import Tensor

from negamax.kernels.kvcache.op import LOCATE, TokenTables
from negamax.kernels.op import AnyKernel
from negamax.kernels.rotary import signed_frequencies
from tests.kernel_cases.case import Case, Cost, OpCases, num_bytes


def small(dtype: torch.dtype, generator: torch.Generator) -> list[Case]:
    draw, cases = partial(torch.randint, generator=generator), []
    sizes = ((0, 1, 1, 16, 8), (1, 3, 2, 64, 64), (37, 5, 3, 5, 10))
    for num_tokens, rows, kv_heads, block_size, rotary_dim in sizes:
        tensors = {
            "positions": draw(0, 12 * block_size, (num_tokens,)),
            "token_slots": draw(0, rows, (num_tokens,)),
            "block_tables": draw(0, 1000, (rows, 12), dtype=torch.int32),
            "frequencies": signed_frequencies(rotary_dim, 5e6),
        }
        label = f"T={num_tokens} {kv_heads=} {block_size=} {rotary_dim=}"
        cases.append(Case(label, tensors, {"kv_heads": kv_heads, "block_size": block_size}))
    return cases


def apply(kernel: AnyKernel, case: Case) -> tuple[Tensor, ...]:
    *tokens, frequencies = case.tensors.values()
    outputs: tuple[Tensor, ...] = kernel.run(TokenTables(*tokens), frequencies, **case.numbers)
    return outputs


def cost(case: Case) -> Cost:
    t = case.tensors
    per_token = 8 * t["frequencies"].shape[0] + 8 * case.numbers["kv_heads"]
    read = num_bytes(t["positions"], t["token_slots"])
    return Cost(num_bytes=read + t["positions"].shape[0] * per_token, flops=0)


CASES = {LOCATE: OpCases(small, apply, cost)}
