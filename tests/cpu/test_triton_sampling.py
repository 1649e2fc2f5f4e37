from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton_support import Group, Ranks

from negamax.kernels.sampling import noise, tiles
from negamax.kernels.sampling import op as spec
from negamax.kernels.sampling import triton as kernels


def call(run: Callable[..., torch.Tensor], inputs: dict[str, torch.Tensor], **more: Any) -> Any:
    rows = spec.RowSampling(*(inputs[name] for name in spec.RowSampling._fields))
    rest = {name: inputs[name] for name in inputs if name not in ("logits", *rows._fields)}
    return run(inputs["logits"], rows, **rest, **more)


def score_and_token(score: float, token_id: int) -> torch.Tensor:
    """Return the words that a rank sends for its best token."""
    return torch.stack((torch.tensor(score).view(torch.int32), torch.tensor(token_id).int()))


def inputs_of(
    rows: int, vocab: int, filters: list[list[float]], *, seed: int
) -> dict[str, torch.Tensor]:
    """Draw the inputs of `pick`. The rows take `filters` in turn."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "logits": torch.randn(rows, vocab, generator=generator),
        "filters": torch.tensor(filters * rows)[:rows],
        "seeds": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
        "slots": torch.randperm(rows, generator=generator),
        "positions": torch.arange(rows) * 7,
    }


TEMPERATURES = [[1.0] * 4, [0.0] * 4, [0.7] * 4]
FILTERS = [[1.0, 40, 0.95, 0.0], [0.7, 5, 1.0, 0.1], [0.0, 40, 1.0, 0.0]]


@pytest.mark.parametrize("winner", [0, 1])
def test_ranks_exchange_their_best_and_agree(winner: int) -> None:
    """Give each of two ranks 300 tokens; memory already holds the other's (score, token)."""
    inputs = inputs_of(3, 600, TEMPERATURES, seed=5)
    inputs["logits"][:, winner * 300 + 17] += 100.0
    expected = call(spec.pick, inputs, first_id=0)
    slices = [{**inputs, "logits": inputs["logits"][:, first : first + 300]} for first in (0, 300)]
    ranks = Ranks(2, rows=8, words=2)
    for step in range(3):
        for rank in (0, 1):
            other = 1 - rank
            token_ids = call(spec.pick, slices[other], first_id=300 * other)
            score = 1000.0 if other == winner else 1.0
            for row in range(3):
                payload = score_and_token(score, int(token_ids[row]))
                ranks.arrive(rank, sender=other, row=row, payload=payload)
            got = call(kernels.pick, slices[rank], first_id=300 * rank, group=Group(ranks, rank))
            assert torch.equal(got, expected), (step, rank)
            assert ranks.epochs[rank].tolist() == [step + 1] * 3 + [0] * 5


@pytest.mark.parametrize(
    ("temperature", "rank", "other", "other_id", "expected"),
    [(0.0, 0, 5.0, 51, 11), (0.0, 1, 5.0, 11, 11), (1.0, 0, torch.inf, 45, -1)],
    ids=["the own one has the lower id", "the other one has the lower id", "broken logits"],
)
def test_equal_scores_take_the_lower_id_and_broken_logits_break_the_row(
    temperature: float, rank: int, other: float, other_id: int, expected: int
) -> None:
    logits, zeros = torch.zeros(1, 40), torch.zeros(1, dtype=torch.int64)
    logits[0, 11] = 5.0
    filters = torch.full((1, 4), temperature)
    rows = spec.RowSampling(filters, seeds=zeros, slots=zeros, positions=zeros)
    ranks = Ranks(2, rows=1, words=2)
    ranks.arrive(rank, sender=1 - rank, row=0, payload=score_and_token(other, other_id))
    shard = {"first_id": 40 * rank, "group": Group(ranks, rank)}
    assert kernels.pick(logits, rows, **shard).tolist() == [expected]


def test_noise_is_that_of_the_definition_for_any_shard() -> None:
    """Use equal logits, so that 40 rows of 700 tokens agree only if the noise has equal bits."""
    inputs = inputs_of(40, 700, TEMPERATURES[:1], seed=6)
    inputs["logits"].zero_()
    assert torch.equal(
        call(kernels.pick, inputs, first_id=123_456), call(spec.pick, inputs, first_id=123_456)
    )
    inputs = inputs_of(6, 900, TEMPERATURES, seed=7)
    whole = call(spec.pick, inputs, first_id=0)
    for cut in (1, 300, 899):
        parts = [
            call(spec.pick, {**inputs, "logits": logits}, first_id=first)
            for first, logits in ((0, inputs["logits"][:, :cut]), (cut, inputs["logits"][:, cut:]))
        ]
        assert ((whole == parts[0]) | (whole == parts[1])).all()


# --- the noise -----------------------------------------------------------------------------------


