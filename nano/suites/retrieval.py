"""Seeded questions about distant text: the `nano-retrieval` suites at 2k, 4k and 8k tokens.

A text holds hundreds of similar facts among other sentences, and the question asks for one fact. In
other problems the request declares many tools and needs one of them. One sixteenth of all
questions, by a hash of question and answer, is held out from training.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import Any

from nano.suites import common, tool_calls

# name -> approximate number of tokens in a prompt
LENGTHS = {"2k": 2_048, "4k": 4_096, "8k": 7_900}
_PIECE = re.compile(r"\d|[^\W\d_]+|_|[^\w\s]+|\n")
_TOKENS_PER_PIECE = 1.12  # tokens of nano's vocabulary per piece of these texts
_TOKENS_PER_TOOL_PIECE = 1.04
_FRAME = 130  # tokens around the text

_SENTENCES = (
    "{p} {v} the {n} near {c}.",
    "The {j} {n} was {w} than the {n2}.",
    "{p} and {p2} talk about the {n}.",
    "In {c} there is a {j} {n} for every {n2}.",
    "Nobody {v} the {j} {n} last week.",
    "It was a {j} day, and {p} {v} the {n2}.",
    "Some say that {c} has the best {n} in the country.",
)
_VERBS = ("saw", "moved", "liked", "lost", "painted", "found", "sold", "kept")
_COMPARED = ("larger", "smaller", "older", "newer", "better", "cheaper")


@dataclass(frozen=True)
class Fact:
    """A fact of a text: its line, a question for it, and the answer."""

    line: str
    question: str
    answer: str
    value: str  # word that each correct answer contains

    @property
    def subject(self) -> str:
        """Return the line without the value, which is unique in a text."""
        return self.line.removesuffix(".").removesuffix(self.value)

    @property
    def is_held_out(self) -> bool:
        """Return whether the fact is held out from training."""
        return common.is_held_out(f"nano-retrieval\n{self.subject}{self.value}")


@dataclass(frozen=True)
class RetrievalProblem:
    """A conversation that ends with a question, and the fact or the calls that answer it."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    fact: Fact | None
    calls: tuple[tool_calls.Call, ...]


def estimated_tokens(text: str, per_piece: float = _TOKENS_PER_PIECE) -> float:
    """Return the approximate number of nano's tokens in a text."""
    return len(_PIECE.findall(text)) * per_piece


def draw_facts(rng: random.Random, tokens: float, *, style: str) -> tuple[str, list[Fact]]:
    """Draw a text of about `tokens` tokens and its facts. Styles: "sentences", "settings"."""
    share = rng.uniform(0.25, 0.9)  # share of lines that are facts
    lines: list[str] = []
    facts: dict[str, Fact] = {}
    while tokens > 0:
        if rng.random() < share or style == "settings":
            fact = _setting(rng) if style == "settings" else _sentence_fact(rng)
            if fact.subject in facts:
                continue
            facts[fact.subject] = fact
            lines.append(fact.line)
        else:
            lines.append(_sentence(rng))
        tokens -= estimated_tokens(lines[-1] + "\n")
    joiner = "\n" if style == "settings" else rng.choice(("\n", " "))
    return joiner.join(lines), list(facts.values())


def draw_tools(rng: random.Random, tokens: float) -> list[tuple[tool_calls.Tool, dict[str, Any]]]:
    """Draw different tools whose declarations have about `tokens` tokens in all."""
    found: dict[str, tuple[tool_calls.Tool, dict[str, Any]]] = {}
    actions: set[str] = set()
    while tokens > 0:
        for tool in tool_calls.draw_tools(rng, 4):
            action = tool.action or tool.requests[0]
            if tool.name in found or action in actions:
                continue
            actions.add(action)
            found[tool.name] = tool, tool_calls.as_json(tool, rng)
            tokens -= estimated_tokens(json.dumps(found[tool.name][1]), _TOKENS_PER_TOOL_PIECE)
            if tokens <= 0:
                break
    return list(found.values())


def generate(length: str, seed: int) -> RetrievalProblem:
    """Return the held-out problem of this seed. `length` is a key of `LENGTHS`."""
    rng = random.Random(f"nano-retrieval:{length}:{seed}")
    tokens = LENGTHS[length] - _FRAME
    kind = rng.choice(("sentences", "settings", "tools"))
    if kind == "tools":
        pairs = draw_tools(rng, tokens - 60)
        composed = [tool for tool, _ in pairs if tool.action and tool.parameters]
        while True:
            text, call = tool_calls._single_request(rng.choice(composed), rng)
            if is_request_held_out(text):
                declared = tuple(shown for _, shown in pairs)
                return RetrievalProblem(_asked(text), declared, None, (call,))
    while True:
        text, facts = draw_facts(rng, tokens, style=kind)
        if held_out := [fact for fact in facts if fact.is_held_out]:
            break
    fact = rng.choice(held_out)
    messages = _asked(f"{text}\n\n{fact.question}")
    if rng.random() < 0.5:
        read = {"role": "assistant", "content": "I have read it."}
        messages = (*_asked(text), read, *_asked(fact.question))
    return RetrievalProblem(messages, (), fact, ())


def problems(length: str, count: int, seed: int = 0) -> list[RetrievalProblem]:
    """Return the first `count` held-out problems of a seed."""
    return [generate(length, seed * 10_000_000 + number) for number in range(count)]


def is_request_held_out(text: str) -> bool:
    """Return whether this request for a call is held out from training."""
    return common.is_held_out(f"nano-retrieval\n{common.normalise(text)}")


def _asked(text: str) -> tuple[dict[str, Any], ...]:
    return ({"role": "user", "content": text},)


def _sentence(rng: random.Random) -> str:
    return rng.choice(_SENTENCES).format(
        p=rng.choice(common.NAMES), p2=rng.choice(common.NAMES), c=rng.choice(common.CITIES),
        n=rng.choice(common.NOUNS), n2=rng.choice(common.NOUNS), j=rng.choice(common.ADJECTIVES),
        v=rng.choice(_VERBS), w=rng.choice(_COMPARED),
    )  # fmt: skip


def _sentence_fact(rng: random.Random) -> Fact:
    thing = f"{rng.choice(common.ADJECTIVES)} {rng.choice(common.NOUNS)}"
    what = rng.choice(("code", "number", "owner", "keeper"))
    number = str(rng.randint(1000, 99999))
    value = number if what in ("code", "number") else rng.choice(common.NAMES)
    said = f"The {what} of the {thing} is {value}."
    question = rng.choice(("What is the {} of the {}?", "Tell me the {} of the {}."))
    if value != number:
        question = "Who is the {} of the {}?"
    return Fact(said, question.format(what, thing), said, value)


def _setting(rng: random.Random) -> Fact:
    name = f"{rng.choice(common.NOUNS)}_{rng.choice(common.NOUNS)}"
    value = str(rng.randint(10, 9999)) if rng.random() < 0.6 else rng.choice(common.ADJECTIVES)
    return Fact(f"{name} = {value}", f"What is {name}?", f"{name} is {value}.", value)
