"""The suites of `negamax bench accuracy`: fixed problems with exact answers."""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from negamax.base.errors import InvalidRequestError

FOLDER = Path(__file__).parent / "problems"
# suite name -> number of problems
SUITES = {"nano-math": 1000, "nano-tools": 500}
SUITES |= dict.fromkeys(("nano-retrieval-2k", "nano-retrieval-4k", "nano-retrieval-8k"), 200)
DEFAULT_SUITES = ("nano-math", "nano-tools")  # Others need up to 8,192 tokens of context.
_MAX_ANSWER_CHARS = 200  # A longer answer is wrong, as it may quote the whole text.

Calls = Sequence[tuple[str, dict[str, Any]]]  # (name, arguments) of each call, in order


@dataclass(frozen=True)
class Problem:
    """A conversation with declared tools, and either the expected answer or expected calls."""

    suite: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    answer: str = ""
    calls: list[dict[str, Any]] | None = None

    @property
    def expected(self) -> str:
        return self.answer if self.calls is None else json.dumps(self.calls, ensure_ascii=False)

    def is_solved_by(self, content: str, calls: Calls) -> bool:
        """Return whether an answer, with its `content` and `calls`, is correct.

        Calls must equal the expected calls in names, order, values and JSON types. In arithmetic,
        the last integer must be the answer. In retrieval, a short text must contain the answer.
        """
        if self.calls is not None:
            expected = [(each["name"], each["arguments"]) for each in self.calls]
            return _canonical(calls) == _canonical(expected)
        if calls:
            return False
        if self.suite == "nano-math":
            return extract_answer(content) == int(self.answer)
        return len(content) <= _MAX_ANSWER_CHARS and self.answer in re.findall(r"\w+", content)


def load_problems(suite: str, count: int, seed: int = 0) -> list[Problem]:
    """Load the first `count` problems of a suite, or a random sample if `seed` is not 0.

    Raises `InvalidRequestError` for an unknown suite, or if the suite has fewer problems.
    """
    if suite not in SUITES:
        raise InvalidRequestError(
            f"no accuracy suite is called {suite!r}; known: {', '.join(SUITES)}", param="suite"
        )
    if count > SUITES[suite]:
        raise InvalidRequestError(
            f"{count} problems of {suite} requested; the suite has {SUITES[suite]}", param="count"
        )
    import lzma  # some builds of Python lack this module

    with lzma.open(FOLDER / f"{suite}.jsonl.xz", "rt", encoding="utf-8") as file:
        found = [Problem(suite, **json.loads(line)) for line in file]
    return random.Random(seed).sample(found, count) if seed else found[:count]


def extract_answer(content: str) -> int | None:
    """Return the last integer of a text, or None. The integer may have thousands separators."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.0+(?!\d))?", content)
    if not numbers:
        return None
    digits = re.sub(r"\.0+$", "", numbers[-1].rstrip(",")).replace(",", "")
    return int(digits)


def _canonical(calls: Calls) -> list[tuple[str, str]]:
    return [(name, json.dumps(arguments, sort_keys=True)) for name, arguments in calls]
