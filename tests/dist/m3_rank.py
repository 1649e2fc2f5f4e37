"""Run a rank of MiniMax-M3 for `test_m3_ranks` without the slow import of transformers."""

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "cpu"))

from m3_support import TOKENS, loaded, run_in_chunks
from model_support import PagedRun

from negamax.layers.block_sparse_attention import BlockSparseAttention
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout

# (tensor parallel, KV heads, expert parallel, tokens per cache block: one or two sparse blocks;
# decode context parallel)
LAYOUTS = [
    (2, 2, 1, 16, 1), (2, 4, 2, 32, 1), (2, 1, 1, 32, 2),
    (4, 2, 1, 16, 1), (4, 4, 1, 16, 1), (4, 1, 4, 32, 1), (4, 2, 1, 16, 2), (4, 1, 1, 16, 4),
]  # fmt: skip


def one_rank(rank: int, tp: int, folder: str) -> None:
    torch.set_num_threads(1)
    for case, (world, kv_heads, ep, block_size, holders) in enumerate(LAYOUTS):
        if world != tp:
            continue
        layout = ParallelLayout(rank=rank, tp=tp, ep=ep, dcp=holders)
        context = ParallelContext.gloo(layout, f"{folder}/meet-{case}")
        for is_sharded in (False, True):
            run = loaded(
                Path(folder) / f"{kv_heads}", ranks=tp, context=context, block_size=block_size,
                is_sharded=is_sharded, holders=holders,
            )  # fmt: skip
            run.kv[-1]["index"].fill_(3.0)  # Old contents must have no effect.
            choices = recorded(run)
            logits = run_in_chunks(run, TOKENS)
            torch.save([logits, *choices], f"{folder}/{case}-{is_sharded}-{rank}.pt")
            assert run.kv[-1]["index"].shape[0] == (32 // tp if is_sharded else 32)
            assert run.kv[-1]["k"].shape[0] == (32 if holders == 1 else 32 // holders + 1)
        context.close()


def recorded(run: PagedRun) -> list[torch.Tensor]:
    choices: list[torch.Tensor] = []
    for layer in run.model.layers:
        if isinstance(layer.attention, BlockSparseAttention):

            def record(*args: Any, choose: Any = layer.attention._choose) -> Any:
                choice = choose(*args)
                choices.extend((choice.ids, choice.pages))
                return choice

            layer.attention._choose = record
    return choices
