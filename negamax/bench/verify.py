"""`negamax verify`: compare pass rates with MiniMax's thresholds, and check the protocol."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from negamax.base.errors import ConfigError, NegamaxError
from negamax.bench.serve_client import ServingClient
from negamax.bench.server_probe import CheckFailure, JudgedAnswer, ServerProbe, find_model
from negamax.bench.verify_checks import (
    Case,
    Check,
    CheckSkipped,
    find_leak,
    find_shared_delta,
    find_wrong_call,
    list_checks,
    read_own_cases,
)

MAX_ATTEMPTS = 10  # Maximum attempts per request, as in MiniMax's published suite.
SHOWN_FAILURES = 5  # Maximum failures that the report shows per row.
# `THRESHOLDS`: row -> minimum pass rate in MiniMax's suite; unlisted rows allow no failure.
THRESHOLDS = {"tool calls as expected": 0.97, "schema accuracy": 0.98, "language following": 0.4}
_CASE_FIELDS = ("check_type", "expected_tool_call", "scenario_check")  # fields not sent to servers
_SCHEMA_WORDS = {"type", "description", "required", "additionalProperties", "$schema", "items"}
_CYRILLIC = re.compile("[\u0400-\u04ff]")
_THINK_BLOCK = re.compile(r"<(?:mm:)?think>.*?</(?:mm:)?think>", re.DOTALL)


@dataclass
class VerifyRow:
    """A row of the report: the number of answers or checks, and how many of them passed."""

    name: str
    passed: int = 0
    total: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def threshold(self) -> float:
        return THRESHOLDS.get(self.name, 1.0)

    @property
    def is_met(self) -> bool:
        return self.passed >= self.threshold * self.total

    def as_dict(self) -> dict[str, Any]:
        """Return the row for a JSON file."""
        return asdict(self) | {"threshold": self.threshold, "is_met": self.is_met}

    def add(self, failure: str | None, about: str = "") -> None:
        """Count a result, which is a pass if `failure` is None."""
        self.total += 1
        self.passed += failure is None
        if failure is not None:
            self.failures.append(f"{about}: {failure}" if about else failure)


def is_met(rows: Iterable[VerifyRow]) -> bool:
    return all(row.is_met for row in rows)


def render(rows: Sequence[VerifyRow]) -> str:
    """Return the table of results and the first failures of each row."""
    lines = [f"{'check':24}{'passed':>8}{'of':>6}{'rate':>9}{'needed':>8}  result"]
    for row in rows:
        rate = f"{row.passed / row.total:9.1%}" if row.total else f"{'-':>9}"
        result = "not checked" if not row.total else "met" if row.is_met else "NOT MET"
        counts = f"{row.name:24}{row.passed:8}{row.total:6}"
        lines.append(f"{counts}{rate}{row.threshold:8.0%}  {result}")
    for row in rows:
        lines += [f"{row.name}: {text}" for text in row.failures[:SHOWN_FAILURES]]
        more = len(row.failures) - SHOWN_FAILURES
        lines += [f"{row.name}: {more} more"] if more > 0 else []
    return "\n".join(lines)


def read_suite(file: Path) -> list[Case]:
    """Read a suite: a file with one request body per line. Raises `ConfigError`."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--suite is {str(file)!r}, which cannot be read: {error}") from None
    cases = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            case = json.loads(line)
            messages = [_convert(message) for message in case["messages"]]
            _ = [tool["function"]["name"] for tool in case.get("tools") or ()]
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            hint = "write one JSON request body per line"
            refusal = f"line {number} of {file} is not a chat request with messages and tools"
            raise ConfigError(refusal, hint=hint) from None
        body = {name: case[name] for name in case if name not in (*_CASE_FIELDS, "model")}
        cases.append(case | {"body": body | {"messages": messages}})
    if not cases:
        raise ConfigError(f"--suite {file} has no cases")
    return cases


async def verify(
    client: ServingClient,
    *,
    model: str | None,
    thinking: str,
    suite: Path | None,
    concurrency: int,
    timeout: float,
    repeat: int,
) -> list[VerifyRow]:
    """Verify a server with the cases of `suite`, or with bundled cases if `suite` is None.

    `timeout` is in seconds per request. Raises `ConfigError` for an invalid suite, and
    `NegamaxError` if the server answers no chat request.
    """
    own = read_own_cases()
    rated = [case for case in own if "group" not in case] if suite is None else read_suite(suite)
    try:
        probe = ServerProbe(client, model or await find_model(client))
        await probe.chat({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8})
    except CheckFailure as failure:
        raise NegamaxError(f"{client.url} does not answer chat requests: {failure}") from None
    thinking = _find_thinking(thinking, probe.model)
    checks = list_checks([case for case in own if "group" in case], thinking=thinking)
    verifier = _Verifier(probe, concurrency=concurrency, timeout=timeout, repeat=repeat)
    rows = await verifier.run(rated, [*checks], is_seeded=suite is None)
    client.close()
    return rows


