"""The problem generators of the nano suites: exact answers, valid schemas, fixed seeds, a split
kept from training.
"""

from __future__ import annotations

import ast
import itertools
import json
import operator
import random
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from negamax.evals import nano_common, nano_math, nano_retrieval, nano_tools

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "nano"
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list}


def _calculate(node: ast.AST) -> Fraction:
    """An arithmetic expression in exact fractions."""
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](_calculate(node.left), _calculate(node.right))
    assert isinstance(node, ast.Constant)
    return Fraction(node.value)


@pytest.fixture(scope="module")
def dialogue():
    sys.path.insert(0, str(TOOLS))
    try:
        import data
        import dialogue

        yield dialogue, data
    finally:
        sys.path.remove(str(TOOLS))


def test_steps_lead_to_the_answer_and_use_earlier_results() -> None:
    for seed in range(300):
        problem = nano_math.generate(seed)
        results: list[int] = []
        for step in problem.steps:
            exact = (
                abs(step.left - step.right)
                if step.operator == "~"
                else _calculate(
                    ast.parse(f"{step.left}{step.operator}{step.right}", mode="eval").body
                )
            )
            assert exact == step.result > 0
            results.append(step.result)
        assert results[-1] == problem.answer <= nano_math.MAX_RESULT
        if len(results) > 1:
            used = {number for step in problem.steps for number in (step.left, step.right)}
            assert used & set(results[:-1])
        assert nano_math.grade(problem, problem.sentence)


def test_bare_calculations_agree_with_python_arithmetic() -> None:
    """An evaluation that knows nothing of the templates: take the expression out of the question
    and compute it.
    """
    checked = 0
    for seed in range(4000):
        problem = nano_math.generate(seed)
        expression = problem.text.removeprefix("What is ").removeprefix("Calculate ").rstrip("?=. ")
        if set(expression) <= set("0123456789+-*/() "):
            assert _calculate(ast.parse(expression, mode="eval").body) == problem.answer
            checked += 1
    assert checked > 100


def test_numbers_of_the_question_are_the_operands_of_the_steps() -> None:
    for seed in range(300):
        problem = nano_math.generate(seed)
        written = {
            int("".join(c for c in word if c.isdigit()))
            for word in problem.text.replace("+", " ").split()
            if any(c.isdigit() for c in word) and word.strip("$.,?!").isdigit()
        }
        known = {number for step in problem.steps for number in (step.left, step.right)} | {
            step.result for step in problem.steps
        }
        unused = written - known
        assert len(unused) <= 1, problem.text  # at most one number is there to distract


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ("It is 12.", 12),
        ("1,234 pens", 1234),
        ("3 and then 4.00 dollars", 4),
        ("-7", -7),
        ("$56.", 56),
        ("none", None),
    ],
)
def test_last_integer_of_the_answer_counts(content: str, answer: int | None) -> None:
    assert nano_math.extract_answer(content) == answer


def test_seeds_are_reproducible_and_pinned() -> None:
    assert nano_math.generate(7) == nano_math.generate(7)
    assert nano_tools.generate(7) == nano_tools.generate(7)
    assert (
        nano_math.generate(1).text
        == "A zoo has 45 seats and 38 are taken. How many seats are free?"
    )
    assert nano_tools.generate(3).calls == (
        nano_tools.Call("shell", {"line": "tail -n 66 process_branch61.pdf"}),
    )


def test_suites_are_distinct_and_held_out() -> None:
    math, tools = nano_math.problems(60, seed=3), nano_tools.problems(40, seed=3)
    assert (
        len({nano_common.normalise(problem.text) for problem in math})
        == 60
        == sum(map(nano_math.held_out, math))
    )
    assert len(tools) == 40 == sum(map(nano_tools.held_out, tools))


def test_one_sixteenth_is_held_out() -> None:
    share = sum(nano_math.held_out(nano_math.generate(seed)) for seed in range(6000)) / 6000
    assert abs(share - 1 / 16) < 0.012


def test_schemas_fit_the_expected_arguments() -> None:
    for seed in range(300):
        problem = nano_tools.generate(seed)
        functions = {tool["function"]["name"]: tool["function"] for tool in problem.tools}
        assert len(functions) == len(problem.tools) <= 4
        for call in problem.calls:
            parameters = functions[call.name]["parameters"]
            assert (
                set(parameters.get("required", ()))
                <= set(call.arguments)
                <= set(parameters["properties"])
            )
            for name, value in call.arguments.items():
                schema = parameters["properties"][name]
                assert isinstance(value, TYPES[schema["type"]])
                assert isinstance(value, bool) == (schema["type"] == "boolean")
                assert value in schema.get("enum", [value])
                if schema["type"] == "array":
                    assert value and all(
                        isinstance(item, TYPES[schema["items"]["type"]]) for item in value
                    )
        assert json.loads(json.dumps(problem.tools)) == list(problem.tools)


