import pytest
from sampling_support import VOCAB, random_logits, rows_of, sample

from negamax.scheduler.step import NewRow
from negamax.worker.request_state import RequestState
from negamax.worker.sampler import BROKEN

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


@pytest.mark.parametrize(
    "kinds", [KINDS, *((kind,) for kind in KINDS)], ids=["all", *map(str, range(len(KINDS)))]
)
def test_rows_with_parameters_get_the_token_of_the_whole_logits(
    kinds: tuple[dict[str, object], ...],
) -> None:
    rows, logits = rows_of(kinds), random_logits(len(kinds), 1)
    whole, sharded = (sample(logits, rows, on_shards=way) for way in (False, True))
    assert sharded.token_ids.tolist() == whole.token_ids.tolist()
    assert sharded.logprob_rows == whole.logprob_rows
    if whole.logprobs is not None and sharded.logprobs is not None:
        assert sharded.logprobs.read() == whole.logprobs.read()


def test_plain_rows_are_sampled_the_same_in_any_batch() -> None:
    logits = random_logits(2, 2)
    others = ({}, {"top_k": 40}, {"logprobs": 1}, {"logit_bias": {3: 1.0}})
    drawn = [sample(logits, rows_of(({}, other)), on_shards=True).token_ids for other in others]
    assert len({token_ids[0].item() for token_ids in drawn}) == 1


def test_a_row_without_finite_logits_is_reported_and_the_others_are_not() -> None:
    rows = rows_of(({}, {"top_k": 40}, {"logprobs": 1, "top_k": 4}, {}))
    logits = random_logits(4, 3)
    logits[:3, 5] = float("nan")
    token_ids = sample(logits, rows, on_shards=True).token_ids
    assert token_ids[:3].tolist() == [BROKEN] * 3 and token_ids[3] != BROKEN


@pytest.mark.parametrize("on_shards", [False, True])
def test_a_row_that_cannot_be_edited_fails_alone(on_shards: bool) -> None:
    rows, logits = rows_of(({}, {"logit_bias": {VOCAB: 1.0}}, {"logprobs": 1})), random_logits(3, 4)
    sampled = sample(logits, rows, on_shards=on_shards)
    wanted = sample(logits, rows_of(({}, {}, {"logprobs": 1})), on_shards=on_shards)
    assert rows.failures_of([0, 1, 2]) == {1: "IndexError while this request was computed"}
    assert sampled.token_ids[[0, 2]].tolist() == wanted.token_ids[[0, 2]].tolist()


def test_a_row_that_could_not_be_filled_is_sampled_as_the_other_ranks_expect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_rows: RequestState, _row: NewRow) -> None:
        raise RuntimeError("not filled")

    monkeypatch.setattr(RequestState, "_fill", fail)
    rows = rows_of(({"top_k": 5, "top_p": 0.5, "min_p": 0.25},))
    assert rows.failures_of([0])
    assert rows.sampling[0].tolist() == [1.0, 5.0, 0.5, 0.25]
