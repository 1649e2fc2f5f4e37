"""A rank of MiniMax-M3, for `test_m3_ranks`; it does without transformers, which take seconds to
import.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "cpu"))

from m3_support import TOKENS, loaded, run_in_chunks

from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout

# (tensor parallel, KV heads, expert parallel)
LAYOUTS = [(2, 2, 1), (2, 4, 2), (4, 2, 1), (4, 4, 1), (4, 1, 4)]


def one_rank(rank: int, tp: int, folder: str) -> None:
    """A rank's process: every layout of this world size, results of all ranks into `folder`."""
    torch.set_num_threads(1)
    for case, (size, kv_heads, ep) in enumerate(LAYOUTS):
        if size == tp:
            layout = ParallelLayout(rank=rank, tp=tp, ep=ep)
            context = ParallelContext.gloo(layout, f"{folder}/meet-{case}")
            run = loaded(Path(folder) / f"{kv_heads}", ranks=tp, context=context)
            torch.save(run_in_chunks(run, TOKENS), f"{folder}/{case}-{rank}.pt")
            context.close()
