"""Compiles the GPU's kernels before any is launched: a share on each rank, and several at a time.

At its first launch each kernel would be compiled alone, while every rank and the GPU wait: some
forty seconds in all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from negamax.base.env import usable_cores
from negamax.config.kv_cache import KvCacheSpecs
from negamax.parallel.context import ParallelContext

_MOST_THREADS = 8  # compilation holds Python's lock half of the time


def warmup_layers(layers: Sequence[object], caches: KvCacheSpecs) -> int:
    """How many of the first `layers`, with their `caches`, launch every kernel there is: one of
    each sort, by its parts and its caches, and two, since the first takes the embedding's output
    and the others that of a layer.
    """
    sorts = [
        (*map(type, (layer, *vars(layer).values())), *own)
        for layer, own in zip(layers, caches, strict=False)  # (a draft's are behind)
    ]
    return max(2, *(sorts.index(sort) + 1 for sort in sorts))


def cut(num_tokens: int, longest: int) -> list[int]:
    """`num_tokens` as lengths of up to `longest`."""
    rest = num_tokens % longest
    return [longest] * (num_tokens // longest) + ([rest] if rest else [])


@contextmanager
def warming_up(context: ParallelContext) -> Iterator[None]:
    """Inside, Triton kernels that are launched do not run: results are whatever is in memory. All
    ranks of a pipeline stage launch the same.
    """
    from negamax.kernels.launch.triton import compiling  # Triton is there where there is a GPU

    layout = context.layout
    threads = max(1, min(_MOST_THREADS, usable_cores() // layout.world_size))
    share, shares = layout.rank % layout.stage_size, layout.stage_size
    with compiling(share=share, shares=shares, threads=threads):
        yield
    context.world_min(0)  # every rank has left its share in Triton's cache
    torch.cuda.empty_cache()  # of what the warmup held, so that what follows is measured alone
