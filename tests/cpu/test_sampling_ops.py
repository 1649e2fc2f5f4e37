import math

import pytest
import torch
from torch import Tensor

from negamax.kernels.sampling import noise
from negamax.kernels.sampling import op as ops

VOCAB = 50


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def draws(
    logits: Tensor,
    uniforms: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    candidates: int = VOCAB,
) -> Tensor:
    rows = len(uniforms)
    filters = column(temperature, top_k, top_p, min_p).repeat(rows, 1)
    logits = logits.expand(rows, VOCAB)
    return ops.sample(logits, filters=filters, uniforms=uniforms, candidates=candidates)


def draw(logits: Tensor, u: float, **filters: float) -> int:
    return int(draws(logits, column(u), **filters))


def possible(logits: Tensor, **filters: float) -> set[int]:
    return set(draws(logits, torch.arange(4000) / 4000, **filters).tolist())


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2


def test_draw_follows_the_distribution(logits: Tensor) -> None:
    n = 20_000
    uniforms = torch.rand(n, generator=torch.Generator().manual_seed(2))
    frequency = torch.bincount(draws(logits, uniforms, temperature=0.7), minlength=VOCAB) / n
    assert (frequency - torch.softmax(logits / 0.7, dim=-1)).abs().max() < 0.012


def test_filters_keep_exactly_their_tokens(logits: Tensor) -> None:
    assert possible(logits, top_k=5, temperature=2.0) == set(logits.topk(5).indices.tolist())
    probs, order = torch.softmax(logits, dim=-1).sort(descending=True)
    needed = int((probs.cumsum(0) < 0.6).sum()) + 1
    assert possible(logits, top_p=0.6) == set(order[:needed].tolist())
    probs = torch.softmax(logits, dim=-1)
    kept = (probs >= 0.2 * probs.max()).nonzero().flatten()
    assert possible(logits, min_p=0.2) == set(kept.tolist())
    almost_one = 1 - 2**-24
    assert draw(logits, almost_one, top_k=3) in set(logits.topk(3).indices.tolist())
    assert draw(logits, almost_one, top_p=1e-6) == int(logits.argmax())


def test_draws_do_not_depend_on_candidates_or_batch_composition(logits: Tensor) -> None:
    narrow, wide = (
        draws(logits, torch.arange(200) / 200, top_k=10, candidates=count) for count in (16, VOCAB)
    )
    assert torch.equal(narrow, wide)
    others = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(3))
    rows = torch.cat((others[:3], logits.unsqueeze(0), others[3:]))
    filters = {"temperature": 0.9, "top_k": 20, "top_p": 0.9}
    assert int(draws(rows, torch.full((8,), 0.37), **filters)[3]) == draw(logits, 0.37, **filters)


def test_uniform_numbers_are_even_and_differ_by_seed_and_position() -> None:
    values = noise.uniforms(torch.arange(100).repeat_interleave(100), torch.arange(100).repeat(100))
    assert len(values.unique()) > 9_900
    assert bool(((values >= 0.0) & (values < 1.0)).all())
    assert abs(values.mean().item() - 0.5) < 0.01
    extremes = noise.uniforms(torch.tensor([-(2**63), 2**63 - 1]), torch.zeros(2).long())
    assert extremes[0] != extremes[1]


@pytest.mark.parametrize(
    ("logits", "prompt", "outputs", "penalties", "expected"),
    [
        # The repetition penalty divides positive logits and multiplies negative ones, once.
        ((2.0, -2.0, 1.0, 3.0), (0, 0), (1, 0), (2.0, 0.0, 0.0), [1.0, -4.0, 1.0, 3.0]),
        # Frequency and presence penalties count only output tokens.
        ((0.0,) * 4, (3, 3), (1, 1, 2), (1.0, 0.5, 0.25), [0.0, -1.25, -0.75, 0.0]),
    ],
    ids=["repetition", "frequency and presence"],
)
def test_penalties(
    logits: tuple[float, ...],
    prompt: tuple[int, ...],
    outputs: tuple[int, ...],
    penalties: tuple[float, float, float],
    expected: list[float],
) -> None:
    named = dict(zip(("repetition", "frequency", "presence"), penalties, strict=True))
    tokens = (torch.tensor(prompt), torch.tensor(outputs))
    assert ops.apply_penalties(column(*logits), *tokens, **named).tolist() == expected


def test_logprobs_ranks_and_alternatives() -> None:
    logprobs = torch.log_softmax(column(0.0, 3.0, 1.0, 2.0), dim=-1).unsqueeze(0)
    chosen, rank, ids, values = ops.token_logprobs(logprobs, torch.tensor([2]), num_top=2)
    assert math.isclose(float(chosen), float(logprobs[0, 2]))
    assert int(rank) == 3
    assert ids.tolist() == [[1, 3]]
    assert values[0].tolist() == logprobs[0, [1, 3]].tolist()
    logprobs = torch.log_softmax(torch.arange(4160.0).remainder(7).floor(), dim=-1).repeat(3, 1)
    expected = [6 + 7 * place for place in range(40)]
    for num_top in (1, 2, 5, 20, 40):
        _, _, ids, values = ops.token_logprobs(logprobs, torch.zeros(3).long(), num_top=num_top)
        assert ids.tolist() == [expected[:num_top]] * 3
        assert torch.equal(values, logprobs[:, :num_top].new_full((3, num_top), logprobs[0, 6]))