def z_score(values: torch.Tensor, cells: int) -> float:
    """Return the deviation of the chi-square of `values` from its mean, in standard deviations."""
    counts = torch.bincount(values.flatten(), minlength=cells).double()
    expected = values.numel() / cells
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - (cells - 1)) / (2 * (cells - 1)) ** 0.5


@pytest.mark.parametrize("seed", [0, 1, -7, 2**62])
def test_noise_is_uniform_and_neighbors_are_independent(seed: int) -> None:
    """Check all bytes, and the leading four bits of adjacent tokens, positions and seeds."""
    ids = torch.arange(20_000)
    by_position = bits_of(torch.tensor([seed] * 32), torch.arange(32), ids)
    by_seed = bits_of(torch.arange(seed, seed + 32), torch.full((32,), 9), ids)
    for bits in (by_position, by_seed):
        for shift in (0, 8, 16, 24):
            assert abs(z_score((bits >> shift) & 255, 256)) < 5
        pairs = (
            (bits[:, :-1], bits[:, 1:]), (bits[:-1], bits[1:]), (bits[:, :-128], bits[:, 128:]),
            (bits[:-1, 1:], bits[1:, :-1]),
        )  # fmt: skip
        for left, right in pairs:
            assert abs(z_score((left >> 28) * 16 + (right >> 28), 256)) < 5
            assert abs(z_score((left & 15) * 16 + (right & 15), 256)) < 5
            assert abs(z_score((left ^ right) >> 24, 256)) < 5


def bits_of(seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    low, high = noise.row_keys(seeds, positions)
    return noise.token_bits((low.unsqueeze(1), high.unsqueeze(1)), ids)


def test_exponentials_are_distinct_and_picks_follow_the_distribution() -> None:
    edges = noise.exponentials(torch.tensor([0, 1, 2, 2**31, 2**32 - 1]))
    assert (edges > 0).all() and edges.isfinite().all()
    assert edges[0] < edges[1] < edges[2]
    many = noise.exponentials(bits_of(torch.arange(8), torch.arange(8), torch.arange(50_000)))
    assert abs(float(many.mean()) - 1) < 0.01
    assert abs(float(many.var()) - 1) < 0.03
    n = 20_000
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1)) * 2
    for seeds, positions in (
        (torch.full((n,), 3), torch.arange(n)),
        (torch.arange(n), torch.full((n,), 3)),
    ):
        rows = spec.RowSampling(torch.full((n, 4), 0.7), seeds, torch.arange(n), positions)
        tokens = spec.pick(logits.expand(n, 50), rows, first_id=0)
        frequency = torch.bincount(tokens, minlength=50) / n
        assert (frequency - torch.softmax(logits / 0.7, dim=-1)).abs().max() < 0.012


def test_ranks_exchange_their_leading_tokens_and_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each of two ranks 150 tokens; memory already holds the other rank's words."""
    monkeypatch.setattr(tiles, "tiles_for", lambda device: tiles.SamplingTiles(strip_block=64))
    monkeypatch.setattr(tiles, "strip", lambda vocab: 8)
    inputs = inputs_of(3, 300, FILTERS, seed=8) | {"otherwise": torch.full((3,), 4)}
    # Among equal values, the lower id comes first.
    inputs["logits"][0, 20:90] = inputs["logits"][0, 200:280] = 3.5
    expected = call(spec.draw_leading, inputs, first_id=0)
    slices = [{**inputs, "logits": part.contiguous()} for part in inputs["logits"].split(150, 1)]
    ranks = Ranks(2, rows=8, words=2 * spec.CANDIDATES)
    for rank in (0, 1):
        other = 1 - rank
        logits = slices[other]["logits"]
        order = torch.sort(logits, dim=1, descending=True, stable=True).indices
        columns = order[:, : spec.CANDIDATES].sort(dim=1).values
        bits = logits.gather(1, columns).view(torch.int32)
        keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) ^ -(2**31)
        for row in range(3):
            payload = torch.cat((keys[row], (columns[row] + 150 * other).to(torch.int32)))
            ranks.arrive(rank, sender=other, row=row, payload=payload)
        shard = {"first_id": 150 * rank, "group": Group(ranks, rank)}
        assert torch.equal(call(kernels.draw_leading, slices[rank], **shard), expected), rank
        # A greedy row exchanges no words.
        drawn = (inputs["filters"][inputs["slots"], 0] > 0).int().tolist()
        assert ranks.epochs[rank].tolist() == drawn + [0] * 5


@pytest.mark.parametrize("seed", [0, 3, -5, 2**63 - 1])
def test_the_number_of_a_row_is_the_leading_bits_of_its_key(seed: int) -> None:
    mask = (1 << 64) - 1
    for position in (0, 1, 4095):
        x = (seed + 0x9E3779B97F4A7C15 * (position + 1)) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        expected = ((x ^ (x >> 31)) >> 40) / (1 << 24)
        assert noise.uniforms(torch.tensor([seed]), torch.tensor([position])).item() == expected
