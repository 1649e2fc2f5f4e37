import pytest
import torch
from sampling_support import REFERENCES, VOCAB, rows_of

from negamax.parallel.collectives import SingleRank
from negamax.scheduler.step import NewRow
from negamax.worker.batch import sample_inputs
from negamax.worker.request_state import RequestState
from negamax.worker.sampler import BROKEN, Sampler

KINDS = (
    {"top_k": 40, "top_p": 0.95},
    {"top_k": 3},
    {"top_p": 0.9},
    {"min_p": 0.2},
    {"temperature": 0.0},
    {"top_k": 5, "logprobs": 2},
    {"temperature": 0.0, "logit_bias": {3: 100.0}},
    {"temperature": 0.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5},
    {"temperature": 0.0, "allowed_token_ids": tuple(range(100, 200))},
    {"top_k": 5, "logprobs": 2, "allowed_token_ids": (3, 250, 499)},
)


def sampler(rows: RequestState, *, on_shards: bool) -> Sampler:
    return Sampler(rows, kernels=REFERENCES, group=SingleRank(), on_shards=on_shards)


@pytest.mark.parametrize(
    "company", [KINDS, *((kind,) for kind in KINDS)], ids=["all", *map(str, range(len(KINDS)))]
)
def test_rows_with_parameters_get_the_token_of_the_whole_logits(
    company: tuple[dict[str, object], ...],
) -> None:
    rows = rows_of(company)
    logits = 3 * torch.randn(len(company), VOCAB, generator=torch.Generator().manual_seed(1))
    inputs = sample_inputs(list(range(len(company))), [4] * len(company), rows)
    whole = sampler(rows, on_shards=False)(logits.clone(), inputs)
    sharded = sampler(rows, on_shards=True)(logits.clone(), inputs)
    assert sharded.token_ids.tolist() == whole.token_ids.tolist()
    assert sharded.logprob_rows == whole.logprob_rows
    if whole.logprobs is not None and sharded.logprobs is not None:
        assert sharded.logprobs.read() == whole.logprobs.read()


def test_plain_rows_are_drawn_the_same_beside_any_others() -> None:
    logits = 3 * torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2))
    drawn = []
    for company in (
        ({}, {}),
        ({}, {"top_k": 40}),
        ({}, {"logprobs": 1}),
        ({}, {"logit_bias": {3: 1.0}}),
    ):
        rows = rows_of(company)
        inputs = sample_inputs([0, 1], [4, 4], rows)
        drawn.append(sampler(rows, on_shards=True)(logits.clone(), inputs))
    assert len({sampled.token_ids[0].item() for sampled in drawn}) == 1


def test_a_row_without_finite_logits_is_reported_and_the_others_are_not() -> None:
    rows = rows_of(({}, {"top_k": 40}, {"logprobs": 1, "top_k": 4}, {}))
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3))
    logits[:3, 5] = float("nan")
    inputs = sample_inputs([0, 1, 2, 3], [4] * 4, rows)
    sampled = sampler(rows, on_shards=True)(logits, inputs)
    assert sampled.token_ids[:3].tolist() == [BROKEN] * 3
    assert sampled.token_ids[3] != BROKEN


def test_a_row_that_cannot_be_edited_fails_alone() -> None:
    """Cover samplers of whole and of sharded logits."""
    expected = rows_of(({}, {}, {"logprobs": 1}))
    for on_shards in (False, True):
        rows = rows_of(({}, {"logit_bias": {VOCAB: 1.0}}, {"logprobs": 1}))
        logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
        inputs = sample_inputs([0, 1, 2], [4] * 3, rows)
        sampled = sampler(rows, on_shards=on_shards)(logits.clone(), inputs)
        wanted = sampler(expected, on_shards=on_shards)(logits.clone(), inputs)
        assert rows.failures_of([0, 1, 2]) == {1: "IndexError while this request was computed"}
        assert sampled.token_ids[[0, 2]].tolist() == wanted.token_ids[[0, 2]].tolist()


def test_a_row_that_could_not_be_filled_still_draws_as_the_other_ranks_expect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_rows: RequestState, _row: NewRow) -> None:
        raise RuntimeError("not filled")

    monkeypatch.setattr(RequestState, "_fill", fail)
    rows = rows_of(({"top_k": 5, "top_p": 0.5, "min_p": 0.25},))
    assert rows.failures_of([0])
    assert rows.sampling[0].tolist() == [1.0, 5.0, 0.5, 0.25]
