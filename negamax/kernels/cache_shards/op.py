"""Define attention for ranks that share a KV head and store different blocks of its cache.

A rank attends with the query heads of all ranks to the keys in its own blocks
(`attention.metadata.CacheShard`). The rank then merges the results of all ranks for its own heads:

    lse[r, t, h] = log2 sum_j 2^s[t, h, j],   s = q[t, h] . k[j] * head_dim ** -0.5 * log2(e)
    out[r, t, h] = sum_j 2^(s[t, h, j] - lse[r, t, h]) v[j],   j of rank r
    out[t, h] = sum_r 2^lse[r, t, h] out[r, t, h] / sum_r 2^lse[r, t, h],   in the order of ranks

If rank r holds no key for a token, lse[r] is -inf and out[r] is 0, so the sums do not change.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import e, log2

import torch
from torch import Tensor

from negamax.kernels.activations import Hidden
from negamax.kernels.attention.metadata import PagedShape
from negamax.kernels.attention.op import attention_op, gather_rows
from negamax.kernels.block_sparse.op import BlockSparsePlan, plan
from negamax.kernels.block_sparse.selection import BlockSelection, SparseShape
from negamax.kernels.kvcache.op import KvCache, TokenTables, cache_rows, slots_of
from negamax.kernels.op import EXACT, Prepared, op, rounding_tolerance
from negamax.kernels.peers import Collective


@dataclass(frozen=True)
class PartialResults:
    """Outputs `out` of T tokens that attended to some of their keys, and log2 softmax sums `lse`.

    `out` and `lse` are views of `message`. If `message` has the results of several ranks, `out` and
    `lse` have a leading dimension [ranks].
    """

    message: Tensor  # [bytes] or [ranks, bytes] uint8, the memory of `out` and `lse`
    out: Tensor  # [T, heads * head_dim] in the model's dtype; 0 for tokens without a key
    lse: Tensor  # [T, heads] fp32, log2 of the sum of exp(score); -inf for tokens without a key

    @classmethod
    def empty(cls, q: Tensor) -> "PartialResults":
        """Allocate results for queries q [T, heads, head_dim]."""
        assert q.itemsize > 1, f"queries must have 16 or 32 bits; they are {q.dtype}"
        num_bytes = q.numel() * q.element_size() + 4 * q.shape[0] * q.shape[1]
        return cls.of(torch.empty(num_bytes, dtype=torch.uint8, device=q.device), q)

    def gathered(self, group: Collective) -> "PartialResults":
        messages = group.all_gather(self.message.unsqueeze(0), dim=0)
        return PartialResults.of(messages, self.out.unflatten(-1, (self.lse.shape[-1], -1)))

    @classmethod
    def joined(cls, out: Tensor, lse: Tensor) -> "PartialResults":
        """Copy `out` and `lse` into one message."""
        return cls(torch.cat([part.flatten().view(torch.uint8) for part in (out, lse)]), out, lse)

    @classmethod
    def of(cls, message: Tensor, q: Tensor) -> "PartialResults":
        """Return views of `message`, the results of one or several ranks for q [T, heads, dim]."""
        num_tokens, heads, head_dim = q.shape
        out, lse = message.split(
            [q.numel() * q.element_size(), 4 * num_tokens * heads], dim=message.dim() - 1
        )
        return cls(
            message,
            out.view(q.dtype).unflatten(-1, (num_tokens, heads * head_dim)),
            lse.view(torch.float32).unflatten(-1, (num_tokens, heads)),
        )


def own_rows(
    tokens: TokenTables, /, *, rank: int, ranks: int, first: int, heads: int, block_size: int
) -> Tensor:
    """Return the row indices [T * heads] int64 of a step's tokens in this rank's cache.

    Rank b % ranks stores block b of the pool at index b // ranks + first of its own cache. The row
    index of a token is -1 if another rank stores the token's block.
    """
    slots = slots_of(tokens, block_size=block_size)
    block, offset = slots // block_size, slots % block_size
    own = (block // ranks + first) * block_size + offset
    rows = cache_rows(own, kv_heads=heads, block_size=block_size)
    return rows.where((block % ranks == rank).repeat_interleave(heads), -1)


def attend(q: Tensor, cache: KvCache, plan: Prepared, /) -> PartialResults:
    """Attend with q [T, heads, head_dim] to the keys in this rank's blocks."""
    return _attend(q, cache, plan, lambda tokens, keys: keys >= 0)


