"""Batch-invariant attention on the CPU with gathered keys and PyTorch's fused attention.

For a query at position p, kernels score `padded_keys(p + 1)` keys and mask the keys after p.
Decodes with the same padded length run as one batch. All queries of a prefill tile have the same
padded length. A query's result therefore does not depend on the batch or on chunk borders, and is
the same in prefill and decode. PyTorch computes each query row with the same bits if there are at
least 4 rows (tests/cpu/test_batch_invariance.py), so GEMMs with fewer rows are padded to 4 rows.

With 2 bf16 KV heads of dimension 128, a step of 16 sequences of 384 keys takes 0.82 ms on two Zen 4
cores with cold caches. Gathering keys and values takes 0.36 of the 0.82 ms. With batched GEMMs and
a separate softmax a step of 16 sequences took 1.44 ms. Scores and sums are fp32.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from negamax.kernels.attention.metadata import AttentionMetadata, PagedShape
from negamax.kernels.attention.op import (
    DECODE,
    PREFILL,
    QK_NORM_ROPE_WRITE,
    QkNorm,
    prepare_qk_norm,
    qk_norm,
    split_heads,
)
from negamax.kernels.kvcache.op import KvCache, TokenPlaces, write
from negamax.kernels.op import AnyKernel, Kernel
from negamax.kernels.peers import Collective

QUERY_TILE = 64  # query positions per prefill tile; keys are padded to multiples of this number
_ROW_MULTIPLE = 4  # query rows of GEMMs are padded to a multiple of this number
_GATHER_ROWS = 64  # maximum number of sequences whose keys are copied at a time; limits memory


def padded_keys(length: int, block_size: int) -> int:
    """Round `length` up to a multiple of max(64, an eighth of the next power of two)."""
    step = QUERY_TILE
    while length > 8 * step:
        step *= 2
    return -(-(-(-length // step) * step) // block_size) * block_size


def gather_index(
    tables: NDArray[np.int64], lengths: NDArray[np.int64], *, num_keys: int, shape: PagedShape
) -> Tensor:
    """Return the blocks to gather for sequences padded to `num_keys` keys.

    tables [S, max_blocks], lengths [S, 1] -> [S * kv_heads * num_keys / block_size] int64, indices
    into a cache viewed as [-1, block_size, head_dim]. Padding repeats the last block of a sequence;
    the repeated keys are masked.
    """
    last_block = (lengths - 1) // shape.block_size
    columns = np.minimum(np.arange(num_keys // shape.block_size), last_block)  # [S, blocks]
    blocks = tables[np.arange(len(tables))[:, None], columns] * shape.kv_heads
    return torch.from_numpy((blocks[:, None, :] + np.arange(shape.kv_heads)[:, None]).ravel())


def gather(cache: Tensor, index: Tensor, *, matrices: int) -> Tensor:
    """Gather cache blocks -> [matrices, 1, keys, head_dim], a matrix per sequence and KV head."""
    _, _, block_size, head_dim = cache.shape
    return (
        cache.view(-1, block_size, head_dim).index_select(0, index).view(matrices, 1, -1, head_dim)
    )


# --- decode --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeBucket:
    """A batch of S decodes, in which each sequence is padded to N keys."""

    rows: Tensor | None  # [S] int64, indices of the queries; None: all queries of the step
    blocks: Tensor  # result of `gather_index`: indices of the blocks that contain the keys
    mask: Tensor  # [S * kv_heads, 1, 1, keys] in the cache's dtype; 0: visible, -inf: masked


def plan_decode(queries: AttentionMetadata, shape: PagedShape) -> tuple[DecodeBucket, ...]:
    """Plan decodes, in which each sequence has one query at position seq_len - 1."""
    assert not shape.quantize, "CPU kernels have no FP8 output; set quantize=False"
    tables, seq_lens = queries.used_tables(shape.block_size).numpy(), queries.host_seq_lens
    members: dict[int, list[int]] = {}
    for row, length in enumerate(seq_lens):
        if length > 0:  # padding sequences have length 0 and are skipped
            members.setdefault(padded_keys(length, shape.block_size), []).append(row)
    buckets = []
    slices = [
        (keys, rows[i : i + _GATHER_ROWS])
        for keys, rows in members.items()
        for i in range(0, len(rows), _GATHER_ROWS)
    ]
    for num_keys, rows in slices:
        every = len(rows) == len(seq_lens)
        lengths = np.array([seq_lens[row] for row in rows])[:, None]  # [S, 1]
        blocks = gather_index(
            tables if every else tables[rows], lengths, num_keys=num_keys, shape=shape
        )
        hidden = np.repeat(np.arange(num_keys) >= lengths, shape.kv_heads, 0)[:, None, None, :]
        mask = torch.zeros(hidden.shape, dtype=shape.dtype).masked_fill_(
            torch.from_numpy(hidden), -torch.inf
        )
        buckets.append(DecodeBucket(None if every else torch.tensor(rows), blocks, mask))
    return tuple(buckets)


def decode(q: Tensor, cache: KvCache, plan: tuple[DecodeBucket, ...]) -> Tensor:
    """Attend with q [S, heads, head_dim] and return [S, heads * head_dim]."""
    assert cache.is_unscaled(q.dtype), "CPU kernels cannot read caches with KV scales"
    num_seqs, heads, head_dim = q.shape
    if len(plan) == 1 and plan[0].rows is None:
        return _decode_bucket(q, cache, plan[0])
    out = q.new_zeros(num_seqs, heads * head_dim)
    for bucket in plan:
        assert bucket.rows is not None
        out.index_copy_(
            0, bucket.rows, _decode_bucket(q.index_select(0, bucket.rows), cache, bucket)
        )
    return out


def _decode_bucket(q: Tensor, cache: KvCache, bucket: DecodeBucket) -> Tensor:
    num_seqs, heads, head_dim = q.shape
    # one GEMM per sequence and KV head; the rows are the query heads of the KV head
    matrices = num_seqs * cache.k.shape[1]
    group = heads // cache.k.shape[1]
    queries = q.reshape(matrices, 1, group, head_dim)
    if group % _ROW_MULTIPLE:
        queries = F.pad(queries, (0, 0, 0, -group % _ROW_MULTIPLE))
    k, v = (
        gather(cache.k, bucket.blocks, matrices=matrices),
        gather(cache.v, bucket.blocks, matrices=matrices),
    )
    out = F.scaled_dot_product_attention(queries, k, v, attn_mask=bucket.mask)
    return (
        out[:, :, :group].reshape(num_seqs, heads * head_dim)
        if group % _ROW_MULTIPLE
        else out.view(num_seqs, -1)
    )


# --- prefill -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrefillTile:
    """Adjacent queries of one sequence, and the mask of the keys that each query sees."""

    queries: slice
    mask: Tensor  # [padded queries, keys] in the cache's dtype; 0: visible, -inf: masked


@dataclass(frozen=True)
class PrefillRun:
    """The queries of one sequence, which are adjacent among the T queries of the step."""

    queries: slice
    blocks: Tensor  # result of `gather_index`: indices of the blocks that contain the keys
    tiles: tuple[PrefillTile, ...]


def plan_prefill(queries: AttentionMetadata, shape: PagedShape) -> tuple[PrefillRun, ...]:
    """Plan prefills; the queries of a sequence are the sequence's last tokens."""
    assert not shape.quantize, "CPU kernels have no FP8 output; set quantize=False"
    tables, runs, first = queries.used_tables(shape.block_size).numpy(), [], 0
    for table, end, count in zip(
        tables, queries.host_seq_lens, queries.host_query_lens, strict=True
    ):
        num_keys = padded_keys(end, shape.block_size)
        blocks = gather_index(table[None], np.array([[end]]), num_keys=num_keys, shape=shape)
        tiles = _plan_tiles(end - count, end, block_size=shape.block_size, dtype=shape.dtype)
        runs.append(PrefillRun(slice(first, first + count), blocks, tiles))
        first += count
    return tuple(runs)


