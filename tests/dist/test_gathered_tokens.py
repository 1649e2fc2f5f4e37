import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "cpu"))

from rank_processes import run_ranks
from test_expert_dispatch import HIDDEN, PERMUTED, SOME_TWICE, WIDTH, mixture

from negamax.kernels.attention.metadata import StepTokens
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout

# (dp, cp, tp, ep, table, width of the shared expert)
CASES = [
    (4, 1, 1, 1, None, 0), (4, 1, 1, 4, PERMUTED, 0), (4, 1, 1, 2, SOME_TWICE, 0),
    (4, 1, 1, 1, None, WIDTH), (4, 1, 1, 4, None, WIDTH), (2, 1, 2, 1, None, 2 * WIDTH),
    (2, 1, 2, 2, None, WIDTH), (2, 1, 2, 4, None, 0), (2, 1, 2, 4, None, WIDTH),
    (1, 4, 1, 4, PERMUTED, WIDTH), (1, 2, 2, 1, None, 2 * WIDTH), (1, 2, 2, 4, None, WIDTH),
    (2, 2, 1, 1, None, WIDTH), (2, 2, 1, 2, SOME_TWICE, 2 * WIDTH), (2, 2, 1, 4, PERMUTED, 0),
]  # fmt: skip
# tokens of each rank along both axes, and whether the last token is padding
STEPS = [((1, 1, 1, 1), True), ((1, 1, 1, 1), False), ((3, 1, 2, 1), False)]
STEPS += [((1, 7, 1, 2), True), ((4, 4, 4, 4), False)]


def tokens_of(step: int, place: int) -> tuple[Tensor, Tensor | None]:
    counts, padded = STEPS[step]
    generator = torch.Generator().manual_seed(10 * step + place)
    x = torch.randn(counts[place], HIDDEN, generator=generator)
    return x, torch.tensor([len(x) - 1], dtype=torch.int32) if padded and place else None


def runs_of(layout: ParallelLayout, counts: tuple[int, ...]) -> list[tuple[int, int | None, bool]]:
    """Return the owner of a rank's tokens, the largest count of other ranks, and whether to split.

    The first entry is for the rank's own tokens, the second one for its data-parallel rank's
    tokens.
    """
    own = layout.dp_rank * layout.cp + layout.cp_rank, max(counts[: layout.dp * layout.cp])
    if layout.cp == 1:
        return [(*own, False)]
    most = max(counts[: layout.dp]) if layout.dp > 1 else None
    return [(*own, True), (layout.dp_rank, most, False)]


def one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    for case, (dp, cp, tp, ep, table, shared_width) in enumerate(CASES):
        layout = ParallelLayout(rank=rank, tp=tp, ep=ep, dp=dp, cp=cp)
        context = ParallelContext.gloo(layout, f"{folder}/meet-{case}")
        moe = mixture(layout, table, shared_width=shared_width, context=context)
        parts = []
        for step, (counts, _) in enumerate(STEPS):
            for place, most, is_share in runs_of(layout, counts):
                x, active = tokens_of(step, place)
                part = moe(x, StepTokens(active, None, most, is_share=is_share))
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
def test_every_rank_has_the_results_of_one_rank_for_its_tokens(folder: Path, case: int) -> None:
    dp, cp, tp, ep, _, shared_width = CASES[case]
    whole = mixture(ParallelLayout(), None, shared_width=shared_width)
    for rank in range(dp * cp * tp):
        layout = ParallelLayout(rank=rank, tp=tp, ep=ep, dp=dp, cp=cp)
        got = torch.load(folder / f"{case}-{rank}.pt", weights_only=True)
        given = [
            tokens_of(step, place)
            for step, (counts, _) in enumerate(STEPS)
            for place, _, _ in runs_of(layout, counts)
        ]
        for part, (x, active) in zip(got, given, strict=True):
            expected = whole(x, StepTokens(active)).x
            real = len(x) if active is None else int(active)
            torch.testing.assert_close(part[:real], expected[:real], atol=1e-5, rtol=1e-5)
