"""Define attention over a paged KV cache, and the norm, rope and cache write before it.

    out[t, h] = sum_j softmax_j(q[t, h] . k[j, h // group] * head_dim ** -0.5) v[j, h // group],
    over the keys j <= position of t

Scores, softmax and sums are in fp32. `kernels/kvcache/op.py` defines the cache layout. Position p
of a sequence is in block table[p // block_size] at offset p % block_size.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from negamax.kernels.activations import Hidden
from negamax.kernels.attention.metadata import AttentionMetadata, PagedShape
from negamax.kernels.kvcache.op import KvCache, TokenPlaces, write
from negamax.kernels.op import Op, P, Prepared, R, op, rounding_tolerance
from negamax.kernels.peers import Collective
from negamax.kernels.rotary import half_split

# --- QK norm, rope, cache write ------------------------------------------------------------------


@dataclass(frozen=True)
class QkNorm:
    """Norm weights of this rank's query and key heads, and the constants of the norms."""

    weight: Tensor  # [(heads + kv_heads) * head_dim] fp32: weights of q, then of k
    heads: int
    kv_heads: int
    # number of elements of a token's q, and of its k with all copies of KV heads, on all ranks
    q_count: float
    k_count: float
    eps: float


def prepare_qk_norm(
    weight: Tensor, /, *, heads: int, kv_heads: int, eps: float, ranks: int
) -> Prepared:
    """Return the `QkNorm` of one of `ranks` ranks; weight [(heads + kv_heads) * head_dim] fp32."""
    per_head = float(weight.shape[0] // (heads + kv_heads) * ranks)
    return QkNorm(weight, heads, kv_heads, heads * per_head, kv_heads * per_head, eps)


def split_heads(qkv: Tensor, *, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv [T, (heads + 2 kv_heads) * head_dim] into q, k, v [T, heads, head_dim] fp32.

    NaN and infinity in qkv are replaced by finite values. Attention multiplies masked values of a
    reused cache block by a probability of 0, and 0 * NaN would be NaN.
    """
    finite = qkv.nan_to_num().float().unflatten(1, (heads + 2 * kv_heads, -1))
    q, k, v = torch.split(finite, [heads, kv_heads, kv_heads], dim=1)
    return q, k, v


def qk_norm(
    q: Tensor, k: Tensor, norm: QkNorm, *, group: Collective | None = None
) -> tuple[Tensor, Tensor]:
    """Return full-width RMS norms of q and k [T, heads, head_dim] fp32.

    The mean of squares includes all heads of all ranks of the attention `group` (None: one rank).
    """
    q, k = q.flatten(1), k.flatten(1)
    sums = torch.stack((q.square().sum(-1), k.square().sum(-1)), dim=-1)  # [T, 2]
    if group is not None and group.size > 1:
        sums = group.all_reduce(sums)
    q_sum, k_sum = sums.split(1, dim=-1)
    q_weight, k_weight = norm.weight.split([q.shape[1], k.shape[1]])
    q = q * (q_sum / norm.q_count + norm.eps).rsqrt() * q_weight
    k = k * (k_sum / norm.k_count + norm.eps).rsqrt() * k_weight
    return q.unflatten(1, (norm.heads, -1)), k.unflatten(1, (norm.kv_heads, -1))


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of each head of x [T, heads, head_dim] fp32; weight [head_dim]."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@dataclass(frozen=True)
class HeadNorm:
    """Weights of per-head norms, and this rank's numbers of heads."""

    weight: Tensor  # [2, head_dim] fp32, norm weights of queries and of keys
    heads: int
    kv_heads: int
    eps: float


def head_norm_rope_write(
    qkv: Tensor,
    norm: Prepared,
    at: TokenPlaces,
    cache: KvCache,
    /,
    *,
    group: Collective | None = None,
) -> Tensor:
    """Run `qk_norm_rope_write` with `head_norm` for q and k; `group` is not used.

    qkv may be a slice of columns of a larger tensor.
    """
    q, k, v = split_heads(qkv, heads=norm.heads, kv_heads=norm.kv_heads)
    q, k = (
        half_split(head_norm(x, weight, norm.eps), at.cos, at.sin)
        for x, weight in zip((q, k), norm.weight, strict=True)
    )
    write(k, v, cache, at.rows)
    return q.to(qkv.dtype)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, /) -> tuple[Tensor, Tensor]:
    """Rotate the first dimensions of q and k [T, heads, head_dim]; cos, sin [T, 1, rotary_dim].

    All arithmetic is in fp32; only the final results are rounded. A kernel may overwrite q and k.
    """
    q, k = (half_split(part.float(), cos, sin).to(part.dtype) for part in (q, k))
    return q, k


def rope_write(qkv: Tensor, at: TokenPlaces, cache: KvCache, /) -> Tensor:
    """Run `qk_norm_rope_write` without norms; all dimensions of a head are rotated."""
    _, kv_heads, _, head_dim = cache.k.shape
    assert at.cos.shape[-1] == head_dim
    q, k, v = split_heads(qkv, heads=qkv.shape[1] // head_dim - 2 * kv_heads, kv_heads=kv_heads)
    q, k = half_split(q, at.cos, at.sin), half_split(k, at.cos, at.sin)
    write(k, v, cache, at.rows)
    return q.to(qkv.dtype)


def qk_norm_rope_write(
    qkv: Tensor,
    norm: Prepared,
    at: TokenPlaces,
    cache: KvCache,
    /,
    *,
    group: Collective | None = None,
) -> Tensor:
    """Normalize and rotate q and k, write k and v to the cache, return q [T, heads, head_dim].

    qkv [T, (heads + 2 kv_heads) * head_dim] is this rank's projection; a kernel may overwrite it.
    All arithmetic is in fp32; only the final results are rounded.
    """
    q, k, v = split_heads(qkv, heads=norm.heads, kv_heads=norm.kv_heads)
    q, k = qk_norm(q, k, norm, group=group)
    q, k = half_split(q, at.cos, at.sin), half_split(k, at.cos, at.sin)
    write(k, v, cache, at.rows)
    return q.to(qkv.dtype)


# --- attention -----------------------------------------------------------------------------------


def plan(queries: AttentionMetadata, shape: PagedShape, /) -> Prepared:
    """Check that FP8 output is not requested, and return `queries` unchanged."""
    assert not shape.quantize, "the reference has no FP8 output; set quantize=False"
    return queries


def attend(q: Tensor, cache: KvCache, queries: Prepared, /) -> Hidden:
    """Attend with q [T, heads, head_dim] and return [T, heads * head_dim]."""
    (num_tokens, heads, head_dim), (kv_heads, block_size) = q.shape, cache.k.shape[1:3]
    lengths, counts = queries.host_seq_lens, queries.host_query_lens
    out = q.new_zeros(num_tokens, heads, head_dim)
    for table, length, count, end in zip(
        queries.used_tables(block_size), lengths, counts, accumulate(counts), strict=True
    ):
        k, v = (
            (rows_of(own, table, length) * scale).repeat_interleave(heads // kv_heads, dim=1)
            for own, scale in zip((cache.k, cache.v), cache.scales, strict=True)
        )
        scores = torch.einsum("thd,jhd->htj", q[end - count : end].float(), k) * head_dim**-0.5
        keys = torch.arange(length, device=q.device)
        is_later = keys > torch.arange(length - count, length, device=q.device).unsqueeze(1)
        weights = scores.masked_fill(is_later, -torch.inf).softmax(-1)
        out[end - count : end] = torch.einsum("htj,jhd->thd", weights, v)
    return out.flatten(1)


def rows_of(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Gather `length` keys or values from blocks `table` -> [length, kv_heads, head_dim] fp32."""
    return gather_rows(cache, table[: -(-length // cache.shape[2])])[:length]


def gather_rows(cache: Tensor, blocks: Tensor) -> Tensor:
    """Gather the keys or values in `blocks` of a cache -> [tokens, kv_heads, head_dim] fp32."""
    found = cache.view(torch.uint8)[blocks].view(cache.dtype)  # indexing does not support FP8
    return found.transpose(1, 2).flatten(0, 1).float()


def attention_op(name: str, run: R, prepare: P, summary: str, /) -> Op[P, R]:
    """Return an op that computes attention of queries to keys."""
    reason = "probabilities and the result are rounded to the dtype once each; |out| about 1"
    return op(name, run, prepare, summary, rounding_tolerance(reason=reason), wide_error=5e-3)


ROPE_TOLERANCE = rounding_tolerance(scale=2.0, reason="one rounding to the dtype; |q| up to 5")

QK_NORM_ROPE_WRITE = op(
    "attention.qk_norm_rope_write",
    qk_norm_rope_write,
    prepare_qk_norm,
    "full-width RMS norm of q and k, rope, keys and values into the paged cache",
    ROPE_TOLERANCE,
    sequence=("attention.qk_norm", "rope.half_split", "kvcache.write"),
    wide_error=5e-3,
)
HEAD_NORM_ROPE_WRITE = op(
    "attention.head_norm_rope_write",
    head_norm_rope_write,
    HeadNorm,
    "RMS norm of each head of q and k, rope, keys and values into the paged cache",
    ROPE_TOLERANCE,
    sequence=("attention.head_norm", "rope.half_split", "kvcache.write"),
    wide_error=5e-3,
)
ROPE_WRITE = op(
    "attention.rope_write",
    rope_write,
    None,
    "rope of q and k, keys and values into the paged cache",
    ROPE_TOLERANCE,
    wide_error=5e-3,
)
ROPE = op("attention.rope", rope, None, "rope of q and k", ROPE_TOLERANCE)
DECODE = attention_op(
    "attention.decode", attend, plan, "one query per sequence against its paged keys and values"
)
PREFILL = attention_op(
    "attention.prefill", attend, plan, "causal runs of queries, each on top of its cached prefix"
)
