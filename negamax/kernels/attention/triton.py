"""Attention on the GPU: one launch for QK norm + rope + cache write, one for the decodes of a step, one for its prefills.

Decode. The keys of all sequences are cut into tiles; a kernel of one program shares them out, once per step, among a fixed
number of programs per KV head (as many as the machine runs at once): pieces of one sequence each where there are programs
enough, else equal runs through all of them. One sequence of 100,000 tokens keeps the whole machine busy, and so do a hundred
short ones; the lengths stay on the device. A program that holds only a part of a sequence leaves its result in a workspace;
the last one to arrive combines the parts. At these sizes a program's own latency counts as much as its bytes: the fewest
instructions are wanted, so a cache holds finite values everywhere, and is read without masks.

Prefill. One program per tile of queries and query head, over the paged keys; the tiles are listed on the host, those with the
most keys first.

Scores, softmax and sums are in fp32; FP8 keys and values are multiplied as fp16, which holds them exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from negamax.kernels.activations import Activations
from negamax.kernels.attention.spec import PagedQueries, PagedShape
from negamax.kernels.attention.tiles import DECODE, decode_launch, prefill_launch, prefill_queries
from negamax.kernels.collectives.spec import Collective
from negamax.kernels.collectives.triton import copy_of, poll, push
from negamax.kernels.kvcache.spec import FP8
from negamax.kernels.launch.triton import launch_options, wait_for_inputs
from negamax.kernels.op import Kernel

_LOG2_E = math.log2(math.e)
_RECORD = 16  # words per program in a decode plan: first tile, end, sequence, nothing, then the sequence's record
_SEQUENCE = 8  # words per sequence: first tile, end, tokens, table row, first program, programs
_SEQUENCES = 128  # sequences the planning program looks at together
_PARTS = 4  # partial results read at a time


def _interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


def _dot_dtype(dtype: torch.dtype, cache: torch.dtype) -> tl.dtype:
    """What the products are made of; the interpreter multiplies fp32 only."""
    if _interpreted():
        return tl.float32
    return tl.float16 if FP8 in (cache, dtype) or dtype == torch.float16 else tl.bfloat16


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


# --- QK norm, rope, cache write -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TritonQkNorm:
    """This rank's slices of the two norm weights and the constants of the norms."""

    weight: Tensor  # [(heads + kv_heads) * head_dim] fp32, q part first
    heads: int
    kv_heads: int
    q_count: float  # elements in the sum of squares over all ranks
    k_count: float
    eps: float


def prepare_qk_norm(weight: Tensor, *, heads: int, kv_heads: int, eps: float, ranks: int) -> TritonQkNorm:
    """weight [(heads + kv_heads) * head_dim] fp32; heads of this rank, of which the attention group has `ranks`."""
    head_dim = weight.shape[0] // (heads + kv_heads)
    return TritonQkNorm(weight, heads, kv_heads, float(heads * head_dim * ranks), float(kv_heads * head_dim * ranks), eps)


@triton.jit
def _finite(x, dtype: tl.constexpr):
    """x in fp32, NaN as 0 and infinities as the largest number of `dtype`."""
    largest: tl.constexpr = 65504.0 if dtype == tl.float16 else 3.3895313892515355e38
    x = x.to(tl.float32)
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, -largest), largest)


@triton.jit
def _stored(x, dtype: tl.constexpr):
    """x in the dtype of a cache; FP8 saturates."""
    if dtype == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    return x.to(dtype)


@triton.jit
def _q_and_k(rows, head, HEADS: tl.constexpr):
    """The sums of the query heads' and of the key heads' `rows` [heads]."""
    return tl.sum(tl.where(head < HEADS, rows, 0.0), axis=0), tl.sum(tl.where(head < HEADS, 0.0, rows), axis=0)


@triton.jit
def _over_ranks(q_sum, k_sum, addresses, epochs, token, region_rows, rank, WORLD: tl.constexpr):
    """Both sums over all ranks, exchanged through the peers' memory; the same order of summation on every rank."""
    epoch = tl.load(epochs + token) + 1
    row = ((epoch & 1) * region_rows + token).to(tl.int64) * (WORLD * 2)
    word = tl.arange(0, 2)
    bits = tl.where(word == 0, q_sum, k_sum).to(tl.int32, bitcast=True)
    push(addresses, row + rank * 2, word, bits, epoch, word < 2, WORLD)
    own = copy_of(addresses, rank)
    index = tl.arange(0, WORLD * 2)
    got = poll(own + row, index, epoch, index < WORLD * 2).to(tl.float32, bitcast=True)
    tl.debug_barrier()
    tl.store(epochs + token, epoch)
    return tl.sum(tl.where(index % 2 == 0, got, 0.0), axis=0), tl.sum(tl.where(index % 2 == 1, got, 0.0), axis=0)


