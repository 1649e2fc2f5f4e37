from pathlib import Path

import torch
from rank_processes import run_ranks
from torch import Tensor

from negamax.parallel.collectives import Collective, SingleRank
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout

ROWS = 12


def rows_of(rank: int) -> Tensor:
    return torch.randn(ROWS, 3, 2, generator=torch.Generator().manual_seed(rank)).bfloat16()


def gather_all(group: Collective) -> dict[str, Tensor]:
    mine = rows_of(group.rank)
    return {
        "all_reduce": group.all_reduce(mine.clone()),
        "reduce_scatter": group.reduce_scatter(mine.clone()),
        "gather rows": group.all_gather(mine, dim=0),
        "gather columns": group.all_gather(mine, dim=-1),
        "bytes": group.all_gather(mine.view(torch.uint8), dim=0),
    }


def one_rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    context = ParallelContext.gloo(ParallelLayout(rank=rank, tp=world), f"{folder}/meet")
    torch.save(gather_all(context.attention_group), f"{folder}/{rank}.pt")
    context.close()


def test_sums_shards_and_concatenations(tmp_path: Path) -> None:
    world = 4
    run_ranks(one_rank, world, str(tmp_path), world=world)
    everyones = [rows_of(rank) for rank in range(world)]
    total = torch.zeros(ROWS, 3, 2)
    for rows in everyones:
        total += rows.float()
    for rank in range(world):
        got = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert torch.equal(got["all_reduce"], total.bfloat16())
        assert torch.equal(got["reduce_scatter"], total.bfloat16().chunk(world)[rank])
        assert torch.equal(got["gather rows"], torch.cat(everyones))
        assert torch.equal(got["gather columns"], torch.cat(everyones, dim=-1))
        assert torch.equal(got["bytes"].view(torch.bfloat16), torch.cat(everyones))
    for name, got in gather_all(SingleRank()).items():
        assert torch.equal(got.view(torch.uint8), rows_of(0).view(torch.uint8)), name
