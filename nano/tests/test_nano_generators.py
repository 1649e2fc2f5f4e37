import itertools
import json
import random

import pytest

from nano import data, dialogue, reasoning
from nano.suites import arithmetic, common, freeze, retrieval, tool_calls, vision
from negamax.evals import suites

TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list}


def test_steps_lead_to_the_answer_and_use_earlier_results() -> None:
    for seed in range(300):
        problem = arithmetic.generate(seed)
        results: list[int] = []
        for step in problem.steps:
            exact = (
                abs(step.left - step.right)
                if step.operator == "~"
                else eval(f"{step.left}{step.operator}{step.right}")
            )
            assert exact == step.result > 0
            results.append(step.result)
        assert results[-1] == problem.answer <= arithmetic.MAX_RESULT
        if len(results) > 1:
            used = {number for step in problem.steps for number in (step.left, step.right)}
            assert used & set(results[:-1])
        assert suites.extract_answer(problem.sentence) == problem.answer


def test_bare_calculations_agree_with_python_arithmetic() -> None:
    checked = 0
    for seed in range(4000):
        problem = arithmetic.generate(seed)
        expression = problem.text.removeprefix("What is ").removeprefix("Calculate ").rstrip("?=. ")
        if set(expression) <= set("0123456789+-*/() "):
            assert eval(expression) == problem.answer
            checked += 1
    assert checked > 100


def test_numbers_of_the_question_are_the_operands_of_the_steps() -> None:
    for seed in range(300):
        problem = arithmetic.generate(seed)
        words = (word.strip("$.,?!") for word in problem.text.replace("+", " ").split())
        written = {int(word) for word in words if word.isdigit()}
        steps = problem.steps
        used = {number for step in steps for number in (step.left, step.right, step.result)}
        assert len(written - used) <= 1, problem.text  # a distractor


def test_suites_are_distinct_and_held_out() -> None:
    math, tools = arithmetic.problems(60, seed=3), tool_calls.problems(40, seed=3)
    assert len({common.normalise(problem.text) for problem in math}) == 60
    assert all(map(arithmetic.held_out, math))
    assert len(tools) == 40 and all(map(tool_calls.held_out, tools))


def test_one_sixteenth_is_held_out() -> None:
    share = sum(arithmetic.held_out(arithmetic.generate(seed)) for seed in range(6000)) / 6000
    assert abs(share - 1 / 16) < 0.012


def test_schemas_fit_the_expected_arguments() -> None:
    for seed in range(300):
        problem = tool_calls.generate(seed)
        functions = {tool["function"]["name"]: tool["function"] for tool in problem.tools}
        assert len(functions) == len(problem.tools) <= 4
        for call in problem.calls:
            parameters = functions[call.name]["parameters"]
            required = set(parameters.get("required", ()))
            assert required <= set(call.arguments) <= set(parameters["properties"])
            for name, value in call.arguments.items():
                schema = parameters["properties"][name]
                assert isinstance(value, bool) == (schema["type"] == "boolean")
                assert value in schema.get("enum", [value])
                items = value if schema["type"] == "array" else [value]
                kind = schema["items"]["type"] if schema["type"] == "array" else schema["type"]
                assert items and all(isinstance(item, TYPES[kind]) for item in items)
                # The request contains the values of all strings.
                assert all(isinstance(item, bool) or str(item) in problem.text for item in items)
        assert json.loads(json.dumps(problem.tools)) == list(problem.tools)


def test_training_mixture_never_shows_a_held_out_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    refused = 0
    original = arithmetic.held_out

    def watch(problem: arithmetic.MathProblem) -> bool:
        nonlocal refused
        refused += original(problem)
        shown.extend([] if original(problem) else [problem.text.lower()])
        return original(problem)

    monkeypatch.setattr(dialogue.arithmetic, "held_out", watch)
    rng = random.Random(11)
    asked = [
        message["content"].lower()
        for _ in range(600)
        for message in data.draw(rng).messages
        if message["role"] == "user"
    ]
    assert refused > 5 and len(shown) > 100
    suite = [common.normalise(problem.text) for problem in arithmetic.problems(200, seed=0)]
    assert not set(suite) & {common.normalise(text) for text in asked}


def test_reasoning_shows_only_true_arithmetic() -> None:
    checked = 0
    for seed in range(300):
        problem = arithmetic.generate(seed)
        lines = reasoning.explain(problem.steps).replace(",", " ").split()
        for word in lines:
            parts = word.split("=")
            if len(parts) > 1 and parts[0] and set(word) <= set("0123456789+-*="):
                # In 4*6=24+4=28 the first product is before the plus.
                for left, right in itertools.pairwise(parts):
                    assert eval(left) == int(right.partition("+")[0]), word
                    checked += 1
    assert checked > 500


@pytest.mark.parametrize("length", retrieval.LENGTHS)
def test_retrieval_asks_for_one_thing_that_the_prompt_says_once(length: str) -> None:
    problems = retrieval.problems(length, 30)
    assert problems == retrieval.problems(length, 30)
    assert problems != retrieval.problems(length, 30, seed=1)
    assert {problem.fact is None for problem in problems} == {True, False}
    for problem in problems:
        prompt = "\n".join(message["content"] for message in problem.messages)
        prompt += json.dumps(problem.tools)
        size = retrieval.LENGTHS[length]
        assert 0.8 * size < retrieval.estimated_tokens(prompt) < 1.15 * size
        if problem.fact is None:
            (call,) = problem.calls
            declared = [tool["function"]["name"] for tool in problem.tools]
            assert declared.count(call.name) == 1
            assert retrieval.is_request_held_out(problem.messages[-1]["content"])
        else:
            assert problem.fact.is_held_out
            assert prompt.count(problem.fact.subject) == 1


def test_a_fact_is_said_once_and_its_answer_says_nothing_else() -> None:
    for style in ("sentences", "settings"):
        text, facts = retrieval.draw_facts(random.Random(style), 4000, style=style)
        for fact in facts:
            assert text.count(fact.subject) == 1, fact
            assert fact.value in fact.line and fact.value in fact.answer


@pytest.mark.parametrize("suite", suites.SUITES)
def test_generators_draw_the_frozen_problems(suite: str) -> None:
    if suite == "nano-vision" and not vision.HELD_OUT_FOLDER.exists():
        pytest.skip("the fonts of the suite are not installed")
    drawn = freeze.draw_problems(suite, 8)
    frozen = suites.load_problems(suite, 8)
    if suite == "nano-vision":  # The bytes of images depend on the versions of libraries.
        for problem, made in zip(frozen, drawn, strict=True):
            for part in (problem.messages[0]["content"][0], made["messages"][0]["content"][0]):
                part["image_url"]["url"] = ""
    assert [suites.Problem(suite, **json.loads(json.dumps(each))) for each in drawn] == frozen