class _Verifier:
    """One run of `verify`. Tasks of one event loop add results to the rows."""

    def __init__(
        self, probe: ServerProbe, *, concurrency: int, timeout: float, repeat: int
    ) -> None:
        """Send `concurrency` requests at a time, in `repeat` rounds. `timeout` is in seconds."""
        self._probe, self._timeout, self._repeat = probe, timeout, repeat
        self._slots = asyncio.Semaphore(concurrency)
        self._rows: dict[str, VerifyRow] = {}
        for name in ("requests answered", *THRESHOLDS, "not only reasoning"):
            self._row(name)

    def _row(self, name: str) -> VerifyRow:
        return self._rows.setdefault(name, VerifyRow(name))

    async def run(
        self, rated: Sequence[Case], checks: Sequence[tuple[str, str, Check]], *, is_seeded: bool
    ) -> list[VerifyRow]:
        for group, _, _ in checks:
            self._row(group)
        async with asyncio.TaskGroup() as tasks:
            for seed in range(self._repeat):
                for number, case in enumerate(rated, 1):
                    body = case["body"] | ({"seed": seed} if is_seeded else {})
                    tasks.create_task(self._limit(self._judge, f"case {number}", case, body))
                for check in checks:
                    tasks.create_task(self._limit(self._check, *check))
        for answer in self._probe.answers:
            is_empty = answer.is_reasoning_only
            missing = "the answer has neither content nor a call" if is_empty else None
            self._row("not only reasoning").add(missing)
            self._row("clean content").add(find_leak(answer))
            if answer.events:
                self._row("separate deltas").add(find_shared_delta(answer))
        return [*self._rows.values()]

    async def _limit(self, action: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        async with self._slots:
            await action(*arguments)

    async def _check(self, group: str, name: str, check: Check) -> None:
        try:
            await check(self._probe)
        except CheckFailure as failure:
            self._row(group).add(str(failure), name)
        except CheckSkipped:
            pass
        else:
            self._row(group).add(None)

    async def _judge(self, about: str, case: Case, body: Case) -> None:
        """Send a case. Add the result to the rows of the report that the case's fields select."""
        answer, failure = await self._ask(body)
        self._row("requests answered").add(failure, about)
        reason = answer and answer.finish_reason
        if isinstance(expected := case.get("expected_tool_call"), bool):
            needed = "tool_calls" if expected else "stop"
            wrong = None if reason == needed else f"finish_reason {reason!r}, expected {needed!r}"
            self._row("tool calls as expected").add(failure or wrong, about)
        if answer is None:
            return
        if reason == "tool_calls":
            self._row("schema accuracy").add(find_wrong_call(answer, body.get("tools")), about)
        kinds, text = case.get("check_type") or (), _THINK_BLOCK.sub("", answer.content).strip()
        if "contains_russian_characters_unicode" in kinds and text:
            is_other = _CYRILLIC.search(text)
            wrong = f"other script: {text[:60]!r}" if is_other else None
            self._row("language following").add(wrong, about)
        if "scenario_check" in kinds and text and body.get("tools"):
            parameters = body["tools"][0]["function"].get("parameters") or {}
            self._row("scenario").add(_find_wrong_order(text, parameters), about)
        if "silence_output" in kinds:
            wrong = None if text.endswith("]") else f"content ends with {text[-60:]!r}"
            self._row("silence").add(wrong, about)

    async def _ask(self, body: Case) -> tuple[JudgedAnswer | None, str | None]:
        """Send `body` up to `MAX_ATTEMPTS` times within the timeout. Return (answer, failure)."""
        deadline = time.monotonic() + self._timeout
        for attempt in range(MAX_ATTEMPTS):
            try:
                return await self._probe.chat(body), None
            except CheckFailure as error:
                failure = error
            is_final = 400 <= failure.status < 500 and failure.status != 429
            wait = min(0.1 * 2**attempt, 5.0)
            if is_final or time.monotonic() + wait > deadline:
                break
            await asyncio.sleep(wait)
        return None, str(failure)


def _find_thinking(option: str, model: str) -> str:
    """Return the model's thinking: switchable (M3), forced (M3.1, M3-a) or any (other models)."""
    if option != "auto":
        return option
    name = model.lower()
    return "forced" if re.search(r"m3(\.1|-a\b)", name) else "switchable" if "m3" in name else "any"


def _convert(message: Any) -> Any:
    """Convert a case file's message to the API's format: rename its role and reasoning fields."""
    found = dict(message)
    found["role"] = "system" if message["role"] == "_input" else message["role"]
    texts = [found.pop(name, None) for name in ("reasoning", "reason")]
    if isinstance(details := found.pop("reasoning_detail", None), list):
        texts.append("\n".join(one["text"] for one in details if one.get("text")))
    if text := next(filter(None, texts), None):
        found.setdefault("reasoning_content", text)
    return found


def _find_wrong_order(text: str, parameters: Mapping[str, Any]) -> str | None:
    """Return a message unless `text` names only the first n > 1 declared parameters, in order."""
    keys = parameters.get("properties") or parameters.keys() - _SCHEMA_WORDS
    declared = [key for key in parameters.get("properties", parameters) if key in keys]
    named = sorted((key for key in declared if key in text), key=text.index)
    if len(named) > 1 and named == declared[: len(named)]:
        return None
    return f"named {', '.join(named) or 'nothing'}; declared: {', '.join(declared)}"
