"""Seeded arithmetic word problems with exact integer answers: the `nano-math` suite.

A problem has one to three steps of addition, subtraction, multiplication or exact division with
operands of at most 999. One sixteenth of all problems, by a hash of the text, is held out from
training.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nano.suites import common
from nano.suites.arithmetic_templates import BARE, ONE_STEP, PLACES, THREE_STEP, TWO_STEP, Template

Rename = Callable[[dict[str, str], random.Random], None]  # changes the words in place

MAX_OPERAND = 999
MAX_RESULT = 9999
DIVISORS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 15, 20, 25)
_DIVISOR_WEIGHTS = (4, 4, 4, 4, 4, 4, 4, 4, 2, 1, 2, 1, 1, 1)


@dataclass(frozen=True)
class Step:
    """One calculation, `left operator right = result`.

    The operator is one of + - * / ~, where ~ is the absolute difference.
    """

    left: int
    operator: str
    right: int
    result: int
    meaning: str  # what the result counts, such as "apples left"; may be empty


@dataclass(frozen=True)
class MathProblem:
    """A word problem, its exact answer and the calculation that leads to it."""

    messages: tuple[dict[str, Any], ...]  # one user message
    tools: tuple[dict[str, Any], ...]  # always empty here
    answer: int
    steps: tuple[Step, ...]
    sentence: str  # a short answer in which `answer` is the only number

    @property
    def text(self) -> str:
        """Return the question as the user asks it."""
        return str(self.messages[0]["content"])


class _Unlucky(Exception):
    """Raised if the drawn numbers cannot be completed."""


def generate(seed: int) -> MathProblem:
    """Return the problem of this seed, which is equal on all platforms."""
    return draw(random.Random(f"nano-math:{seed}"))


def draw(
    rng: random.Random, *, templates: Sequence[Template] | None = None, rename: Rename | None = None
) -> MathProblem:
    """Draw a problem. Training data may pass its own templates, and `rename` may replace words."""
    family = (
        templates
        or rng.choices((ONE_STEP, TWO_STEP, THREE_STEP, BARE), weights=(30, 30, 22, 18))[0]
    )
    template = rng.choice(family)
    while True:
        try:
            return _fill(template, rng, rename)
        except _Unlucky:
            continue


def held_out(problem: MathProblem) -> bool:
    """Return whether this problem is held out from training."""
    return common.is_held_out("nano-math\n" + common.normalise(problem.text))


def problems(count: int, seed: int = 0) -> list[MathProblem]:
    """Return `count` distinct held-out problems."""
    return common.distinct_problems(
        generate, held_out, lambda problem: common.normalise(problem.text), count=count, seed=seed
    )


def _fill(template: Template, rng: random.Random, rename: Rename | None = None) -> MathProblem:
    question, plan, answer = template
    names = rng.sample(common.NAMES, 3)
    (one, many), (_, others) = rng.sample(common.OBJECTS, 2)
    box, boxes = rng.choice(common.CONTAINERS)
    words = {
        "A": names[0], "B": names[1], "C": names[2], "o": many, "o1": one, "p": others, "x": boxes,
        "x1": box,
        "s": rng.choice(PLACES),
    }  # fmt: skip
    if rename is not None:
        rename(words, rng)
    numbers, calculations = _solve(plan, rng)
    slots: dict[str, object] = {**numbers, **words}  # {x} is the container, not a plan variable x.
    steps = tuple(
        Step(left, operator, right, result, meaning.format(**slots))
        for left, operator, right, result, meaning in calculations
    )
    result = steps[-1].result
    winner = words["A"] if steps[-1].left > steps[-1].right else words["B"]
    if "{W}" in answer and steps[-1].left == steps[-1].right:
        raise _Unlucky
    sentence = answer.format(**{**slots, "r": result, "W": winner})
    text = question.format(**slots)
    return MathProblem(
        ({"role": "user", "content": text},), (), result, steps, sentence[0].upper() + sentence[1:]
    )


_Calculation = tuple[int, str, int, int, str]


def _solve(plan: str, rng: random.Random) -> tuple[dict[str, int], list[_Calculation]]:
    """Draw numbers for the free variables of a plan.

    Every step is exact and positive, and within the range of operands.
    """
    values: dict[str, int] = {}
    calculations: list[_Calculation] = []
    for line in plan.split("; "):
        expression, _, meaning = line.partition("#")
        match = re.fullmatch(r"(\w+)=(\w+)([-+*/~])(\w+)", expression)
        assert match is not None, line
        target, left_name, operator, right_name = match.groups()
        left, right = _operands(
            _known(values, left_name), operator, _known(values, right_name), rng
        )
        values.setdefault(left_name, left)
        values.setdefault(right_name, right)
        result = _apply(left, operator, right)
        values[target] = result
        calculations.append((left, operator, right, result, meaning))
    for free in "abcd":
        # The question mentions these numbers, but no step uses them.
        values.setdefault(free, rng.randint(2, 20))
    return values, calculations


def _known(values: dict[str, int], name: str) -> int | None:
    return int(name) if name.isdigit() else values.get(name)


def _apply(left: int, operator: str, right: int) -> int:
    if operator == "+":
        result = left + right
    elif operator == "*":
        result = left * right
    elif operator == "/":
        if left % right:
            raise _Unlucky
        result = left // right
    else:
        result = abs(left - right) if operator == "~" else left - right
    if not 0 < result <= MAX_RESULT:
        raise _Unlucky
    return result


def _operands(
    left: int | None, operator: str, right: int | None, rng: random.Random
) -> tuple[int, int]:
    if operator in "+~":
        return _any(rng) if left is None else left, _any(rng) if right is None else right
    if operator == "-":
        return _subtraction(left, right, rng)
    if operator == "*":
        return _multiplication(left, right, rng)
    return _division(left, right, rng)


def _any(rng: random.Random) -> int:
    """Draw a number from 2 to 999, with fixed shares of one, two and three digits."""
    low, high = rng.choices(((2, 9), (10, 99), (100, MAX_OPERAND)), weights=(20, 45, 35))[0]
    return rng.randint(low, high)


def _subtraction(left: int | None, right: int | None, rng: random.Random) -> tuple[int, int]:
    if left is None:
        left = _any(rng) if right is None else right + _any(rng)
        if left > MAX_OPERAND:
            raise _Unlucky
    if right is None:
        if left < 3:
            raise _Unlucky
        right = (
            rng.randint(2, min(left - 1, MAX_OPERAND))
            if rng.random() < 0.7
            else rng.randint(2, min(left - 1, 99))
        )
    return left, right


def _multiplication(left: int | None, right: int | None, rng: random.Random) -> tuple[int, int]:
    if left is None and right is None:
        pair = rng.choices(
            ((9, 9), (99, 9), (99, 99), (MAX_OPERAND, 9), (MAX_OPERAND, 99)),
            weights=(15, 30, 30, 15, 10),
        )[0]
        left, right = rng.randint(2, pair[0]), rng.randint(2, pair[1])
        if rng.random() < 0.5:
            left, right = right, left
    else:
        given = left if left is not None else right
        assert given is not None
        if left is None or right is None:
            other = rng.randint(2, 9) if given > 99 or rng.random() < 0.6 else rng.randint(10, 99)
            left, right = (other, given) if left is None else (given, other)
    if min(left, right) > 99 or max(left, right) > MAX_OPERAND:
        raise _Unlucky
    return left, right


def _division(left: int | None, right: int | None, rng: random.Random) -> tuple[int, int]:
    if left is None:
        divisor = rng.choices(DIVISORS, weights=_DIVISOR_WEIGHTS)[0] if right is None else right
        limit = MAX_OPERAND // divisor
        if divisor not in DIVISORS or limit < 2:
            raise _Unlucky
        return divisor * rng.randint(2, limit), divisor
    if right is None:
        divisors = [number for number in DIVISORS if left % number == 0 and left // number > 1]
        if not divisors or left > MAX_OPERAND:
            raise _Unlucky
        return left, rng.choice(divisors)
    if right not in DIVISORS or left > MAX_OPERAND:
        raise _Unlucky
    return left, right
