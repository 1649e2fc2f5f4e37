"""Seeded sessions of a coding agent with a shared system prompt and a growing history.

Answers contain thinking and tool calls. Tool results are excerpts of files. After some turns, an
answer ends the task, and the user sends the next task. Each request contains the whole history.
"""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

from negamax.base.tables import read_table
from negamax.bench.serve_options import BenchOptions
from negamax.bench.serve_workloads import Session, SessionTurn, TextScale, TurnResponse, Turns

STEPS_PER_TASK = (3, 9)  # Fewest and most assistant turns per user message.
RESULT_SPREAD = (0.3, 1.7)  # Shortest and longest tool result, as multiples of the mean length.
TWO_CALLS_SHARE = 0.25

_TEXTS = read_table(__file__)
NOUNS, VERBS = (_TEXTS[kind].split() for kind in ("nouns", "verbs"))


@dataclass(frozen=True)
class _RecordedStep:
    """A recorded assistant turn, followed by the results of its calls or a user question."""

    message: dict[str, Any]
    results: tuple[str, ...]  # Text of each tool result.
    question: str  # Next question of the user, if the turn has no calls.


class AgentSessions:
    """Generates sessions. `scale` converts lengths in tokens to lengths in characters."""

    def __init__(
        self, options: BenchOptions, *, scale: TextScale, context_length: int | None
    ) -> None:
        self._options = options
        self._scale = scale
        self._context_length = context_length
        self._rng = random.Random(options.seed)
        self.tools = [_tool(number) for number in range(options.agent_tools)]
        self.system = _system_prompt(self._rng, scale.chars(options.agent_system_len))

    def __iter__(self) -> Iterator[Session]:
        while True:
            yield self.session()

    def session(self) -> Session:
        """Make the next session with `agent_turns` turns, or with fewer if the context is full."""
        rng = random.Random(self._rng.getrandbits(64))
        opening = _task(rng)
        steps: list[_RecordedStep] = []
        size = self._scale.overhead + self._tokens([self.system, opening, json.dumps(self.tools)])
        left = rng.randint(*STEPS_PER_TASK)
        while len(steps) + 1 < self._options.agent_turns:
            step = self._step(rng, number=len(steps), ends=left == 0)
            left = rng.randint(*STEPS_PER_TASK) if left == 0 else left - 1
            size += self._tokens([json.dumps(step.message), *step.results, step.question])
            limit = math.inf if self._context_length is None else self._context_length
            if 1.1 * size + self._options.agent_output_len > limit:
                break
            steps.append(step)
        live = self._options.agent_history == "live"
        turns = partial(self._turns, opening, steps, live=live)
        return Session(len(steps) + 1, turns, wants_responses=live)

    def _tokens(self, texts: list[str]) -> int:
        return sum(self._scale.tokens(len(text)) for text in texts if text)

    def _turns(self, opening: str, steps: list[_RecordedStep], *, live: bool) -> Turns:
        history = [{"role": "system", "content": self.system}, {"role": "user", "content": opening}]
        answer = yield self._turn(history, pause=0.0)
        for step in steps:
            if live and answer.record.error is not None:
                return  # end the session, because the failed turn has no answer
            history = [*history, *(_live_reply(answer, step) if live else _recorded_reply(step))]
            answer = yield self._turn(history, pause=self._options.agent_pause)

    def _turn(self, history: list[dict[str, Any]], *, pause: float) -> SessionTurn:
        body: dict[str, Any] = {"messages": history, "max_tokens": self._options.agent_output_len}
        return SessionTurn(body | {"tools": self.tools} if self.tools else body, pause=pause)

    def _step(self, rng: random.Random, *, number: int, ends: bool) -> _RecordedStep:
        options, chars = self._options, self._scale.chars
        message: dict[str, Any] = {"role": "assistant", "content": _sentence(rng)}
        if options.agent_reasoning_len:
            message["reasoning_content"] = _prose(rng, chars(options.agent_reasoning_len))
        if ends or not self.tools:
            return _RecordedStep(message, (), _task(rng))
        count = 2 if rng.random() < TWO_CALLS_SHARE else 1
        message["tool_calls"] = [
            _call(rng, f"call_{number:04d}{index}{rng.getrandbits(64):016x}", self.tools)
            for index in range(count)
        ]
        share = options.agent_result_len / count
        sizes = (chars(rng.uniform(*RESULT_SPREAD) * share) for _ in range(count))
        return _RecordedStep(message, tuple(source_code(rng, size) for size in sizes), "")


def _recorded_reply(step: _RecordedStep) -> list[dict[str, Any]]:
    """Return the recorded answer, followed by the results of its tool calls or by a question."""
    if not step.results:
        return [step.message, {"role": "user", "content": step.question}]
    results = zip(step.message["tool_calls"], step.results, strict=True)
    return [step.message, *(_tool_message(call, text) for call, text in results)]


