"""Descriptions of the KV caches of layers, and their sizes in bytes.

In every cache of every layer, a block stores `block_size` tokens. A block has the same number in
all caches. A hash of the block's tokens identifies its content (`scheduler/prefix_cache.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, lcm

from negamax.base.errors import ConfigError

ELEMENT_BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "float8_e4m3fn": 1,
    "int64": 8,
}  # fmt: skip


# calculated time per layer on H200 that sharded index keys add (exchange, queries of all heads)
_SHARDING_SECONDS = 4.5e-6
_BYTES_PER_SECOND = 4.25e12  # assumed bandwidth of reading index keys on an H200


@dataclass(frozen=True)
class KvCacheSpec:
    """One cache of one layer: `heads` vectors of `width` elements for each token."""

    name: str  # Name of the cache in its layer.
    heads: int  # Number of heads, summed over the ranks.
    width: int  # Number of elements per head and token.
    dtype: str | None = None  # None: use --kv-cache-dtype or --index-cache-dtype.
    block_tokens: int = 1  # The block size must be a multiple of this number.
    replicated: bool = False  # Whether every rank stores all heads.
    is_sharded: bool = False  # Whether rank r of n stores only blocks b with b % n = r.
    # `holders`: number n of ranks that share each head. If n > 1, rank r of n stores one padding
    # block, followed by the blocks b with b % n = r.
    holders: int = 1
    is_index: bool = False  # Whether the cache stores index keys of top-k block selection.
    unread_tokens: int = 0  # Decodes do not read the cache for sequences of up to this length.
    most_read_tokens: int | None = None  # Maximum tokens that a decode reads; None: no limit.

    def local_heads(self, ranks: int) -> int:
        """Return the number of heads per rank. If `ranks` > `heads`, several ranks store a head."""
        return self.heads if self.replicated else max(1, self.heads // ranks)

    def read_tokens(self, context: float) -> float:
        """Return how many tokens of a sequence with `context` tokens a decode step reads."""
        if context <= self.unread_tokens:
            return 0.0
        return min(context, self.most_read_tokens or context)

    def local_blocks(self, num_blocks: int, ranks: int) -> int:
        """Return how many of `num_blocks` blocks each rank stores."""
        if self.holders > 1:
            return 1 - (-num_blocks // self.holders)
        return -(-num_blocks // ranks) if self.is_sharded else num_blocks

    def block_bytes(self, block_size: int, *, dtype: str, ranks: int) -> int:
        """Return the mean bytes of a block per rank. `dtype` replaces a missing cache dtype."""
        elements = self.local_heads(ranks) * block_size * self.width
        num_bytes = elements * ELEMENT_BYTES[self.dtype or dtype]
        return -(-num_bytes // (ranks if self.is_sharded else self.holders))


KvCacheSpecs = Sequence[Sequence[KvCacheSpec]]  # for each layer, its list of caches


def set_index_dtype(caches: KvCacheSpecs, dtype: str) -> KvCacheSpecs:
    """Return `caches`, with `dtype` set in each index cache that has no dtype."""
    return [
        [replace(cache, dtype=cache.dtype or dtype) if cache.is_index else cache for cache in layer]
        for layer in caches
    ]


def split_over_holders(caches: KvCacheSpecs, holders: int) -> KvCacheSpecs:
    """Return `caches` with `holders` ranks per head, among which the head's blocks are split."""
    return [
        [cache if cache.replicated else replace(cache, holders=holders) for cache in layer]
        for layer in caches
    ]


def check_index_options(caches: KvCacheSpecs, *, dtype: str, sharding: str) -> None:
    """Refuse options for index keys if the model has no index keys. Raises `ConfigError`."""
    if any(cache.is_index for layer in caches for cache in layer):
        return
    if dtype != "auto":
        raise ConfigError(
            f"--index-cache-dtype is {dtype}; this model has no index keys",
            hint="use auto; --kv-cache-dtype sets the dtype of keys and values",
        )
    if sharding == "on":
        raise ConfigError("--index-cache-sharding is on; this model has no index keys")


def sharding_crossover(caches: KvCacheSpecs, *, dtype: str, ranks: int) -> float:
    """Return the number of tokens above which sharded index keys make a decode step faster.

    The tokens of all sequences of the step are counted. At the returned number, exchanging data
    between ranks takes as long as reading the other ranks' index keys.
    """
    index = next((cache for layer in caches for cache in layer if cache.is_index), None)
    if index is None or ranks == 1:
        return inf
    unread = index.block_bytes(1, dtype=dtype, ranks=1) * (1 - 1 / ranks)  # unread bytes per token
    return _SHARDING_SECONDS * _BYTES_PER_SECOND / unread


def shards_index(
    caches: KvCacheSpecs, asked: str, *, dtype: str, ranks: int, max_model_len: int
) -> bool:
    """Return whether ranks shard the index keys. "auto" shards index keys for long contexts."""
    if asked != "auto":
        return asked == "on" and ranks > 1
    return max_model_len >= sharding_crossover(caches, dtype=dtype, ranks=ranks)


def block_bytes(caches: KvCacheSpecs, block_size: int, *, dtype: str, ranks: int) -> int:
    """Return the bytes of a block per rank if `ranks` ranks store it, summed over all layers."""
    every = (cache for layer in caches for cache in layer)
    return sum(cache.block_bytes(block_size, dtype=dtype, ranks=ranks) for cache in every)


def slot_bytes(context_length: int, block_size: int, *, item: int) -> int:
    """Return the bytes of a request slot, whose token ids and block ids have `item` bytes each."""
    return item * (context_length + 1 + -(-context_length // block_size))


def choose_block_size(caches: KvCacheSpecs, asked: int | None, *, default: int) -> int:
    """Return the block size `asked`; if it is None, the smallest allowed size >= `default`.

    Raises `ConfigError` if a cache does not allow `asked`.
    """
    unit = lcm(*(cache.block_tokens for layer in caches for cache in layer))
    block_size = asked or -(-default // unit) * unit
    if block_size % unit:
        raise ConfigError(
            f"--block-size is {block_size}; the KV caches of this model need a multiple of {unit}",
            hint=f"use --block-size {-(-block_size // unit) * unit}",
        )
    return block_size
