"""Top-k block selection if each rank stores a shard of the index keys.

A rank scores the blocks that it stores (`attention/triton_own_blocks`). For each index head, the
rank sends its highest sort keys to the ranks that have this head. The receiving ranks select the
blocks. If the region of peer memory has a row for each token, one launch with a program per token
exchanges the sort keys by the LL protocol. With fewer rows than tokens, an all-gather exchanges the
sort keys before the launch. Tokens that attend to all blocks up to their position need no exchange.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.block_sparse.selection import BlockSelection, SparseShape
from negamax.kernels.block_sparse.triton_selection import (
    NO_BLOCK,
    NO_KEY,
    SelectionConstants,
    find_last_block,
    read_number,
    selection_constants,
    store_selection,
)
from negamax.kernels.collectives.triton_ll import add_flag, load_peer_base, load_peer_bases, poll
from negamax.kernels.launch.triton import launch_dependents_then_wait, launch_options
from negamax.kernels.peers import Collective, find_region


@dataclass(frozen=True)
class MergePlan:
    """The metadata of a step's tokens, and constants of the selection kernel."""

    metadata: AttentionMetadata
    shape: SparseShape
    constants: SelectionConstants


def plan_merge_shards(metadata: AttentionMetadata, shape: SparseShape) -> MergePlan:
    """Plan the selection of blocks for this rank's own heads."""
    constants = selection_constants(shape, 1, shape.dtype, shape.dtype, rows=1)
    return MergePlan(metadata, shape, constants._replace(HEADS=shape.kv_heads))


@triton.jit(do_not_specialize=["rank", "first_head", "num_tokens"])
def _merge_shards_kernel(
    keys,  # [SHARDS, T, INDEX_HEADS, TOPK] int64 sort keys; if WORLD > 1, only this rank's keys
    positions,  # [T] int64
    token_slots,  # [T] int64, row of each token's sequence in `tables`
    tables,  # [slots, table_stride] int32, block tables
    active,  # [1] int32, number of tokens before the padding; None: there is no padding
    ids,  # [T, HEADS, TOPK] int32, written as `BlockSelection.ids`
    pages,  # [T, HEADS, TOPK] int32, written as `BlockSelection.pages`
    addresses,  # field of the `PeerRegion` that exchanges the keys
    flags,  # field of the `PeerRegion` that exchanges the keys
    table_stride,
    num_tokens,
    rank,
    first_head,  # first index head of this rank
    INDEX_HEADS: tl.constexpr, HEADS_POW2: tl.constexpr, SHARDS: tl.constexpr,
    SHARDS_POW2: tl.constexpr,
    WORLD: tl.constexpr,  # number of ranks that send keys; 1: all keys are local
    ROWS: tl.constexpr,  # number of rows of the `PeerRegion`
    SLOT: tl.constexpr,  # number of words per row and sender in the `PeerRegion`
    C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Select blocks for this rank's heads of one token. Grid (T,). A row of the region contains
    the sort keys for the heads of the rank that reads the row.
    """
    TOPK_POW2: tl.constexpr = C.TOPK_POW2
    HEADS: tl.constexpr = C.HEADS
    TOPK: tl.constexpr = C.TOPK
    token = tl.program_id(0)
    launch_dependents_then_wait(PDL)
    position = tl.load(positions + token).to(tl.int32)
    if active is not None:
        position = tl.where(token < tl.load(active), position, -1)
    last = find_last_block(position, C.BLOCK)
    head, column = tl.arange(0, HEADS_POW2), tl.arange(0, TOPK_POW2)
    is_there = head < HEADS
    block = tl.where(column <= last, column, NO_BLOCK)[None, :] + head[:, None] * 0
    if last >= TOPK:
        shard = tl.arange(0, SHARDS_POW2)[None, :, None]
        at = head[:, None, None] * TOPK + column[None, None, :]
        mask = (head < HEADS)[:, None, None] & (column < TOPK)[None, None, :] & (shard < SHARDS)
        if WORLD > 1:
            words: tl.constexpr = HEADS * TOPK * 2
            own_words = keys.to(tl.pointer_type(tl.int32), bitcast=True)
            own_words += token.to(tl.int64) * (INDEX_HEADS * TOPK * 2)
            flag = tl.load(flags + token) + 1
            offset = ((flag & 1) * ROWS + token) * (WORLD * SLOT)
            word = tl.arange(0, 2 * HEADS_POW2 * TOPK_POW2)
            bases = load_peer_bases(addresses, WORLD)
            sent = ()
            for peer in tl.static_range(WORLD):  # issue all loads first, so that they overlap
                its = own_words + (peer * INDEX_HEADS // WORLD) * (TOPK * 2) + word
                sent = sent + (add_flag(tl.load(its, mask=word < words, other=0), flag),)  # noqa: RUF005
            for peer in tl.static_range(WORLD):
                to = bases[peer] + offset + rank * SLOT + word
                tl.store(to, sent[peer], mask=word < words)
            half = tl.arange(0, 2)[None, None, None, :]
            arrived = poll(
                load_peer_base(addresses, rank) + offset,
                (shard * SLOT + at * 2)[:, :, :, None] + half,
                flag,
                mask[:, :, :, None] & (half >= 0),
                addresses + WORLD,
            )
            low, high = tl.split(arrived)
            key = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
            tl.store(flags + token, flag)
        else:
            row = (shard * num_tokens + token).to(tl.int64) * INDEX_HEADS + first_head
            key = tl.load(keys + row * TOPK + at, mask=mask, other=0)
        key = tl.reshape(tl.where(mask, key, NO_KEY), [HEADS_POW2, SHARDS_POW2 * TOPK_POW2])
        best = read_number(tl.topk(key, TOPK_POW2))
        block = tl.where(column[None, :] < TOPK, best, NO_BLOCK).to(tl.int32)
    table = tables + tl.load(token_slots + token) * table_stride
    store_selection(block, token * HEADS + head, head, table, is_there, ids, pages, C)


def merge_shards(keys: Tensor, plan: MergePlan, group: Collective | None) -> BlockSelection:
    """Run `block_sparse.merge_shards`. The result is undefined for padding tokens."""
    shape, metadata, device = plan.shape, plan.metadata, keys.device
    num_tokens, index_heads = keys.shape[1:3]
    choice = BlockSelection.empty(num_tokens, shape, device)
    if num_tokens == 0:
        return choice
    words = 2 * shape.kv_heads * shape.topk_blocks
    region = find_region(group, "pick", num_tokens, words)
    if group is not None and region is None:
        keys = group.all_gather(keys, dim=0)
    world = 1 if region is None else shape.shard.ranks
    shards = max(world, len(keys))
    assert keys.is_contiguous()
    _merge_shards_kernel[(num_tokens,)](
        keys, metadata.positions, metadata.token_slots, metadata.block_tables,
        metadata.num_actual_tokens, choice.ids, choice.pages,
        None if region is None else region.addresses, None if region is None else region.flags,
        metadata.block_tables.stride(0), num_tokens, shape.shard.rank, shape.shard.first_head,
        INDEX_HEADS=index_heads, HEADS_POW2=triton.next_power_of_2(shape.kv_heads), SHARDS=shards,
        SHARDS_POW2=triton.next_power_of_2(shards), WORLD=world,
        ROWS=1 if region is None else region.rows, SLOT=1 if region is None else region.words,
        C=plan.constants, num_warps=1, **launch_options(device),
    )  # fmt: skip
    return choice