def attend_to_blocks(
    q: Tensor, cache: KvCache, choice: BlockSelection, plan: Prepared, /
) -> PartialResults:
    """Attend like `attend`, but only to the blocks that are selected for each token."""
    shape = plan.shape
    assert isinstance(shape, SparseShape)
    size = shape.sparse_block_size

    def is_chosen(tokens: slice, keys: Tensor) -> Tensor:
        return (choice.ids[tokens].unsqueeze(-2) == (keys // size).unsqueeze(-1)).any(-1)

    return _attend(q, cache, plan, is_chosen)


def _attend(
    q: Tensor,
    cache: KvCache,
    plan: BlockSparsePlan,
    is_chosen: Callable[[slice, Tensor], Tensor],  # (tokens, positions of keys) -> selection mask
) -> PartialResults:
    shape = plan.shape
    out = q.new_zeros(q.shape[0], q.shape[1] * q.shape[2])
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    for tokens, table, length, positions in plan.runs():
        keys, blocks = _own_keys(table, length, shape)
        if len(blocks) == 0:
            continue
        k, v = (
            (gather_rows(part, blocks) * scale).repeat_interleave(shape.group, dim=1)
            for part, scale in zip((cache.k, cache.v), cache.scales, strict=True)
        )
        scores = torch.einsum("thd,jhd->thj", q[tokens].float(), k)
        scores *= q.shape[-1] ** -0.5 * log2(e)
        is_seen = is_chosen(tokens, keys) & (keys <= positions.view(-1, 1, 1))
        is_seen = is_seen.expand(-1, shape.kv_heads, -1)
        is_seen = is_seen.repeat_interleave(shape.group, dim=1)
        scores = scores.masked_fill(~is_seen, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        weights = (scores - top.masked_fill(top == -torch.inf, 0.0)).exp2()
        total = weights.sum(-1)
        sums = torch.einsum("thj,jhd->thd", weights, v) / total.clamp_min(1e-30).unsqueeze(-1)
        out[tokens] = sums.flatten(1).to(q.dtype)
        lse[tokens] = top.squeeze(-1) + total.log2()
    return PartialResults.joined(out, lse)


def _own_keys(table: Tensor, length: int, shape: PagedShape) -> tuple[Tensor, Tensor]:
    """Return the positions of a sequence's keys on this rank, and the blocks of these keys."""
    shard, size = shape.cache, shape.block_size
    used = table[: -(-length // size)]
    numbers = (used % shard.ranks == shard.rank).nonzero()
    keys = numbers * size + torch.arange(size, device=table.device)
    return keys.flatten(), used[numbers.flatten()] // shard.ranks + 1


def merge(
    parts: PartialResults,
    group: Collective | None,
    /,
    *,
    first: int,
    count: int,
    quantize: bool = False,
) -> Hidden:
    """Merge partial results of all ranks for this rank's heads -> [T, count * head_dim].

    This rank's heads are `first` to first + count - 1. `parts` has the results of this rank if
    `group` is given, else the results of all ranks. Only GPU kernels support `quantize` (FP8).
    """
    assert not quantize, "the reference has no FP8 output; set quantize=False"
    of_all = parts if group is None else parts.gathered(group)
    heads, dtype = slice(first, first + count), parts.out.dtype
    out = of_all.out.unflatten(-1, (parts.lse.shape[-1], -1))[..., heads, :]
    lse = of_all.lse[..., heads]
    top = lse.amax(0)
    weights = (lse - top.masked_fill(top == -torch.inf, 0.0)).exp2()
    total, divisor = torch.zeros_like(out[0], dtype=torch.float32), torch.zeros_like(top)
    for part, weight in zip(out, weights, strict=True):
        total += part.float() * weight.unsqueeze(-1)
        divisor += weight
    merged = total / divisor.clamp_min(1e-30).unsqueeze(-1)
    return merged.flatten(1).to(dtype)


OWN_ROWS = op(
    "cache_shards.own_rows", own_rows, None, "cache rows of tokens whose blocks are sharded", EXACT
)
PARTIAL_DECODE = attention_op(
    "cache_shards.decode", attend, plan, "one query per sequence against keys in a rank's blocks"
)
PARTIAL_PREFILL = attention_op(
    "cache_shards.prefill", attend, plan, "runs of queries against keys in a rank's blocks"
)
PARTIAL_SPARSE_DECODE = attention_op(
    "cache_shards.sparse_decode",
    attend_to_blocks,
    plan,
    "one query per sequence against its selected blocks on a rank",
)
PARTIAL_SPARSE_PREFILL = attention_op(
    "cache_shards.sparse_prefill",
    attend_to_blocks,
    plan,
    "runs of queries against their selected blocks on a rank",
)
MERGE_PARTIALS = op(
    "cache_shards.merge",
    merge,
    None,
    "a rank's heads, merged from the partial results of all ranks",
    rounding_tolerance(reason="one rounding to the dtype; |out| about 1"),
)
