"""The physical limit of a decode step: the bytes that it must read, over the bandwidth that the
memory has.
"""

from __future__ import annotations

from negamax.config.kv_cache import set_index_dtype
from negamax.config.model_spec import ModelSpec
from negamax.models.memory import read_bytes


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
    """What each of `ranks` GPUs reads at least in a step of `batch` sequences of `context` tokens
    (their mean) each, links and arithmetic for free.

    `dtype` is that of plain weights; quantised ones are read as they are stored. Of the KV cache a
    share is counted: ranks beyond the heads of a cache may share out its tokens.
    """
    cached = sum(
        cache.read_tokens(context) * cache.block_bytes(1, dtype=kv_dtype, ranks=1)
        for layer in set_index_dtype(spec.kv_caches(), index_dtype)
        for cache in layer
    )
    return read_bytes(spec, batch, dtype=dtype, ranks=ranks) + batch * cached / ranks
