"""The live day: agent sessions with the built-in model, whose own answers form the history.

Requests force calls in several ways, with strict tools. Each call must follow its schema. The
previous prompt must be cached completely.
"""

import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from negamax.bench.agent_sessions import AgentSessions
from negamax.bench.serve_client import ResponseReader, ResponseRecord, ServingClient
from negamax.bench.serve_options import CHAT, BenchOptions
from negamax.bench.serve_workloads import Session, TextScale, TurnResponse
from negamax.checkpoint.hub import resolve_model
from tools.load.server import Server, serving
from tools.replay.script import Call

BLOCK_SIZE = 16
THINKING_TOKENS = 24  # length of an answer's thinking, which then ends
HANG_UP_SHARE = 0.05
MAX_PROBLEMS = 10
_LIMITS: dict[str, dict[str, Any]] = {  # With these limits a call ends before its limit of tokens.
    "string": {"maxLength": 40},
    "integer": {"minimum": 1, "maximum": 9999},
    "array": {"maxItems": 3},
}
_CHOICES: tuple[dict[str, Any], ...] = (
    {"tool_choice": "required"},
    {"tool_choice": "required", "parallel_tool_calls": False},
    {"tool_choice": {"type": "function", "function": {"name": "edit_file"}}},
    {"tool_choice": {"type": "function", "function": {"name": "run_tests"}}},
    {"tool_choice": "auto", "parallel_tool_calls": False},
)


@dataclass(frozen=True)
class LiveSize:
    """Limit the size of a day. Lengths are in tokens."""

    sessions: int
    turns: int
    context_length: int
    system_len: int
    result_len: int
    output_len: int

    @classmethod
    def full(cls, sessions: int) -> "LiveSize":
        return cls(sessions, 20, 16_384, system_len=1500, result_len=200, output_len=256)

    @classmethod
    def small(cls, sessions: int) -> "LiveSize":
        return cls(sessions, 3, 8_192, system_len=100, result_len=60, output_len=160)


@dataclass
class _Tally:
    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    longest_prompt: int = 0  # tokens


@dataclass
class _LivePlayer:
    _name: str
    _session: Session
    _client: ServingClient
    _tally: _Tally
    _rng: random.Random
    _previous: ResponseRecord | None = None  # the last turn if its prompt must be cached, or None

    async def play(self) -> None:
        """Play every turn until the first failure."""
        turns = self._session.start()
        turn = next(turns)
        while True:
            choice = self._rng.choice(_CHOICES)
            tools = [_strict(tool) for tool in turn.body["tools"]]
            body = turn.body | choice | {"tools": tools, "thinking_token_budget": THINKING_TOKENS}
            reader = await self._ask(body)
            problems = self._problems(body, reader, tools)
            self._count(reader)
            where = f"{self._name}, turn {self._tally.counts[self._name]}"
            self._tally.problems += [f"{where}: {problem}" for problem in problems]
            if problems:
                return
            calls = (reader.message or {}).get("tool_calls")
            is_whole = calls and reader.record.finish_reason != "length"
            self._previous = reader.record if is_whole else None
            if calls and reader.record.finish_reason == "stop":  # A forced call stops.
                reader.record.finish_reason = "tool_calls"
            try:
                turn = turns.send(TurnResponse(reader.record, reader.message))
            except StopIteration:
                return

    async def _ask(self, body: dict[str, Any]) -> ResponseReader:
        common = {"model": "nano", "stream": True, "stream_options": {"include_usage": True}}
        sent = json.dumps(body | common).encode()
        if self._rng.random() < HANG_UP_SHARE:
            reader = ResponseReader(ResponseRecord(0), collect=True)
            work = asyncio.ensure_future(self._client.stream(CHAT, sent, reader))
            await asyncio.wait({work}, timeout=self._rng.random())
            self._tally.counts["hung up"] += work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        reader = ResponseReader(ResponseRecord(0), collect=True)
        await self._client.stream(CHAT, sent, reader)
        return reader

    def _problems(
        self, body: dict[str, Any], reader: ResponseReader, tools: list[dict[str, Any]]
    ) -> list[str]:
        record, message = reader.record, reader.message or {}
        if record.error is not None:
            return [f"{record.error}: {record.detail}"]
        calls = message.get("tool_calls", [])
        problems = []
        if record.finish_reason != "length":
            problems += _call_problems(calls, body["tool_choice"], tools)
            ends = "tool_calls" if calls and isinstance(body["tool_choice"], str) else "stop"
            if record.finish_reason != ends:
                reasons = f"{record.finish_reason!r} instead of {ends!r}"
                problems.append(f"finish_reason {reasons} with {len(calls)} calls")
        else:
            problems += [text for call in calls for text in _json_problems(call)]
        if len(calls) > 1 and body.get("parallel_tool_calls") is False:
            problems.append(f"{len(calls)} calls without parallel_tool_calls")
        if self._previous is not None:
            known = (self._previous.prompt_tokens or 0) // BLOCK_SIZE * BLOCK_SIZE
            if (record.cached_tokens or 0) < known:
                cached = f"{record.cached_tokens} tokens were cached"
                problems.append(f"{cached}; {known} of the last prompt must be")
        return problems

    def _count(self, reader: ResponseReader) -> None:
        record, message = reader.record, reader.message or {}
        prompt = record.prompt_tokens or 0
        self._tally.longest_prompt = max(self._tally.longest_prompt, prompt)
        self._tally.counts.update(
            {
                "turns": 1,
                self._name: 1,
                "calls": len(message.get("tool_calls", [])),
                "truncated": record.finish_reason == "length",
                "thinking": bool(message.get("reasoning_content")),
                "prompt tokens": prompt,
                "cached tokens": record.cached_tokens or 0,
                "output tokens": record.output_tokens or 0,
                "in loops": self._previous is not None,
            }
        )


