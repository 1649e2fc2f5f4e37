"""What a layer keeps of the tokens before: caches as it declares them, and the one formula for
their bytes.

A block is `block_size` tokens of every cache of every layer. It has one number in all of them, and
one name, the hash of its tokens (`scheduler/prefix_cache.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, lcm

from negamax.base.errors import ConfigError

ELEMENT_BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "float8_e4m3fn": 1,
    "int64": 8,
}  # fmt: skip


# By calculation, for H200: an exchange between ranks in each layer, and index queries of all heads;
# what memory gives.
_SHARDING_SECONDS, _BYTES_PER_SECOND = 4.5e-6, 4.25e12


@dataclass(frozen=True)
class KvCacheSpec:
    """One cache of one layer: of each token `heads` vectors of `width` elements."""

    name: str  # by which the layer finds it
    heads: int  # of all ranks together
    width: int  # elements
    dtype: str | None = None  # None: that of --kv-cache-dtype, or of --index-cache-dtype
    block_tokens: int = 1  # the block size is a multiple of it
    replicated: bool = False  # all heads on every rank, not split by heads
    is_sharded: bool = False  # rank r of n has the blocks b with b % n = r alone
    # as many neighbouring ranks share out the blocks of a head, of which they have copies,
    # likewise; before them each has one that is nobody's
    holders: int = 1
    is_index: bool = False  # it holds keys that choose what is attended to
    # of a sequence of that many tokens or fewer nothing is read, and so many at most for each token
    unread_tokens: int = 0
    most_read_tokens: int | None = None  # None: all

    def local_heads(self, ranks: int) -> int:
        """Heads on each of `ranks`; ranks beyond the heads hold copies."""
        return self.heads if self.replicated else max(1, self.heads // ranks)

    def read_tokens(self, context: float) -> float:
        """How many of `context` tokens a decode step reads of a sequence."""
        if context <= self.unread_tokens:
            return 0.0
        return min(context, self.most_read_tokens or context)

    def local_blocks(self, num_blocks: int, ranks: int) -> int:
        """How many of `num_blocks` each of `ranks` has room for."""
        if self.holders > 1:
            return 1 - (-num_blocks // self.holders)
        return -(-num_blocks // ranks) if self.is_sharded else num_blocks

    def block_bytes(self, block_size: int, *, dtype: str, ranks: int) -> int:
        """Bytes of a block on each of `ranks`, the mean of many; `dtype` where the cache names
        none.
        """
        elements = self.local_heads(ranks) * block_size * self.width
        num_bytes = elements * ELEMENT_BYTES[self.dtype or dtype]
        return -(-num_bytes // (ranks if self.is_sharded else self.holders))


KvCacheSpecs = Sequence[Sequence[KvCacheSpec]]  # of each layer none, one or several


def with_index_dtype(caches: KvCacheSpecs, dtype: str) -> KvCacheSpecs:
    """`caches`, those of index keys in `dtype` unless they name another."""
    return [
        [replace(cache, dtype=cache.dtype or dtype) if cache.is_index else cache for cache in layer]
        for layer in caches
    ]


def with_holders(caches: KvCacheSpecs, holders: int) -> KvCacheSpecs:
    """`caches`, those of keys and values shared out over as many ranks with copies of a head."""
    return [
        [
            cache
            if cache.replicated or cache.holders == holders
            else replace(cache, holders=holders)
            for cache in layer
        ]
        for layer in caches
    ]


def check_index_options(caches: KvCacheSpecs, *, dtype: str, sharding: str) -> None:
    """Errors: `ConfigError` where something is asked for index keys that `caches` do not hold."""
    if any(cache.is_index for layer in caches for cache in layer):
        return
    if dtype != "auto":
        raise ConfigError(
            f"--index-cache-dtype is {dtype}; this model has no index keys",
            hint="use auto, and --kv-cache-dtype for keys and values",
        )
    if sharding == "on":
        raise ConfigError("--index-cache-sharding is on; this model has no index keys")


def sharding_crossover(caches: KvCacheSpecs, *, dtype: str, ranks: int) -> float:
    """Tokens of all sequences of a decode step from which on it takes less time with a shard of the
    index keys, which are in `dtype`, on each of `ranks`: a layer's index keys that a rank then
    leaves unread take as long as what it does instead.
    """
    index = next((cache for layer in caches for cache in layer if cache.is_index), None)
    if index is None or ranks == 1:
        return inf
    unread = index.block_bytes(1, dtype=dtype, ranks=1) * (1 - 1 / ranks)  # of each token
    return _SHARDING_SECONDS * _BYTES_PER_SECOND / unread


def shards_index(
    caches: KvCacheSpecs, asked: str, *, dtype: str, ranks: int, max_model_len: int
) -> bool:
    """Whether ranks hold a shard of the index keys each: as `asked`, or with "auto" where one
    sequence of `max_model_len` tokens is answered faster so.
    """
    if asked != "auto":
        return asked == "on" and ranks > 1
    return max_model_len >= sharding_crossover(caches, dtype=dtype, ranks=ranks)


def block_bytes(caches: KvCacheSpecs, block_size: int, *, dtype: str, ranks: int) -> int:
    """Bytes on each of `ranks` of a block of `block_size` tokens, all layers together."""
    return sum(
        cache.block_bytes(block_size, dtype=dtype, ranks=ranks)
        for layer in caches
        for cache in layer
    )


def slot_bytes(context_length: int, block_size: int, *, item: int) -> int:
    """Bytes of a request slot: the ids of its tokens and of its blocks, `item` bytes each."""
    return item * (context_length + 1 + -(-context_length // block_size))


def choose_block_size(caches: KvCacheSpecs, asked: int | None, *, default: int) -> int:
    """The block size `asked` for, or the least one from `default` on that all caches can be cut
    into. Errors: `ConfigError` where they cannot be cut as asked.
    """
    unit = lcm(*(cache.block_tokens for layer in caches for cache in layer))
    block_size = asked or -(-default // unit) * unit
    if block_size % unit:
        raise ConfigError(
            f"--block-size is {block_size}; the KV caches of this model need a multiple of {unit}",
            hint=f"use --block-size {-(-block_size // unit) * unit}",
        )
    return block_size
