"""Compile GPU kernels before their first launch. Each rank compiles a part of the kernels in
several threads.

Without this warmup, each kernel is compiled at its first launch, while every rank and the GPU wait.
Compiling at launches takes about forty seconds in total.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from negamax.base.env import usable_cores
from negamax.base.progress import Progress
from negamax.config.kv_cache import KvCacheSpecs
from negamax.parallel.context import ParallelContext

_MOST_THREADS = 8  # few threads, because compilation holds the GIL half of the time


def warmup_layers(layers: Sequence[object], caches: KvCacheSpecs) -> int:
    """Return how many of the first `layers` must run to launch every kernel. These layers include
    one of each kind and one more layer, whose first norm completes the sum over ranks.
    """
    sorts = [
        (*map(type, (layer, *vars(layer).values())), *own)
        # `caches` may be longer: it may end with caches of a draft model
        for layer, own in zip(layers, caches, strict=False)
    ]
    return min(len(layers), max(sorts.index(sort) + 2 for sort in sorts))


def cut(num_tokens: int, longest: int) -> list[int]:
    """Split `num_tokens` into sequence lengths of up to `longest`."""
    rest = num_tokens % longest
    return [longest] * (num_tokens // longest) + ([rest] if rest else [])


@contextmanager
def warming_up(context: ParallelContext, *, shows: bool = False) -> Iterator[None]:
    """Compile Triton kernels instead of running them. All ranks of a stage must launch the same
    kernels. `shows`: whether the first rank shows its progress.
    """
    from negamax.kernels.launch.triton import compiling  # import here, because it needs Triton

    layout = context.layout
    threads = max(1, min(_MOST_THREADS, usable_cores() // layout.world_size))
    share, shares = layout.rank % layout.stage_size, layout.stage_size
    shown = shows and layout.rank == 0
    with (
        Progress("compiling kernels", enabled=shown) as progress,
        compiling(share=share, shares=shares, threads=threads, progress=progress),
    ):
        yield
    context.world_min(0)  # wait until the kernels of every rank are in Triton's cache
    torch.cuda.empty_cache()  # release cached memory before later code measures free memory