def _strict(tool: dict[str, Any]) -> dict[str, Any]:
    """Return `tool` with a strict schema and with limits."""
    function = tool["function"]
    properties = {
        name: schema | _LIMITS.get(schema["type"], {})
        for name, schema in function["parameters"]["properties"].items()
    }
    for schema in properties.values():
        if "items" in schema:
            schema["items"] = schema["items"] | _LIMITS["string"]
    parameters = function["parameters"] | {"properties": properties, "additionalProperties": False}
    return {"type": "function", "function": function | {"parameters": parameters, "strict": True}}


def _call_problems(
    calls: list[dict[str, Any]], choice: Any, tools: list[dict[str, Any]]
) -> list[str]:
    if not calls:
        return [] if choice == "auto" else [f"no call, although tool_choice is {choice}"]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    problems = []
    for call in calls:
        name = call["function"]["name"]
        if name not in schemas or (isinstance(choice, dict) and name != choice["function"]["name"]):
            problems.append(f"a call of {name!r} with tool_choice {choice}")
            continue
        problems += _json_problems(call)
        if not problems:
            made = Call(name, json.loads(call["function"]["arguments"]))
            problems += [f"{name}: {text}" for text in violations(made.arguments, schemas[name])]
    if len({call["id"] for call in calls}) < len(calls):
        problems.append("two calls have one id")
    return problems


def _json_problems(call: dict[str, Any]) -> list[str]:
    arguments = call["function"]["arguments"]
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except ValueError as error:
        return [f"arguments are no JSON: {error}: {arguments[:200]!r}"]
    return [] if is_object else [f"arguments are no object: {arguments[:200]!r}"]


_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}


def violations(value: Any, schema: dict[str, Any], *, place: str = "arguments") -> list[str]:
    """List how a value violates a schema. U+FFFD (an invalid byte) counts as no character."""
    kind = schema["type"]
    if not isinstance(value, _TYPES[kind]) or isinstance(value, bool) != (kind == "boolean"):
        return [f"{place} is {value!r}, not of type {kind}"]
    found, size = [], value
    if kind == "object":
        properties = schema["properties"]
        found += [f"{place}.{name} is missing" for name in schema["required"] if name not in value]
        for name, item in value.items():
            if name in properties:
                found += violations(item, properties[name], place=f"{place}.{name}")
            else:
                found.append(f"{place}.{name} is not in the schema")
    elif kind == "array":
        size = len(value)
        for index, item in enumerate(value):
            found += violations(item, schema["items"], place=f"{place}[{index}]")
    elif kind == "string":
        size = len(value.replace("\ufffd", ""))
    for keyword, is_over in (("maxLength", 1), ("maxItems", 1), ("maximum", 1), ("minimum", -1)):
        if keyword in schema and (size - schema[keyword]) * is_over > 0:
            found.append(f"{place} is {value!r}; {keyword} is {schema[keyword]}")
    return found


def _widened(folder: Path, *, context_length: int) -> Path:
    """Make the built-in model accept a longer context than it was trained for."""
    nano = resolve_model("nano")
    for file in nano.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((nano / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = context_length
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


async def _play_day(
    server: Server, size: LiveSize, *, seed: int
) -> tuple[_Tally, dict[str, float]]:
    names = ("turns", "system_len", "result_len", "output_len")
    sizes = {f"agent_{name}": getattr(size, name) for name in names}
    live = {"dataset_name": "agent", "agent_history": "live", "agent_tools": 8}
    options = BenchOptions(seed=seed, **live, **sizes)
    scale = TextScale(tokens_per_char=0.45, overhead=200)
    sessions = AgentSessions(options, scale=scale, context_length=size.context_length)
    client = ServingClient(f"http://{server.host}:{server.port}", headers={}, timeout=300.0)
    tally = _Tally()
    players = []
    for number in range(size.sessions):
        rng, name = random.Random(seed + number), f"session-{number}"
        players.append(_LivePlayer(name, sessions.session(), client, tally, rng))
    await asyncio.gather(*(player.play() for player in players))
    client.close()
    return tally, await server.leftovers()


def live_day(*, size: LiveSize, seed: int) -> dict[str, Any]:
    """Return the report, whose list `problems` is empty if all checks pass."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="replay-") as name:
        model = _widened(Path(name), context_length=size.context_length)
        with serving("--served-model-name", "nano", model=str(model)) as server:
            tally, held = asyncio.run(_play_day(server, size, seed=seed))
            problems = tally.problems[:MAX_PROBLEMS] + server.log_problems()[:MAX_PROBLEMS]
    if held:
        problems.append(f"held at the end: {held}")
    counts = tally.counts
    return {
        "sessions": f"{size.sessions} at once",
        **{name: counts[name] for name in ("turns", "calls", "prompt tokens", "output tokens")},
        "answers with thinking": counts["thinking"],
        "truncated answers": counts["truncated"],
        "longest prompt, tokens": tally.longest_prompt,
        "of prompts cached": f"{counts['cached tokens'] / max(1, counts['prompt tokens']):.1%}",
        "prompts found again whole": counts["in loops"],
        "hung up and asked again": counts["hung up"],
        "seconds": time.monotonic() - started,
        "problems": problems,
    }
