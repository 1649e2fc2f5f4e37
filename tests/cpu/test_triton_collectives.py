"""Exchange rows in the interpreter: one rank runs, and its memory holds the words of the others."""

import threading
from functools import partial

import pytest
import torch
from triton.language import constexpr
from triton_support import Group, Ranks, words_of

from negamax.kernels.collectives import op as spec
from negamax.kernels.collectives import tiles, triton_ll
from negamax.kernels.collectives import triton as kernels
from negamax.kernels.norm import op as norm_spec
from negamax.kernels.norm import triton as norm_kernels
from negamax.parallel.collectives import SingleRank

WIDTH = 1024
WORDS = WIDTH // 2


@pytest.mark.parametrize("two_shot", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("world", "rank"), [(2, 0), (2, 1), (4, 2)])
def test_rows_are_summed_over_ranks_then_added_and_normalized(
    world: int, rank: int, parts: int, two_shot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run steps of 3, 1 and 2 rows, so that rows have different epochs; also several parts."""
    monkeypatch.setattr(tiles, "two_shot", lambda *args, **sizes: two_shot)
    ranks = Ranks(world, rows=4, words=WORDS)
    generator = torch.Generator().manual_seed(world + rank)
    weight = (1 + 0.2 * torch.randn(WIDTH, generator=generator)).half()
    norm = norm_kernels.prepare(weight, 1e-6, gemma=parts == 2)
    share = slice(rank * WIDTH // world, (rank + 1) * WIDTH // world)
    for num_rows in (3, 1, 2):
        x = [torch.randn(num_rows, parts, WIDTH, generator=generator).half() for _ in range(world)]
        residual = torch.randn(num_rows, WIDTH, generator=generator).half()
        sums = [part.float().sum(dim=1).half() for part in x]
        total = torch.stack([part.float() for part in sums]).sum(dim=0).half()
        for row in range(num_rows):
            for sender in set(range(world)) - {rank}:
                arrive = partial(ranks.arrive, rank, sender=sender, row=row)
                if two_shot:
                    theirs = slice(sender * WIDTH // world, (sender + 1) * WIDTH // world)
                    arrive(payload=words_of(sums[sender][row, share]))
                    arrive(payload=words_of(total[row, theirs]), first_word=WORDS // world)
                else:
                    arrive(payload=words_of(sums[sender][row]))
        expected_residual = residual.clone()
        expected = norm_spec.add_rms(total, expected_residual, norm)
        out = kernels.all_reduce_add_rms(x[rank], residual, norm, Group(ranks, rank))
        assert isinstance(out, torch.Tensor)
        assert torch.equal(residual, expected_residual)
        torch.testing.assert_close(out.float(), expected.float(), atol=2e-3, rtol=2e-3)
    assert ranks.epochs[rank].tolist() == [3, 2, 1, 0]


def test_pushed_words_arrive_flagged_at_every_peer() -> None:
    ranks = Ranks(2, rows=2, words=WORDS)
    x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1)).half()
    ranks.arrive(1, sender=0, row=0, payload=torch.zeros(WORDS, dtype=torch.int32))
    norm = norm_kernels.prepare(torch.ones(WIDTH, dtype=torch.float16), 1e-6)
    kernels.all_reduce_add_rms(x, torch.zeros_like(x), norm, Group(ranks, 1))
    for copy in ranks.copies:
        arrived = copy[1, 0, 1]  # Epoch 1 uses buffer 1; the word is in row 0, from sender 1.
        assert (arrived >> 32 == 1).all()
        assert torch.equal(arrived.to(torch.int32), words_of(x[0]))
    assert ranks.copies[0][0].count_nonzero() == 0


def test_more_rows_than_the_region_has_go_through_the_group() -> None:
    class Doubling(SingleRank):
        size = 2

        def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor + tensor

    group = Doubling()
    group.peers = Ranks(2, rows=2, words=WORDS).peers(0)
    x = torch.randn(3, 2, WIDTH, generator=torch.Generator().manual_seed(1)).half()
    residual, expected_residual = torch.zeros(3, WIDTH).half(), torch.zeros(3, WIDTH).half()
    norm = norm_kernels.prepare(torch.ones(WIDTH, dtype=torch.float16), 1e-6)
    out = kernels.all_reduce_add_rms(x, residual, norm, group)
    expected = spec.all_reduce_add_rms(x, expected_residual, norm, group)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(residual, expected_residual)
    torch.testing.assert_close(out.float(), expected.float(), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("is_aborted", [True, False])
def test_poll_of_missing_rank_is_bounded(is_aborted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a poll ends if the words of rank 0 never arrive; a timeout sets the abort flag."""
    monkeypatch.setattr(triton_ll, "_SPINS", constexpr(8))
    ranks, ended = Ranks(2, rows=1, words=WORDS), threading.Event()

    def tick() -> None:
        while not ended.wait(0.01):
            ranks.control[0] += 20

    if is_aborted:
        ranks.control[2] = 1
    else:
        ranks.control[1] = 50
        threading.Thread(target=tick, daemon=True).start()
    x = torch.ones(1, WIDTH, dtype=torch.float16)
    norm = norm_kernels.prepare(torch.ones(WIDTH, dtype=torch.float16), 1e-6)
    try:
        kernels.all_reduce_add_rms(x, torch.zeros_like(x), norm, Group(ranks, 1))
    finally:
        ended.set()
    assert ranks.control[2] == 1 and (ranks.control[0] > 50) != is_aborted