def _plan_tiles(
    start: int, end: int, *, block_size: int, dtype: torch.dtype
) -> tuple[PrefillTile, ...]:
    """Split query positions start to end - 1 into tiles at each multiple of QUERY_TILE."""
    tiles = []
    first = start
    while first < end:
        last = min((first // QUERY_TILE + 1) * QUERY_TILE, end)
        num_keys = padded_keys(last, block_size)
        positions = torch.arange(first, first + -(-(last - first) // _ROW_MULTIPLE) * _ROW_MULTIPLE)
        mask = torch.zeros(len(positions), num_keys, dtype=dtype)
        mask.masked_fill_(torch.arange(num_keys) > positions[:, None], -torch.inf)
        tiles.append(PrefillTile(slice(first - start, last - start), mask))
        first = last
    return tuple(tiles)


def prefill(q: Tensor, cache: KvCache, plan: tuple[PrefillRun, ...]) -> Tensor:
    """Attend with q [T, heads, head_dim] and return [T, heads * head_dim]."""
    assert cache.is_unscaled(q.dtype), "CPU kernels cannot read caches with KV scales"
    num_tokens, heads, head_dim = q.shape
    out = q.new_empty(num_tokens, heads * head_dim)
    for run in plan:
        _prefill_run(q[run.queries], cache, run, out[run.queries])
    return out


def _prefill_run(q: Tensor, cache: KvCache, run: PrefillRun, out: Tensor) -> None:
    """Attend with q [T, heads, head_dim] of one sequence; write out [T, heads * head_dim]."""
    num_tokens, heads, head_dim = q.shape
    kv_heads = cache.k.shape[1]
    group = heads // kv_heads
    k, v = (
        gather(own, run.blocks, matrices=kv_heads).expand(kv_heads, group, -1, head_dim)
        for own in (cache.k, cache.v)
    )
    out = out.view(num_tokens, kv_heads, group, head_dim)
    for tile in run.tiles:
        queries = q[tile.queries].unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)
        count, num_keys = queries.shape[2], tile.mask.shape[1]
        if count % _ROW_MULTIPLE:
            queries = F.pad(queries, (0, 0, 0, -count % _ROW_MULTIPLE))
        mixed = F.scaled_dot_product_attention(
            queries, k[:, :, :num_keys], v[:, :, :num_keys], attn_mask=tile.mask
        )
        out[tile.queries] = mixed[:, :, :count].permute(2, 0, 1, 3)


# --- QK norm, rope, cache write ------------------------------------------------------------------


def qk_norm_rope_write(
    qkv: Tensor, norm: QkNorm, at: TokenPlaces, cache: KvCache, *, group: Collective | None = None
) -> Tensor:
    """Run `attention.qk_norm_rope_write`. Rope overwrites copies of q and k, not `qkv`."""
    q, k, v = split_heads(qkv, heads=norm.heads, kv_heads=norm.kv_heads)
    q, k = qk_norm(q, k, norm, group=group)
    rotary_dim = at.cos.shape[-1]
    for rotated in (q[..., :rotary_dim], k[..., :rotary_dim]):
        torch.addcmul(rotated * at.cos, rotated.roll(rotary_dim // 2, -1), at.sin, out=rotated)
    write(k, v, cache, at.rows)
    return q.to(qkv.dtype)


KERNELS: tuple[AnyKernel, ...] = (
    Kernel(QK_NORM_ROPE_WRITE, "cpu", qk_norm_rope_write, prepare_qk_norm),
    Kernel(DECODE, "bucketed", decode, plan_decode),
    Kernel(PREFILL, "bucketed", prefill, plan_prefill),
)
