"""Compute cache rows and rope angles of a step's tokens in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.kvcache.op import LOCATE, TokenTables
from negamax.kernels.launch.ptx import wait_for_predecessor
from negamax.kernels.launch.triton import launch_options, triton_kernel


@triton.jit(do_not_specialize=["rank"])
def _locate_kernel(
    positions,  # [T] int64
    token_slots,  # [T] int64, row of each token's sequence in `tables`
    tables,  # [slots, table_stride] int32, block tables
    frequencies,  # [ROTARY] fp32
    cos,  # [T, ROTARY] fp32, written
    sin,  # [T, ROTARY] fp32, written
    slot_mapping,  # [T * KV_HEADS] int64, written: rows in K and V caches; -1: on another rank
    table_stride,
    rank,
    KV_HEADS: tl.constexpr, HEADS_POW2: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROTARY: tl.constexpr,  # number of rotated dimensions; 0: frequencies, cos and sin are None
    ROTARY_POW2: tl.constexpr,
    RANKS: tl.constexpr,  # number of ranks; each rank holds every RANKS-th block
    FIRST: tl.constexpr,  # index of the first sharded block in a rank's cache
    PDL: tl.constexpr,
):  # fmt: skip
    """Locate one token: angles, and cache rows (-1 if another rank holds the block). Grid (T,)."""
    wait_for_predecessor(PDL)  # Later kernels read `cos` before they wait: no `launch_dependents`
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    table = tables + tl.load(token_slots + token) * table_stride
    block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    head = tl.arange(0, HEADS_POW2)
    row = ((block // RANKS + FIRST) * KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE
    if RANKS > 1:
        row = tl.where(block % RANKS == rank, row, -1)
    tl.store(slot_mapping + token * KV_HEADS + head, row, mask=head < KV_HEADS)
    if ROTARY > 0:
        i = tl.arange(0, ROTARY_POW2)
        angle = position.to(tl.float32) * tl.load(frequencies + i, mask=i < ROTARY, other=0.0)
        tl.store(cos + token * ROTARY + i, tl.cos(angle), mask=i < ROTARY)
        tl.store(sin + token * ROTARY + i, tl.sin(angle), mask=i < ROTARY)


def locate(
    tokens: TokenTables, frequencies: Tensor, *, kv_heads: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    positions, token_slots, block_tables = tokens
    num_tokens, rotary_dim, device = positions.shape[0], frequencies.shape[0], positions.device
    cos, sin = torch.empty(
        2, num_tokens, 1, rotary_dim, dtype=torch.float32, device=device
    ).unbind()
    slot_mapping = torch.empty(num_tokens * kv_heads, dtype=torch.int64, device=device)
    if num_tokens:
        _locate_kernel[(num_tokens,)](
            positions, token_slots, block_tables, frequencies, cos, sin, slot_mapping,
            block_tables.stride(0), 0, KV_HEADS=kv_heads,
            HEADS_POW2=triton.next_power_of_2(kv_heads), BLOCK_SIZE=block_size, ROTARY=rotary_dim,
            ROTARY_POW2=triton.next_power_of_2(rotary_dim), RANKS=1, FIRST=0, num_warps=1,
            **launch_options(device),
        )  # fmt: skip
    return cos, sin, slot_mapping


def own_rows(
    tokens: TokenTables, *, rank: int, ranks: int, first: int, heads: int, block_size: int
) -> Tensor:
    positions, token_slots, block_tables = tokens
    num_tokens = positions.shape[0]
    rows = torch.empty(num_tokens * heads, dtype=torch.int64, device=positions.device)
    if num_tokens:
        _locate_kernel[(num_tokens,)](
            positions, token_slots, block_tables, None, None, None, rows, block_tables.stride(0),
            rank, KV_HEADS=heads, HEADS_POW2=triton.next_power_of_2(heads), BLOCK_SIZE=block_size,
            ROTARY=0, ROTARY_POW2=0, RANKS=ranks, FIRST=first, PDL=False, num_warps=1,
        )  # fmt: skip
    return rows


KERNELS = (triton_kernel(LOCATE, locate),)
