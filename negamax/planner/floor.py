"""The least time of a decode step is the bytes to read divided by memory bandwidth."""

from negamax.config.kv_cache import KvCacheSpecs, set_index_dtype
from negamax.config.model_spec import ModelSpec
from negamax.models.memory import read_bytes


def cached_bytes(caches: KvCacheSpecs, context: float, *, dtype: str, ranks: int) -> float:
    """Return the KV cache bytes that a rank reads for a token after `context` earlier tokens."""
    return sum(
        cache.read_tokens(context) * cache.block_bytes(1, dtype=dtype, ranks=ranks)
        for layer in caches
        for cache in layer
    )


def step_bytes(
    spec: ModelSpec,
    *,
    batch: int,
    context: float,
    dtype: str,
    kv_dtype: str,
    index_dtype: str,
    ranks: int,
) -> float:
    """Return the least bytes that each of `ranks` GPUs must read in a decode step.

    `context` is the mean number of tokens of the `batch` sequences, and `dtype` is the dtype of
    unquantized weights. Each rank reads 1 / `ranks` of the KV cache. This also holds for more ranks
    than heads, because ranks may split the tokens of the cache.
    """
    caches = set_index_dtype(spec.kv_caches(), index_dtype)
    cached = cached_bytes(caches, context, dtype=kv_dtype, ranks=1)
    return read_bytes(spec, batch, dtype=dtype, ranks=ranks) + batch * cached / ranks