def _tool_message(call: dict[str, Any], text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


def _live_reply(answer: TurnResponse, step: _RecordedStep) -> list[dict[str, Any]]:
    """Return the server's answer, followed by a result for each tool call or by a user message."""
    assert answer.message is not None
    message = dict(answer.message)
    calls = message.get("tool_calls", [])
    # remove calls of a truncated answer, because the server would refuse them in the next prompt
    if answer.record.finish_reason != "tool_calls" or not calls:
        message.pop("tool_calls", None)
        return [message, {"role": "user", "content": step.question or "\n".join(step.results)}]
    results = zip(calls, cycle(step.results or (step.question,)), strict=False)
    return [message, *(_tool_message(call, text) for call, text in results)]


def _tool(number: int) -> dict[str, Any]:
    name, description, fields = _TEXTS["tools"][number % len(_TEXTS["tools"])]
    if number >= len(_TEXTS["tools"]):
        name = f"{name}_{number // len(_TEXTS['tools'])}"
    properties = {
        field: {"type": kind or "string", "description": f"The {field.replace('_', ' ')}."}
        | ({"items": {"type": "string"}} if kind == "array" else {})
        for field, _, kind in (word.partition(":") for word in fields.split())
    }
    schema = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def _call(rng: random.Random, call_id: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
    function = rng.choice(tools)["function"]
    values: dict[str, Any] = {}
    for field, schema in function["parameters"]["properties"].items():
        kind = schema["type"]
        if kind in ("integer", "number"):
            values[field] = rng.randint(1, 200)
        elif kind == "boolean":
            values[field] = rng.random() < 0.5
        elif kind == "array":
            values[field] = [f"{rng.choice(VERBS)} the {rng.choice(NOUNS)}" for _ in range(2)]
        else:
            values[field] = _path(rng) if field in ("path", "folder") else _sentence(rng)
    called = {"name": function["name"], "arguments": json.dumps(values)}
    return {"id": call_id, "type": "function", "function": called}


def _path(rng: random.Random) -> str:
    return f"/src/{rng.choice(NOUNS)}/{rng.choice(VERBS)}_{rng.choice(NOUNS)}.py"


def _sentence(rng: random.Random) -> str:
    return (
        f"I {rng.choice(VERBS)} the {rng.choice(NOUNS)} of the {rng.choice(NOUNS)} first, "
        f"because {_path(rng)} does not {rng.choice(VERBS)} it."
    )


def _task(rng: random.Random) -> str:
    return (
        f"In {_path(rng)}, `{rng.choice(VERBS)}_{rng.choice(NOUNS)}` loses a "
        f"{rng.choice(NOUNS)} when the {rng.choice(NOUNS)} is empty (report "
        f"{rng.randint(1000, 9999)}). Find out why, repair it and add a test."
    )


def _prose(rng: random.Random, num_chars: int) -> str:
    parts: list[str] = []
    while sum(map(len, parts)) + len(parts) < num_chars:
        parts.append(_sentence(rng))
    return " ".join(parts)[:num_chars]


def _system_prompt(rng: random.Random, num_chars: int) -> str:
    work = "You work in the user's repository through tools, step by step, until the task is done."
    lines = [f"You are a coding agent. {work}\n", *(f"- {rule}" for rule in _TEXTS["rules"])]
    size = sum(map(len, lines)) + len(lines)
    while size < num_chars:
        lines.append(f"- When you {rng.choice(VERBS)} a {rng.choice(NOUNS)}: {_sentence(rng)}")
        size += len(lines[-1]) + 1
    return "\n".join(lines)[:num_chars]


def source_code(rng: random.Random, num_chars: int) -> str:
    """Make numbered lines of a Python file with exactly `num_chars` characters."""
    lines: list[str] = []
    size, number = 0, rng.randint(1, 400)
    while size <= num_chars:
        verb, noun, other = rng.choice(VERBS), rng.choice(NOUNS), rng.choice(NOUNS)
        for line in (
            f"def {verb}_{noun}({other}: {other.title()}, *, limit: int = {rng.randint(1, 512)}) "
            f"-> {noun.title()}:",
            f'    """{verb.title()} the {noun} of `{other}`."""',
            f"    found = [item for item in {other}.{noun}s if item.size <= limit]",
            f"    if not found or {other}.is_{rng.choice(NOUNS)}:",
            f'        raise {noun.title()}Error(f"no {noun} in {{{other}!r}}")',
            f"    return {other}.{rng.choice(VERBS)}(found[0], {rng.random():.4f})",
            "",
        ):
            number += 1
            lines.append(f"{number:6d}\t{line}")
            size += len(lines[-1]) + 1
    return "\n".join(lines)[:num_chars]
