"""The physical limit of a decode step: the bytes that it must read, over the bandwidth that the
memory has.
"""

from __future__ import annotations

from negamax.config.kv_cache import block_bytes
from negamax.config.model_spec import ModelSpec
from negamax.models.memory import read_bytes


def step_bytes(
    spec: ModelSpec, *, batch: int, context: float, dtype: str, kv_dtype: str, ranks: int
) -> float:
    """What each of `ranks` GPUs reads at least in a step of `batch` sequences of `context` tokens
    (their mean) each, links and arithmetic for free.

    `dtype` is that of plain weights; quantised ones are read as they are stored. Of the KV cache a
    share is counted: ranks beyond the KV heads may share out its tokens.
    """
    cache = block_bytes(spec.kv_caches(), 1, dtype=kv_dtype, ranks=1) / ranks
    return read_bytes(spec, batch, dtype=dtype, ranks=ranks) + batch * context * cache
