"""KV caches as layers declare them, and the one formula for their bytes.

A block is `block_size` tokens of every cache of every layer. It has one number in all caches, and
one hash, that of its tokens (`scheduler/prefix_cache.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, lcm

from negamax.base.errors import ConfigError

ELEMENT_BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "float8_e4m3fn": 1,
    "int64": 8,
}  # fmt: skip


# Calculated for H200: an exchange between ranks in each layer plus index queries of all heads;
# memory bandwidth.
_SHARDING_SECONDS, _BYTES_PER_SECOND = 4.5e-6, 4.25e12


@dataclass(frozen=True)
class KvCacheSpec:
    """One cache of one layer: `heads` vectors of `width` elements for each token."""

    name: str  # used by the layer
    heads: int  # of all ranks together
    width: int  # elements
    dtype: str | None = None  # None: of --kv-cache-dtype or --index-cache-dtype
    block_tokens: int = 1  # the block size is a multiple
    replicated: bool = False  # all heads on every rank
    is_sharded: bool = False  # rank r of n has only the blocks b with b % n = r
    # so many neighbouring ranks with copies of a head split its blocks likewise; each has a padding
    # block before them
    holders: int = 1
    is_index: bool = False  # holds the keys of top-k block selection
    # nothing is read of sequences up to unread_tokens; each token reads at most most_read_tokens
    unread_tokens: int = 0
    most_read_tokens: int | None = None  # None: all

    def local_heads(self, ranks: int) -> int:
        """Return the heads on each of `ranks`; ranks beyond the heads hold copies."""
        return self.heads if self.replicated else max(1, self.heads // ranks)

    def read_tokens(self, context: float) -> float:
        """Return how many of `context` tokens a decode step reads."""
        if context <= self.unread_tokens:
            return 0.0
        return min(context, self.most_read_tokens or context)

    def local_blocks(self, num_blocks: int, ranks: int) -> int:
        """Return how many of `num_blocks` each of `ranks` stores."""
        if self.holders > 1:
            return 1 - (-num_blocks // self.holders)
        return -(-num_blocks // ranks) if self.is_sharded else num_blocks

    def block_bytes(self, block_size: int, *, dtype: str, ranks: int) -> int:
        """Return the mean bytes of a block on each of `ranks`; `dtype` if the cache names none."""
        elements = self.local_heads(ranks) * block_size * self.width
        num_bytes = elements * ELEMENT_BYTES[self.dtype or dtype]
        return -(-num_bytes // (ranks if self.is_sharded else self.holders))


KvCacheSpecs = Sequence[Sequence[KvCacheSpec]]  # for each layer none, one or several


def set_index_dtype(caches: KvCacheSpecs, dtype: str) -> KvCacheSpecs:
    """Return `caches` with `dtype` for the index caches that name no dtype of their own."""
    return [
        [replace(cache, dtype=cache.dtype or dtype) if cache.is_index else cache for cache in layer]
        for layer in caches
    ]


def split_over_holders(caches: KvCacheSpecs, holders: int) -> KvCacheSpecs:
    """Return `caches` with keys and values split over `holders` ranks with copies of a head."""
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
    """Refuse options for index keys if `caches` have none. Errors: `ConfigError`."""
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
    """Return the tokens of a decode step (all sequences) from which sharded index keys are faster.

    From there, reading the index keys that a rank leaves to others takes as long as the exchange.
    """
    index = next((cache for layer in caches for cache in layer if cache.is_index), None)
    if index is None or ranks == 1:
        return inf
    unread = index.block_bytes(1, dtype=dtype, ranks=1) * (1 - 1 / ranks)  # bytes per token
    return _SHARDING_SECONDS * _BYTES_PER_SECOND / unread


def shards_index(
    caches: KvCacheSpecs, asked: str, *, dtype: str, ranks: int, max_model_len: int
) -> bool:
    """Whether ranks shard the index keys; "auto": if faster for `max_model_len` tokens."""
    if asked != "auto":
        return asked == "on" and ranks > 1
    return max_model_len >= sharding_crossover(caches, dtype=dtype, ranks=ranks)


def block_bytes(caches: KvCacheSpecs, block_size: int, *, dtype: str, ranks: int) -> int:
    """Return the bytes of a block of all layers on each of `ranks`."""
    return sum(
        cache.block_bytes(block_size, dtype=dtype, ranks=ranks)
        for layer in caches
        for cache in layer
    )


def slot_bytes(context_length: int, block_size: int, *, item: int) -> int:
    """Return the bytes of a request slot: ids of its tokens and blocks, `item` bytes each."""
    return item * (context_length + 1 + -(-context_length // block_size))


def choose_block_size(caches: KvCacheSpecs, asked: int | None, *, default: int) -> int:
    """Return the block size `asked`, or the smallest from `default` that all caches allow.

    Errors: `ConfigError` if a cache does not allow `asked`.
    """
    unit = lcm(*(cache.block_tokens for layer in caches for cache in layer))
    block_size = asked or -(-default // unit) * unit
    if block_size % unit:
        raise ConfigError(
            f"--block-size is {block_size}; the KV caches of this model need a multiple of {unit}",
            hint=f"use --block-size {-(-block_size // unit) * unit}",
        )
    return block_size