def test_string_values_stand_in_the_request() -> None:
    for seed in range(300):
        problem = nano_tools.generate(seed)
        for call in problem.calls:
            for value in call.arguments.values():
                for item in value if isinstance(value, list) else [value]:
                    assert isinstance(item, bool) or str(item) in problem.text


def test_grading_is_strict_about_names_order_values_and_types() -> None:
    problem = nano_tools.ToolProblem(
        (), (), (nano_tools.Call("f", {"n": 1, "ok": True}), nano_tools.Call("g", {}))
    )
    assert nano_tools.grade(problem, [("f", {"ok": True, "n": 1}), ("g", {})])
    for wrong in (
        [("g", {}), ("f", {"n": 1, "ok": True})],
        [("f", {"n": 1, "ok": True})],
        [("f", {"n": "1", "ok": True}), ("g", {})],
        [("f", {"n": True, "ok": True}), ("g", {})],
        [("f", {"n": 1, "ok": True, "x": 2}), ("g", {})],
        [("h", {"n": 1, "ok": True}), ("g", {})],
    ):
        assert not nano_tools.grade(problem, wrong)


def test_training_mixture_never_shows_a_held_out_problem(
    dialogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every problem drawn while the mixture is built is either refused or free for training."""
    turns, data = dialogue
    shown: list[str] = []
    refused = 0
    original = nano_math.held_out

    def watch(problem: nano_math.MathProblem) -> bool:
        nonlocal refused
        refused += original(problem)
        shown.extend([] if original(problem) else [problem.text.lower()])
        return original(problem)

    monkeypatch.setattr(turns.nano_math, "held_out", watch)
    rng = random.Random(11)
    asked = [
        message["content"].lower()
        for _ in range(600)
        for message in data.draw(rng).messages
        if message["role"] == "user"
    ]
    assert refused > 5 and len(shown) > 100
    suite = [nano_common.normalise(problem.text) for problem in nano_math.problems(200, seed=0)]
    assert not set(suite) & {nano_common.normalise(text) for text in asked}


def test_reasoning_shows_only_true_arithmetic(dialogue) -> None:
    turns, _ = dialogue
    checked = 0
    for seed in range(300):
        problem = nano_math.generate(seed)
        lines = turns.reasoning.explain(problem.steps).replace(",", " ").split()
        for word in lines:
            parts = word.split("=")
            if len(parts) > 1 and parts[0] and set(word) <= set("0123456789+-*="):
                # in 4*6=24+4=28 the first product stands before the plus
                for left, right in itertools.pairwise(parts):
                    assert _calculate(ast.parse(left, mode="eval").body) == int(
                        right.partition("+")[0]
                    ), word
                    checked += 1
    assert checked > 500


@pytest.mark.parametrize("length", nano_retrieval.LENGTHS)
def test_retrieval_asks_for_one_thing_that_the_prompt_says_once(length: str) -> None:
    problems = nano_retrieval.problems(length, 30)
    assert problems == nano_retrieval.problems(length, 30)
    assert problems != nano_retrieval.problems(length, 30, seed=1)
    assert {problem.fact is None for problem in problems} == {True, False}
    for problem in problems:
        prompt = "\n".join(message["content"] for message in problem.messages)
        prompt += json.dumps(problem.tools)
        size = nano_retrieval.LENGTHS[length]
        assert 0.8 * size < nano_retrieval.estimated_tokens(prompt) < 1.15 * size
        assert not nano_retrieval.grade(problem, "It is 4711.", [])
        if problem.fact is None:
            (call,) = problem.calls
            declared = [tool["function"]["name"] for tool in problem.tools]
            assert declared.count(call.name) == 1
            assert nano_retrieval.is_request_held_out(problem.messages[-1]["content"])
            assert nano_retrieval.grade(problem, "", [(call.name, call.arguments)])
            assert not nano_retrieval.grade(problem, "", [(call.name, {"a": 1})])
        else:
            assert problem.fact.is_held_out
            assert prompt.count(problem.fact.subject) == 1
            assert nano_retrieval.grade(problem, problem.fact.answer, [])
            assert not nano_retrieval.grade(problem, prompt, [])  # recited, not found


def test_a_fact_is_said_once_and_its_answer_says_nothing_else() -> None:
    for style in ("sentences", "settings"):
        text, facts = nano_retrieval.draw_facts(random.Random(style), 4000, style=style)
        for fact in facts:
            assert text.count(fact.subject) == 1, fact
            assert fact.value in fact.line and fact.value in fact.answer
