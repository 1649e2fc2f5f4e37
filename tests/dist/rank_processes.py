"""Fork the ranks of a test from a process that has already imported torch and the model."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing

PRELOADED = ["torch", "negamax.parallel.context", "negamax.models.build", "model_support"]


def run_ranks(rank: Callable[..., None], *args: Any, world: int) -> None:
    """Run `rank(number, *args)` in `world` processes. Raises the error of a rank that fails."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    torch.multiprocessing.start_processes(rank, args=args, nprocs=world, start_method="forkserver")
