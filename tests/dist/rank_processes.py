"""Processes that are the ranks of a test: forked from one that has torch and the model imported,
which takes each of them seconds otherwise.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing

PRELOADED = ["torch", "negamax.parallel.context", "negamax.models.build", "model_support"]


def run_ranks(rank: Callable[..., None], *args: Any, world: int) -> None:
    """Run `rank(number, *args)` in `world` processes. Errors: whatever one of them raises."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    torch.multiprocessing.start_processes(rank, args=args, nprocs=world, start_method="forkserver")
