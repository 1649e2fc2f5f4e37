import math
from typing import Any

import pytest

from negamax.base.errors import InvalidRequestError
from negamax.config.generation import SamplingDefaults
from negamax.scheduler.request import SamplingParams


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, 10**9]),
        ("temperature", [-0.1, 5.0, math.nan]),
        ("top_p", [0.0, 1.1]),
        ("top_k", [-2]),
        ("min_p", [1.5]),
        ("repetition_penalty", [0.0, math.inf]),
        ("frequency_penalty", [2.5]),
        ("presence_penalty", [-2.5]),
        ("seed", [2**63]),
        ("max_tokens", [0, -1]),
        ("min_tokens", [-1]),
        ("logprobs", [21]),
        ("prompt_logprobs", [-1]),
        ("stop", [("x",) * 33, ("",), ("x" * 2000,)]),
        ("stop_token_ids", [(4160,), tuple(range(257))]),
        ("logit_bias", [{4160: 1.0}, {1: 101.0}, dict.fromkeys(range(1025), 1.0)]),
    ],
)
def test_out_of_range_is_refused_by_name(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**{field: value}).check(max_logprobs=20, vocab_size=4160)
        assert caught.value.param == field
        assert field in caught.value.message and "allowed" in caught.value.message
        assert len(caught.value.message) < 300


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens is 5; allowed: 0 to 4"):
        SamplingParams(min_tokens=5, max_tokens=4).check(max_logprobs=20, vocab_size=10)


def test_limits_themselves_are_accepted() -> None:
    params = SamplingParams(
        n=128, temperature=2.0, top_p=1.0, top_k=-1, min_p=1.0, max_tokens=1, logprobs=20,
        stop=("x",) * 32, seed=-(2**63),
    )  # fmt: skip
    params.check(max_logprobs=20, vocab_size=10)


def test_missing_fields_take_the_models_defaults_and_given_ones_stay() -> None:
    defaults = SamplingDefaults(
        temperature=1.0, top_p=0.95, top_k=40, min_p=0.01, repetition_penalty=1.1
    )
    resolved = SamplingParams(temperature=0.5).resolved(defaults, room=77)
    assert (resolved.temperature, resolved.top_p, resolved.top_k) == (0.5, 0.95, 40)
    assert (resolved.min_p, resolved.repetition_penalty, resolved.max_tokens) == (0.01, 1.1, 77)
    assert SamplingParams(top_k=-1, max_tokens=3).resolved(defaults, room=77).top_k == 0


def test_seeds_of_choices_wrap_after_the_largest_seed() -> None:
    params = SamplingParams(n=3, seed=2**63 - 1, temperature=0.5)
    choices = [params.copy_for_choice(index, seed=2**63 - 1) for index in range(3)]
    assert [choice.seed for choice in choices] == [2**63 - 1, -(2**63), 1 - 2**63]
    assert {(choice.n, choice.temperature) for choice in choices} == {(1, 0.5)}
    assert params.copy_for_choice(2, seed=-3).seed == -1
