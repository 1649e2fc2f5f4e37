from typing import Any

import pytest

from negamax.base.errors import InvalidRequestError
from negamax.evals.suites import SUITES, Problem, extract_answer, load_problems


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_has_the_announced_number_of_problems(suite: str) -> None:
    problems = load_problems(suite, SUITES[suite])
    assert len({str(each) for each in problems}) == len(problems) == SUITES[suite]
    assert all(each.messages[-1]["role"] == "user" for each in problems)


def test_seed_zero_takes_the_first_problems_and_others_a_sample() -> None:
    first = load_problems("nano-tools", 20)
    assert first == load_problems("nano-tools", 30)[:20]
    drawn = load_problems("nano-tools", 20, seed=3)
    assert drawn == load_problems("nano-tools", 20, seed=3) != first


@pytest.mark.parametrize(("suite", "count"), [("nano-algebra", 1), ("nano-math", 1001)])
def test_unknown_suites_and_too_many_problems_are_refused(suite: str, count: int) -> None:
    with pytest.raises(InvalidRequestError, match=suite):
        load_problems(suite, count)


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ("It is 12.", 12), ("1,234 pens", 1234), ("3 and then 4.00 dollars", 4), ("-7", -7),
        ("$56.", 56), ("none", None),
    ],
)  # fmt: skip
def test_the_last_integer_of_the_answer_counts(content: str, answer: int | None) -> None:
    assert extract_answer(content) == answer


@pytest.mark.parametrize(
    ("calls", "is_solved"),
    [
        ([("f", {"ok": True, "n": 1}), ("g", {})], True),
        ([("g", {}), ("f", {"n": 1, "ok": True})], False),
        ([("f", {"n": 1, "ok": True})], False),
        ([("f", {"n": "1", "ok": True}), ("g", {})], False),
        ([("f", {"n": True, "ok": True}), ("g", {})], False),
        ([("f", {"n": 1, "ok": True, "x": 2}), ("g", {})], False),
        ([("h", {"n": 1, "ok": True}), ("g", {})], False),
    ],
)
def test_calls_must_match(calls: list[tuple[str, dict[str, Any]]], is_solved: bool) -> None:
    expected = [{"name": "f", "arguments": {"n": 1, "ok": True}}, {"name": "g", "arguments": {}}]
    assert Problem("nano-tools", [], calls=expected).is_solved_by("", calls) is is_solved


def test_a_retrieved_value_must_be_a_word_of_a_short_answer() -> None:
    problem = Problem("nano-retrieval-2k", [], answer="4711")
    assert problem.is_solved_by("The code of the blue box is 4711.", [])
    assert not problem.is_solved_by("It is 47110.", [])
    assert not problem.is_solved_by("It is 4711." + " So it is." * 30, [])
    assert not problem.is_solved_by("It is 4711.", [("f", {})])