@triton.jit
def _sums_kernel(
    qkv, sums, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """sums [T, 2] fp32: squares of a token's q and of its k."""
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    mask = (head < HEADS + KV_HEADS)[:, None] & (column < DIM)[None, :]
    x = tl.load(qkv + token * ((HEADS + 2 * KV_HEADS) * DIM) + head[:, None] * DIM + column[None, :], mask=mask, other=0.0)
    x = _finite(x, qkv.dtype.element_ty)
    q_sum, k_sum = _q_and_k(tl.sum(x * x, axis=1), head, HEADS)
    tl.store(sums + token * 2, q_sum)
    tl.store(sums + token * 2 + 1, k_sum)


@triton.jit
def _token_sums(
    squares, head, sums, addresses, epochs, token, region_rows, rank,
    HEADS: tl.constexpr, SUMS: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """Sums of squares of a token's q and of its k over all ranks: those in `sums`, or from `squares` [heads] of this rank."""
    if SUMS:
        q_sum, k_sum = tl.load(sums + token * 2), tl.load(sums + token * 2 + 1)
    else:
        q_sum, k_sum = _q_and_k(squares, head, HEADS)
        if WORLD > 1:
            q_sum, k_sum = _over_ranks(q_sum, k_sum, addresses, epochs, token, region_rows, rank, WORLD)
    return q_sum, k_sum


@triton.jit
def _rows_out(x, q_out, k_rows, cache_row, head, column, mask, inverse_k_scale, HEADS: tl.constexpr, DIM: tl.constexpr):
    """x [heads of q and k, columns]: query heads to q_out, key heads to their rows of the cache."""
    tl.store(q_out + head[:, None] * DIM + column[None, :], x.to(q_out.dtype.element_ty), mask=mask & (head < HEADS)[:, None])
    keys = mask & ((head >= HEADS) & (cache_row >= 0))[:, None]
    tl.store(k_rows + column[None, :], _stored(x * inverse_k_scale, k_rows.dtype.element_ty), mask=keys)


@triton.jit
def _values_out(
    v,
    v_cache,
    cache_rows,
    inverse_scale,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A token's values v [kv_heads, DIM] to their rows of the cache."""
    head, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    row = tl.load(cache_rows + head, mask=head < KV_HEADS, other=-1)
    mask = (row >= 0)[:, None] & (column < DIM)[None, :]
    x = _finite(tl.load(v + head[:, None] * DIM + column[None, :], mask=mask, other=0.0), v.dtype.element_ty)
    to = v_cache + row[:, None] * DIM + column[None, :]
    tl.store(to, _stored(x * inverse_scale, v_cache.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["region_rows", "rank"])
def _qk_norm_rope_write_kernel(
    qkv,
    weight,
    cos,
    sin,
    q_out,
    k_cache,
    v_cache,
    cache_rows,
    sums,  # [T, 2] fp32 where SUMS
    addresses,  # of the peers' regions where WORLD > 1
    epochs,
    region_rows,
    rank,
    q_count,
    k_count,
    eps,
    inverse_k_scale,
    inverse_v_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,  # heads + kv_heads, padded; likewise the three below
    KV_ROWS: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    REST_COLUMNS: tl.constexpr,  # of the dimensions that are not rotated; 0: there are none
    V_COLUMNS: tl.constexpr,
    SUMS: tl.constexpr,
    WORLD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token. Its heads are read as the two halves of the rotated dimensions and the rest."""
    token = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = qkv.dtype.element_ty
    qkv += token * ((HEADS + 2 * KV_HEADS) * DIM)
    q_out += token * (HEADS * DIM)
    cache_rows += token * KV_HEADS
    head = tl.arange(0, ROWS)
    valid = head < HEADS + KV_HEADS
    i = tl.arange(0, HALF_COLUMNS)
    half_mask = valid[:, None] & (i < HALF)[None, :]
    low_at = head[:, None] * DIM + i[None, :]
    # What the kernel before this one did not write is asked for while that one ends.
    cache_row = tl.load(cache_rows + head - HEADS, mask=(head >= HEADS) & valid, other=-1)
    low_weight = tl.load(weight + low_at, mask=half_mask, other=0.0)
    high_weight = tl.load(weight + low_at + HALF, mask=half_mask, other=0.0)
    c = tl.load(cos + token * (2 * HALF) + i, mask=i < HALF, other=0.0)[None, :]
    s = tl.load(sin + token * (2 * HALF) + HALF + i, mask=i < HALF, other=0.0)[None, :]
    if REST_COLUMNS > 0:
        j = tl.arange(0, REST_COLUMNS)
        rest_mask = valid[:, None] & (j < DIM - 2 * HALF)[None, :]
        rest_at = head[:, None] * DIM + (2 * HALF + j)[None, :]
        rest_weight = tl.load(weight + rest_at, mask=rest_mask, other=0.0)
    wait_for_inputs(PDL)
    low = tl.load(qkv + low_at, mask=half_mask, other=0.0)
    high = tl.load(qkv + low_at + HALF, mask=half_mask, other=0.0)
    if REST_COLUMNS > 0:
        rest = tl.load(qkv + rest_at, mask=rest_mask, other=0.0)
    v_at = qkv + (HEADS + KV_HEADS) * DIM
    _values_out(v_at, v_cache, cache_rows, inverse_v_scale, KV_HEADS, DIM, KV_ROWS, V_COLUMNS)
    low, high = _finite(low, dtype), _finite(high, dtype)
    if REST_COLUMNS > 0:
        rest = _finite(rest, dtype)
    squares = tl.sum(low * low + high * high, axis=1)
    if REST_COLUMNS > 0:
        squares += tl.sum(rest * rest, axis=1)
    q_sum, k_sum = _token_sums(squares, head, sums, addresses, epochs, token, region_rows, rank, HEADS, SUMS, WORLD)
    norm = tl.where(head < HEADS, tl.rsqrt(q_sum / q_count + eps), tl.rsqrt(k_sum / k_count + eps))[:, None]
    low, high = low * norm * low_weight, high * norm * high_weight
    k_row = k_cache + cache_row[:, None] * DIM
    _rows_out(low * c - high * s, q_out, k_row, cache_row, head, i, half_mask, inverse_k_scale, HEADS, DIM)
    _rows_out(high * c + low * s, q_out + HALF, k_row + HALF, cache_row, head, i, half_mask, inverse_k_scale, HEADS, DIM)
    if REST_COLUMNS > 0:
        rest = rest * norm * rest_weight
        _rows_out(rest, q_out + 2 * HALF, k_row + 2 * HALF, cache_row, head, j, rest_mask, inverse_k_scale, HEADS, DIM)


def qk_norm_rope_write(
    qkv: Tensor,
    norm: TritonQkNorm,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: Tensor,
    *,
    group: Collective | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """As the definition, but `qkv` is left as it is, and tokens whose `rows` are negative are not written to the cache.

    With several ranks: one launch where their memory has a row for every token, else the sums go through the group between two.
    """
    assert qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    num_tokens, head_dim, half = qkv.shape[0], k_cache.shape[-1], cos.shape[-1] // 2
    heads, kv_heads = norm.heads, norm.kv_heads
    q = qkv.new_empty(num_tokens, heads, head_dim)
    if num_tokens == 0:
        return q
    padded = triton.next_power_of_2(heads + kv_heads)
    columns = triton.next_power_of_2(head_dim)
    warps = 8 if padded * columns > 4096 else 4
    sums, region, world, rank = None, None, 1, 0
    if group is not None and group.size > 1:
        if group.peers is not None and num_tokens <= group.peers.stats.rows:
            region, world, rank = group.peers.stats, group.size, group.rank
        else:
            sums = torch.empty(num_tokens, 2, dtype=torch.float32, device=qkv.device)
            _sums_kernel[(num_tokens,)](qkv, sums, heads, kv_heads, head_dim, padded, columns, num_warps=warps)
            sums = group.all_reduce(sums)
    _qk_norm_rope_write_kernel[(num_tokens,)](
        qkv,
        norm.weight,
        cos,
        sin,
        q,
        k_cache,
        v_cache,
        rows,
        sums,
        region.addresses if region else None,
        region.epochs if region else None,
        region.rows if region else 0,
        rank,
        norm.q_count,
        norm.k_count,
        norm.eps,
        1.0 / kv_scales[0],
        1.0 / kv_scales[1],
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=head_dim,
        HALF=half,
        ROWS=padded,
        KV_ROWS=triton.next_power_of_2(kv_heads),
        HALF_COLUMNS=triton.next_power_of_2(half),
        REST_COLUMNS=triton.next_power_of_2(head_dim - 2 * half) if head_dim > 2 * half else 0,
        V_COLUMNS=columns,
        SUMS=sums is not None,
        WORLD=world,
        num_warps=warps,
        **launch_options(qkv.device),
    )
    return q


# --- what decode and prefill share ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Output:
    """The result of a call: in the model's dtype and, if asked for, in FP8 with a scale per token and head."""

    plain: Tensor  # [T, heads * head_dim]
    values: Tensor | None
    scales: Tensor | None  # [T, heads] fp32

    @classmethod
    def empty(cls, q: Tensor, *, quantize: bool) -> _Output:
        """For q [T, heads, head_dim]."""
        num_tokens, heads, head_dim = q.shape
        plain = torch.empty(num_tokens, heads * head_dim, dtype=q.dtype, device=q.device)
        if not quantize:
            return cls(plain, None, None)
        assert head_dim == 128, "FP8 activations have a scale per 128 columns"
        scales = torch.empty(num_tokens, heads, dtype=torch.float32, device=q.device)
        return cls(plain, torch.empty_like(plain, dtype=FP8), scales)

    def result(self) -> Tensor | Activations:
        if self.values is None or self.scales is None:
            return self.plain
        return Activations(self.plain, self.values, self.scales)


@triton.jit
def _write_heads(x, row, column, mask, out, values, scales, DIM: tl.constexpr, QUANTIZE: tl.constexpr):
    """x [rows, columns] fp32 to the heads `row` (token * heads + head) of the output."""
    at = row[:, None] * DIM + column[None, :]
    inside = mask[:, None] & (column < DIM)[None, :]
    x = x.to(out.dtype.element_ty)
    tl.store(out + at, x, mask=inside)
    if QUANTIZE:
        x = x.to(tl.float32)
        largest = tl.max(tl.abs(x), axis=1)
        scale = tl.where(largest == 0.0, 1.0, tl.maximum(largest * (1.0 / 448.0), 1e-30))
        x = tl.minimum(tl.maximum(x * (1.0 / scale)[:, None], -448.0), 448.0)
        tl.store(values + at, x.to(tl.float8e4nv), mask=inside)
        tl.store(scales + row, scale, mask=mask)


@triton.jit
def _tile_start(
    table, tile, length, head, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr
):
    """Where a tile of KEYS keys begins in a cache, of which `table` lists the sequence's blocks: one offset where a block holds
    the whole tile, else one per key [KEYS]. Keys that the sequence does not have are read from block 0."""
    key = tile * KEYS if BLOCK_SIZE % KEYS == 0 else tile * KEYS + tl.arange(0, KEYS)
    block = tl.load(table + key // BLOCK_SIZE, mask=key < length, other=0).to(tl.int64)
    return (block * KV_HEADS + head) * (BLOCK_SIZE * DIM) + (key % BLOCK_SIZE) * DIM


@triton.jit
def _load_tile(
    cache, start, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, DOT: tl.constexpr
):
    """[KEYS, COLUMNS]. Nothing is masked: a cache holds finite values everywhere, and who reads it masks the scores."""
    column = tl.arange(0, COLUMNS)
    if BLOCK_SIZE % KEYS == 0:
        at = cache + start + ((tl.arange(0, KEYS) * DIM)[:, None] + column[None, :])
    else:
        at = cache + start[:, None] + column[None, :]
    if COLUMNS == DIM:
        return tl.load(at).to(DOT)
    return tl.load(at, mask=(column < DIM)[None, :], other=0.0).to(DOT)


@triton.jit
def _softmax_step(scores, scale, peak, mass):
    """A tile of scores into the running maximum (times `scale`) and sum; returns what exp2 makes of it, and of the old ones."""
    new = tl.maximum(peak, tl.max(scores, axis=1) * scale)
    safe = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen no key yet
    p = tl.exp2(scores * scale - safe[:, None])
    fade = tl.exp2(peak - safe)
    return p, fade, new, mass * fade + tl.sum(p, axis=1)


# --- decode ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodePlan:
    """The shares of the programs and the room for what they leave to each other; every layer of the step uses them."""

    queries: PagedQueries
    shape: PagedShape
    quantize: bool
    sequences: Tensor  # [S, 8] int32
    records: Tensor  # [programs, 16] int32
    counters: Tensor  # [S * kv_heads] int32, parts that arrived; zero between launches
    programs: int  # per KV head


@triton.jit
def _tiles_of(seq_lens, start, num_seqs, KEYS: tl.constexpr, SEQUENCES: tl.constexpr):
    """Tiles of the sequences from `start` on; an empty one has a tile too, so that it is answered (with zeros)."""
    seq = start + tl.arange(0, SEQUENCES)
    live = seq < num_seqs
    length = tl.load(seq_lens + seq, mask=live, other=0)
    return seq, live, length, tl.where(live, tl.maximum(tl.cdiv(length, KEYS), 1), 0)


@triton.jit
def _share(
    seq_lens, num_seqs, limit, MIN_TILES: tl.constexpr, PROGRAMS: tl.constexpr, KEYS: tl.constexpr, SEQUENCES: tl.constexpr
):
    """Tiles that a program takes at most, an equal share of all, and how many there are.

    Where there are fewer sequences than programs: the least for which the pieces of all sequences find a program each.
    """
    _, _, _, tiles = _tiles_of(seq_lens, 0, num_seqs, KEYS, SEQUENCES)
    total, most = tl.sum(tiles, axis=0), tl.max(tiles, axis=0)
    for start in range(SEQUENCES, num_seqs, SEQUENCES):
        _, _, _, others = _tiles_of(seq_lens, start, num_seqs, KEYS, SEQUENCES)
        total += tl.sum(others, axis=0)
        most = tl.maximum(most, tl.max(others, axis=0))
    low = tl.maximum(tl.cdiv(total, limit), MIN_TILES)
    high = tl.where(num_seqs <= PROGRAMS, tl.maximum(most, low), low)
    while low < high:
        middle = (low + high) // 2
        pieces = tl.sum(tl.cdiv(tiles, middle), axis=0)
        for start in range(SEQUENCES, num_seqs, SEQUENCES):
            _, _, _, others = _tiles_of(seq_lens, start, num_seqs, KEYS, SEQUENCES)
            pieces += tl.sum(tl.cdiv(others, middle), axis=0)
        fits = pieces <= limit
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    return low, total


@triton.jit(do_not_specialize=["num_seqs"])
def _plan_decode_kernel(
    seq_lens,
    table_rows,
    sequences,
    records,
    counters,
    num_seqs,
    KV_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FEW: tl.constexpr,  # of the programs, that are used while they are enough
    PADDED_PROGRAMS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    SEQUENCE: tl.constexpr,
    RECORD: tl.constexpr,
):
    """One program. Few sequences: each is cut into equal pieces, one a program. Many: a program takes `share` tiles of all."""
    program = tl.arange(0, PADDED_PROGRAMS)
    for word in tl.static_range(3):
        tl.store(records + program * RECORD + word, tl.zeros_like(program), mask=program < PROGRAMS)  # no work
    tl.debug_barrier()
    limit = tl.where(num_seqs <= FEW, FEW, PROGRAMS)
    share, total = _share(seq_lens, num_seqs, limit, MIN_TILES, PROGRAMS, KEYS, SEQUENCES)
    cut = num_seqs <= PROGRAMS
    tiles_before, programs_before = 0, 0
    for start in range(0, num_seqs, SEQUENCES):
        seq, live, length, tiles = _tiles_of(seq_lens, start, num_seqs, KEYS, SEQUENCES)
        table_row = tl.load(table_rows + seq, mask=live, other=0).to(tl.int32)
        end = tiles_before + tl.cumsum(tiles, axis=0)
        base = end - tiles
        pieces = tl.cdiv(tiles, share)
        first = programs_before + tl.cumsum(pieces, axis=0) - pieces
        tiles_before += tl.sum(tiles, axis=0)
        programs_before += tl.sum(pieces, axis=0)
        first = tl.where(cut, first, base // share)
        count = tl.where(cut, pieces, (end - 1) // share - first + 1)
        to = sequences + seq * SEQUENCE
        _sequence_record(to, base, end, length, table_row, first, count, live)
        for head in tl.static_range(KV_HEADS):
            tl.store(counters + seq * KV_HEADS + head, tl.zeros_like(seq), mask=live)
        # The programs that begin in a sequence; of many sequences' run of tiles, the first program began before.
        begins = tl.where(cut, first, tl.cdiv(base, share))
        number = tl.where(live, first + count - begins, 0)
        piece = tl.where(cut, tl.cdiv(tiles, tl.maximum(pieces, 1)), share)
        offset = tl.where(cut, base, begins * share)
        for i in range(0, tl.max(number, axis=0)):
            to = records + (begins + i) * RECORD
            tile = offset + i * piece
            last = tl.minimum(tile + piece, tl.where(cut, end, total))
            tl.store(to, tile, mask=i < number)
            tl.store(to + 1, last, mask=i < number)
            tl.store(to + 2, seq, mask=i < number)
            _sequence_record(to + 4, base, end, length, table_row, first, count, i < number)


@triton.jit
def _sequence_record(to, base, end, length, table_row, first_program, count, mask):
    """What a program must know of a sequence."""
    tl.store(to, base, mask=mask)
    tl.store(to + 1, end, mask=mask)
    tl.store(to + 2, length, mask=mask)
    tl.store(to + 3, table_row, mask=mask)
    tl.store(to + 4, first_program, mask=mask)
    tl.store(to + 5, count, mask=mask)


@triton.jit
def _leave_part(parts, slot, peak, mass, acc, ROWS: tl.constexpr, PART_ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A part for `_combine`: the first PART_ROWS of ROWS rows, written by the whole program before it goes on."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    result, logarithm = acc * (1.0 / mass)[:, None], peak + tl.log2(mass)
    part = parts + slot * (PART_ROWS * (COLUMNS + 4))
    tl.store(part + row[:, None] * COLUMNS + column[None, :], result, mask=(row < PART_ROWS)[:, None])
    part += PART_ROWS * COLUMNS + row[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(part, logarithm[:, None] + tl.zeros([ROWS, 4], tl.float32), mask=(row < PART_ROWS)[:, None])
    tl.debug_barrier()


@triton.jit
def _combine(parts, first, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """The result [ROWS, COLUMNS] of a sequence from its `count` parts: in slot first + 1, then first + 2, first + 4, ...

    A part is a result of its own [ROWS, COLUMNS] and the base-2 logarithm of its sum of exponentials [ROWS, 4], in four copies:
    read in fours, they come in the layout of the results, and no thread waits for another. Reading is all latency, so PARTS
    parts are asked for before the first is used; the barrier keeps the compiler from mixing the two.
    """
    SIZE: tl.constexpr = ROWS * (COLUMNS + 4)
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    result_at, weight_at = row * COLUMNS + column, ROWS * COLUMNS + row * 4 + column % 4
    peak = tl.full([ROWS, COLUMNS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS, COLUMNS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, count, PARTS):
        results, weights = (), ()
        for i in tl.static_range(PARTS):
            index = start + i
            part = parts + (first + 2 * index + tl.where(index == 0, 1, 0)) * SIZE
            live = (result_at >= 0) & (index < count)
            result = tl.load(part + result_at, mask=live, other=0.0, cache_modifier=".cg")
            weight = tl.load(part + weight_at, mask=live, other=float("-inf"), cache_modifier=".cg")
            results, weights = results + (result,), weights + (weight,)  # noqa: RUF005  Triton knows no other way
        tl.debug_barrier()
        new = peak
        for i in tl.static_range(PARTS):
            new = tl.maximum(new, weights[i])
        fade = tl.exp2(peak - new)
        mass, acc, peak = mass * fade, acc * fade, new
        for i in tl.static_range(PARTS):
            weight = tl.exp2(weights[i] - new)
            mass += weight
            acc += weight * results[i]
    return acc / mass


@triton.jit
def _sequence(at):
    """What `_sequence_record` wrote: first tile, end, tokens, table row, first program, programs."""
    base, end, length = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    return base, end, length, tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)


@triton.jit
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    tables,
    sequences,
    records,
    counters,
    parts,  # [kv_heads * programs * 2, PART_ROWS * (COLUMNS + 4)] fp32: see _combine
    out,
    values,
    scales,
    qk_scale,  # softmax scale * scale of the keys * log2(e)
    v_scale,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP, padded to what a product takes
    PART_ROWS: tl.constexpr,  # GROUP, padded to a power of 2
    COLUMNS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SEQUENCE: tl.constexpr,
    RECORD: tl.constexpr,
    PARTS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """A run of tiles of one KV head: the end of one sequence, perhaps some whole ones, the beginning of another.

    Heads are numbered first: programs without work come last then, and those with work spread over the multiprocessors.
    """
    head, program = tl.program_id(0), tl.program_id(1)
    record = records + program * RECORD
    tile, stop, seq = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    base, end, length, table_row, first_program, count = _sequence(record + 4)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    key_lane = tl.arange(0, KEYS)
    wait_for_inputs(PDL)  # the plan and the tables are from before this step's first layer
    while tile < stop:
        first_row = (seq * KV_HEADS + head) * GROUP
        q_mask = (row < GROUP)[:, None] & (column < DIM)[None, :]
        queries = tl.load(q + (first_row + row)[:, None] * DIM + column[None, :], mask=q_mask, other=0.0).to(DOT)
        table = tables + table_row.to(tl.int64) * table_stride
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        until = tl.minimum(stop, end)
        start = _tile_start(table, tile - base, length, head, KV_HEADS, DIM, BLOCK_SIZE, KEYS)
        for t in range(tile - base, until - base):
            k = _load_tile(k_cache, start, DIM, BLOCK_SIZE, KEYS, COLUMNS, DOT)
            v = _load_tile(v_cache, start, DIM, BLOCK_SIZE, KEYS, COLUMNS, DOT)
            # The blocks of the next tile, a tile ahead: a load that waits for another one would halve the pipeline.
            start = _tile_start(table, t + 1, length, head, KV_HEADS, DIM, BLOCK_SIZE, KEYS)
            scores = tl.dot(queries, tl.trans(k))
            scores = tl.where((key_lane < length - t * KEYS)[None, :], scores, float("-inf"))
            p, fade, peak, mass = _softmax_step(scores, qk_scale, peak, mass)
            acc = tl.dot(p.to(DOT), v, acc * fade[:, None])
        if (tile == base) & (until == end):
            result = acc * tl.where(mass == 0.0, 0.0, v_scale / mass)[:, None]
            _write_heads(result, first_row + row, column, row < GROUP, out, values, scales, DIM, QUANTIZE)
        else:
            slot = (head * PROGRAMS + program) * 2 + tl.where(tile == base, 1, 0)
            _leave_part(parts, slot, peak, mass, acc, ROWS, PART_ROWS, COLUMNS)
            counter = counters + seq * KV_HEADS + head
            arrived = tl.atomic_add(counter, 1, sem="acq_rel")
            if arrived == count - 1:
                tl.store(counter, 0)
                first_slot = (head * PROGRAMS + first_program) * 2
                result = _combine(parts, first_slot, count, PART_ROWS, COLUMNS, PARTS) * v_scale
                part_row = tl.arange(0, PART_ROWS)
                _write_heads(result, first_row + part_row, column, part_row < GROUP, out, values, scales, DIM, QUANTIZE)
        tile = until
        if tile < stop:
            seq += 1
            base, end, length, table_row, first_program, count = _sequence(sequences + seq * SEQUENCE)


def plan_decode(queries: PagedQueries, shape: PagedShape, *, dtype: torch.dtype, quantize: bool = False) -> DecodePlan:
    """One query per sequence, at position seq_len - 1. Reads the lengths on the device only."""
    num_seqs, device = queries.seq_lens.shape[0], queries.seq_lens.device
    programs = max(1, _multiprocessors(device) * DECODE.programs // shape.kv_heads)
    sizes = (num_seqs * _SEQUENCE, programs * _RECORD, num_seqs * shape.kv_heads)
    sequences, records, counters = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    if num_seqs:
        _plan_decode_kernel[(1,)](
            queries.seq_lens,
            queries.table_rows,
            sequences,
            records,
            counters,
            num_seqs,
            KV_HEADS=shape.kv_heads,
            KEYS=DECODE.keys,
            MIN_TILES=DECODE.min_tiles,
            PROGRAMS=programs,
            FEW=max(1, int(_multiprocessors(device) * DECODE.few // shape.kv_heads)),
            PADDED_PROGRAMS=triton.next_power_of_2(programs),
            SEQUENCES=_SEQUENCES,
            SEQUENCE=_SEQUENCE,
            RECORD=_RECORD,
            num_warps=4,
        )
    return DecodePlan(queries, shape, quantize, sequences, records, counters, programs)


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: DecodePlan, *, kv_scales: tuple[float, float] = (1.0, 1.0)
) -> Tensor | Activations:
    """q [S, heads, head_dim], caches [num_blocks, kv_heads, block_size, head_dim] -> [S, heads * head_dim]."""
    assert q.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()
    output = _Output.empty(q, quantize=plan.quantize)
    if q.shape[0] == 0:
        return output.result()
    head_dim, shape, tables = q.shape[2], plan.shape, plan.queries.block_tables
    part_rows, columns = triton.next_power_of_2(shape.group), triton.next_power_of_2(max(16, head_dim))
    slots = shape.kv_heads * plan.programs * 2
    parts = torch.empty(slots * part_rows * (columns + 4), dtype=torch.float32, device=q.device)
    launch = decode_launch(k_cache.element_size())
    _decode_kernel[(shape.kv_heads, plan.programs)](
        q,
        k_cache,
        v_cache,
        tables,
        plan.sequences,
        plan.records,
        plan.counters,
        parts,
        output.plain,
        output.values,
        output.scales,
        head_dim**-0.5 * kv_scales[0] * _LOG2_E,
        kv_scales[1],
        tables.stride(0),
        KV_HEADS=shape.kv_heads,
        GROUP=shape.group,
        DIM=head_dim,
        BLOCK_SIZE=shape.block_size,
        KEYS=DECODE.keys,
        ROWS=max(16, part_rows),
        PART_ROWS=part_rows,
        COLUMNS=columns,
        PROGRAMS=plan.programs,
        SEQUENCE=_SEQUENCE,
        RECORD=_RECORD,
        PARTS=_PARTS,
        QUANTIZE=plan.quantize,
        DOT=_dot_dtype(q.dtype, k_cache.dtype),
        num_warps=launch.warps,
        num_stages=launch.stages,
        maxnreg=launch.registers,
        **launch_options(q.device),
    )
    return output.result()


# --- prefill --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrefillPlan:
    """The tiles of queries of a step."""

    queries: PagedQueries
    shape: PagedShape
    quantize: bool
    tile_queries: int  # per tile at most
    tiles: Tensor  # [tiles, 4] int32: first query among the T, queries, position of the first, sequence


def plan_prefill(queries: PagedQueries, shape: PagedShape, *, dtype: torch.dtype, quantize: bool = False) -> PrefillPlan:
    """A run of queries per sequence, each at the last positions of its sequence."""
    if queries.most_queries:
        size = prefill_queries(queries.most_queries)
        return PrefillPlan(queries, shape, quantize, size, _tiles_on_device(queries, size))
    rows, first, size = [np.empty((0, 4), dtype=np.int32)], 0, prefill_queries(max(queries.host_seq_lens, default=0))
    for seq, (length, count) in enumerate(zip(queries.host_seq_lens, queries.host_counts, strict=True)):
        offsets = np.arange(0, count, size, dtype=np.int32)
        sizes = np.minimum(size, count - offsets)
        rows.append(np.stack((first + offsets, sizes, length - count + offsets, np.full_like(offsets, seq)), axis=1))
        first += count
    tiles = np.concatenate(rows)
    tiles = torch.from_numpy(tiles[np.argsort(-(tiles[:, 1] + tiles[:, 2]), kind="stable")])
    device = queries.seq_lens.device
    if device.type == "cuda":
        tiles = tiles.pin_memory().to(device, non_blocking=True)
    return PrefillPlan(queries, shape, quantize, size, tiles)


def _tiles_on_device(queries: PagedQueries, size: int) -> Tensor:
    """The tiles [most_queries / size + S, 4] of sequences whose counts only the device knows; the last ones may be empty.

    They are numbered from the end, so that within a sequence those with the most keys come first.
    """
    starts, num_seqs = queries.query_starts, queries.table_rows.shape[0]
    counts = starts.diff()
    tiles = (counts + (size - 1)) // size
    ends = tiles.cumsum(0)
    number = ends[-1] - 1 - torch.arange(queries.most_queries // size + num_seqs, device=starts.device)
    seq = torch.searchsorted(ends, number, right=True)
    offset = (number - (ends - tiles)[seq]) * size
    left = (counts[seq] - offset).clamp_max_(size)
    columns = (starts[seq] + offset, left, queries.seq_lens[seq] - counts[seq] + offset, seq)
    return torch.where((number >= 0)[:, None], torch.stack(columns, dim=1), 0).int()


@triton.jit
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    tables,
    table_rows,
    tiles,
    out,
    values,
    scales,
    qk_scale,  # softmax scale * scale of the keys * log2(e)
    v_scale,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    DOT: tl.constexpr,
):
    """One tile of queries of one head. Program 0 is the query head, so that the heads of a KV head run side by side."""
    query_head = tl.program_id(0)
    head = query_head // GROUP
    record = tiles + tl.program_id(1) * 4
    first, count, start, seq = tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    table = tables + tl.load(table_rows + seq).to(tl.int64) * table_stride
    row, column = tl.arange(0, QUERIES), tl.arange(0, COLUMNS)
    out_row = (first + row) * (KV_HEADS * GROUP) + query_head
    mask = (row < count)[:, None] & (column < DIM)[None, :]
    queries = tl.load(q + out_row.to(tl.int64)[:, None] * DIM + column[None, :], mask=mask, other=0.0).to(DOT)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, COLUMNS], tl.float32)
    position, end = start + row, start + count
    key_start = _tile_start(table, 0, end, head, KV_HEADS, DIM, BLOCK_SIZE, KEYS)
    for t in range(0, tl.cdiv(end, KEYS)):
        k = _load_tile(k_cache, key_start, DIM, BLOCK_SIZE, KEYS, COLUMNS, DOT)
        v = _load_tile(v_cache, key_start, DIM, BLOCK_SIZE, KEYS, COLUMNS, DOT)
        key_start = _tile_start(table, t + 1, end, head, KV_HEADS, DIM, BLOCK_SIZE, KEYS)
        scores = tl.dot(queries, tl.trans(k))
        if (t + 1) * KEYS > start:
            visible = position - t * KEYS
            scores = tl.where(tl.arange(0, KEYS)[None, :] <= visible[:, None], scores, float("-inf"))
        p, fade, peak, mass = _softmax_step(scores, qk_scale, peak, mass)
        acc = tl.dot(p.to(DOT), v, acc * fade[:, None])
    result = acc * (v_scale / mass)[:, None]
    _write_heads(result, out_row.to(tl.int64), column, row < count, out, values, scales, DIM, QUANTIZE)


def prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: PrefillPlan, *, kv_scales: tuple[float, float] = (1.0, 1.0)
) -> Tensor | Activations:
    """q [T, heads, head_dim], caches [num_blocks, kv_heads, block_size, head_dim] -> [T, heads * head_dim]."""
    assert q.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()
    output = _Output.empty(q, quantize=plan.quantize)
    if q.shape[0] == 0:
        return output.result()
    _, heads, head_dim = q.shape
    shape, tables = plan.shape, plan.queries.block_tables
    launch = prefill_launch(plan.tile_queries, k_cache.element_size())
    _prefill_kernel[(heads, plan.tiles.shape[0])](
        q,
        k_cache,
        v_cache,
        tables,
        plan.queries.table_rows,
        plan.tiles,
        output.plain,
        output.values,
        output.scales,
        head_dim**-0.5 * kv_scales[0] * _LOG2_E,
        kv_scales[1],
        tables.stride(0),
        KV_HEADS=shape.kv_heads,
        GROUP=shape.group,
        DIM=head_dim,
        BLOCK_SIZE=shape.block_size,
        QUERIES=plan.tile_queries,
        KEYS=launch.keys,
        COLUMNS=triton.next_power_of_2(max(16, head_dim)),
        QUANTIZE=plan.quantize,
        DOT=_dot_dtype(q.dtype, k_cache.dtype),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return output.result()


_GPU = ("cuda",)
_DTYPES = (torch.bfloat16, torch.float16)

KERNELS = (
    Kernel("attention.qk_norm_rope_write", "triton", qk_norm_rope_write, prepare_qk_norm, platforms=_GPU, dtypes=_DTYPES),
    Kernel("attention.decode", "triton", decode, plan_decode, platforms=_GPU, dtypes=_DTYPES),
    Kernel("attention.prefill", "triton", prefill, plan_prefill, platforms=_GPU, dtypes=_DTYPES),
)
