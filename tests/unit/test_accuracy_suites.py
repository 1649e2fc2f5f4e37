import json
from pathlib import Path
from typing import Any

import pytest

from negamax.base.errors import ConfigError, InvalidRequestError
from negamax.bench.accuracy_compare import compare, compute_chance
from negamax.evals.suites import SUITES, Problem, extract_answer, load_problems
from tests.tables import read_table


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


@pytest.mark.parametrize(("calls", "is_solved"), read_table("accuracy_suites.calls_must_match"))
def test_calls_must_match(calls: list[tuple[str, dict[str, Any]]], is_solved: bool) -> None:
    expected = [{"name": "f", "arguments": {"n": 1, "ok": True}}, {"name": "g", "arguments": {}}]
    assert Problem("nano-tools", [], calls=expected).is_solved_by("", calls) is is_solved


def test_a_retrieved_value_must_be_a_word_of_a_short_answer() -> None:
    problem = Problem("nano-retrieval-2k", [], answer="4711")
    assert problem.is_solved_by("The code of the blue box is 4711.", [])
    assert not problem.is_solved_by("It is 47110.", [])
    assert not problem.is_solved_by("It is 4711." + " So it is." * 30, [])
    assert not problem.is_solved_by("It is 4711.", [("f", {})])


@pytest.mark.parametrize(
    ("content", "is_solved", "is_formatted"), read_table("accuracy_suites.gsm8k_answers")
)
def test_gsm8k_answers(tmp_path: Path, content: str, is_solved: bool, is_formatted: bool) -> None:
    file = tmp_path / "test.jsonl"
    file.write_text(json.dumps({"question": "How many?", "answer": "5 * 250\n#### 1,250"}) + "\n")
    (problem,) = load_problems("gsm8k", data=file)
    assert problem.messages[-1] == {"role": "user", "content": "How many?"}
    assert problem.is_solved_by(content, []) is is_solved
    assert problem.is_formatted(content) is is_formatted


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no problems"),
        ("[]", "problem 1 is unreadable"),
        ('{"question": "a", "answer": "12"}', "no number follows ####"),
        ('{"question": "a", "answer": "#### .."}', "no number follows ####"),
        (None, "unreadable"),
    ],
)
def test_an_unusable_file_is_refused(tmp_path: Path, text: str | None, reason: str) -> None:
    file = tmp_path / "test.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InvalidRequestError, match=reason):
        load_problems("gsm8k", data=file)


def test_needles_have_the_requested_length_and_depths() -> None:
    problems = load_problems("needle-16k", 5, seed=2, count_tokens=lambda text: len(text) // 4)
    assert problems == load_problems(
        "needle-16k", 5, seed=2, count_tokens=lambda text: len(text) // 4
    )
    depths = []
    for problem in problems:
        text = problem.messages[0]["content"]
        assert 15_000 < len(text) / 4 < 16_384
        assert text.count(f" is {problem.answer}.") == 1 and text.count("The number of the") == 4
        thing = text.rsplit("What is the number of the ", 1)[1].rstrip("?")
        assert f"The number of the {thing} is {problem.answer}." in text
        depths.append(text.index(problem.answer) / len(text))
    assert depths == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9], abs=0.02)


def result(solved: str, **fields: Any) -> list[dict[str, Any]]:
    share = solved.count("1") / len(solved)
    found = {"suite": "gsm8k", "digest": "a", "solved": solved, "problems": len(solved)}
    return [{**found, "accuracy": share, "interval": (0.1, 0.9), **fields}]


def test_results_are_compared_problem_by_problem() -> None:
    files = [Path("a.json"), Path("b.json")]
    same = "\n".join(compare(files, [result("1101" * 5), result("1011" * 5)]))
    assert "5 problems solved only here" in same and "no difference beyond chance" in same
    other = "\n".join(compare(files, [result("1" * 20), result("0" * 9 + "1" * 11)]))
    assert "chance: 0.0039; the results differ" in other
    assert compute_chance(0, 0) == 1.0 and compute_chance(1, 6) == pytest.approx(0.125)
    for wrong in (result("1" * 20, digest="b"), result("1" * 20, suite="nano-math")):
        with pytest.raises(ConfigError, match=r"different problems|no suite in common"):
            list(compare(files, [result("1" * 20), wrong]))
