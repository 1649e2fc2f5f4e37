"""Data-parallel and context-parallel ranks with tokens of their own get from experts, which lie on
all of them, what one rank with all the experts would give each; so do context-parallel ranks that
have the same tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "cpu"))

from rank_processes import run_ranks
from test_expert_dispatch import HIDDEN, PERMUTED, SOME_TWICE, WIDTH, mixture

from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout

# (axis, ranks along it, tp, ep, table, width of the shared expert)
CASES = [
    ("dp", 4, 1, 1, None, 0), ("dp", 4, 1, 4, PERMUTED, 0), ("dp", 4, 1, 2, SOME_TWICE, 0),
    ("dp", 4, 1, 1, None, WIDTH), ("dp", 4, 1, 4, None, WIDTH), ("dp", 2, 2, 1, None, 2 * WIDTH),
    ("dp", 2, 2, 2, None, WIDTH), ("dp", 2, 2, 4, None, 0), ("dp", 2, 2, 4, None, WIDTH),
    ("cp", 4, 1, 4, PERMUTED, WIDTH), ("cp", 2, 2, 1, None, 2 * WIDTH),
    ("cp", 2, 2, 4, None, WIDTH),
]  # fmt: skip
# tokens of each rank along the axis, and whether the last of them is padding
STEPS = [
    ((1, 1, 1, 1), True),
    ((1, 1, 1, 1), False),
    ((3, 1, 2, 1), False),
    ((1, 7, 1, 2), True),
    ((4, 4, 4, 4), False),
]


def tokens_of(step: int, place: int) -> tuple[Tensor, Tensor | None]:
    counts, padded = STEPS[step]
    generator = torch.Generator().manual_seed(10 * step + place)
    x = torch.randn(counts[place], HIDDEN, generator=generator)
    return x, torch.tensor([len(x) - 1], dtype=torch.int32) if padded and place else None


def places_of(layout: ParallelLayout, most: int) -> list[tuple[int, int | None]]:
    """Whose tokens a rank runs, and how many the others have at most: its own, then with context
    parallelism the same ones on every rank.
    """
    if layout.cp == 1:
        return [(layout.dp_rank, most)]
    return [(layout.cp_rank, most), (1, None)]


def one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    for case, (axis, ranks, tp, ep, table, shared_width) in enumerate(CASES):
        layout = ParallelLayout(rank=rank, tp=tp, ep=ep, **{axis: ranks})
        context = ParallelContext.gloo(layout, f"{folder}/meet-{case}")
        moe = mixture(layout, table, shared_width=shared_width, context=context)
        parts = []
        for step, (counts, _) in enumerate(STEPS):
            for place, most in places_of(layout, max(counts[:ranks])):
                x, active = tokens_of(step, place)
                part = moe(x, active=active, most_tokens=most)
                assert part.group is context.attention_group and part.x.shape == x.shape
                parts.append(context.attention_group.all_reduce(part.x))
        torch.save(parts, f"{folder}/{case}-{rank}.pt")
        context.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gloo")
    run_ranks(one_rank, str(folder), world=4)
    return folder


@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_rank_has_of_its_tokens_what_one_rank_makes_of_them(folder: Path, case: int) -> None:
    axis, ranks, tp, ep, _, shared_width = CASES[case]
    whole = mixture(ParallelLayout(), None, shared_width=shared_width)
    for rank in range(ranks * tp):
        layout = ParallelLayout(rank=rank, tp=tp, ep=ep, **{axis: ranks})
        got = torch.load(folder / f"{case}-{rank}.pt", weights_only=True)
        places = places_of(layout, 0)
        given = [tokens_of(step, place) for step in range(len(STEPS)) for place, _ in places]
        for part, (x, active) in zip(got, given, strict=True):
            expected = whole(x, active=active).x
            real = len(x) if active is None else int(active)
            torch.testing.assert_close(part[:real], expected[:real], atol=1e-5, rtol=1e-5)
