"""Protocol checks of `negamax verify`, for the requirements of MiniMax's acceptance suite.

A check sends requests and raises `CheckFailure` if an answer violates a requirement. The requests
are simple questions. Most checks are in `verify_cases.toml`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from negamax.base.errors import InvalidRequestError
from negamax.bench.server_probe import (
    ABSENT,
    CheckFailure,
    JudgedAnswer,
    ServerProbe,
    exchange,
    read_object,
)
from negamax.text.grammar.json_schema import Schemas
from negamax.text.parser.schema_values import parse_json

Check = Callable[[ServerProbe], Awaitable[None]]
Case = dict[str, Any]

CASES = Path(__file__).with_name("verify_cases.toml")
REFUSED = (400, 422)
EQUAL_ATTEMPTS = 3  # more than one, because the batch composition changes the last bits of logits
TAGS = (
    "<think>", "</think>", "<mm:think>", "</mm:think>", "<minimax:tool_call>",
    "</minimax:tool_call>", "]<]minimax[>[",
)  # fmt: skip
_GREEDY = {"temperature": 0, "seed": 0, "max_tokens": 2000}
_BRIEF = _GREEDY | {"max_tokens": 8}
_LONG = {"role": "system", "content": "Be brief. " + "Rain falls in the north. " * 80}


class CheckSkipped(Exception):
    """Raised if the server lacks a feature that a check needs."""


def read_own_cases() -> list[Case]:
    """Return the bundled cases. Replace names of messages and tools by their content."""
    document = tomllib.loads(CASES.read_text(encoding="utf-8"))
    functions = {name: {"name": name, **rest} for name, rest in document["tools"].items()}
    cases = []
    for case in document["case"]:
        body = case.pop("body", {})
        body["messages"] = [document["message"][name] for name in case.pop("messages", ["apples"])]
        if names := case.pop("tools", None):
            body["tools"] = [{"type": "function", "function": functions[name]} for name in names]
        ways = {"both": (False, True), "stream": (True,)}.get(case.pop("way", ""), (False,))
        cases += [case | {"body": body | {"stream": is_streamed}} for is_streamed in ways]
    return cases


def list_checks(cases: Iterable[Case], *, thinking: str) -> Iterator[tuple[str, str, Check]]:
    """Yield (group, name, check). `thinking` is switchable, forced or any (both allowed)."""
    bodies = {case["name"]: case["body"] for case in cases}
    for case in cases:
        way = ", stream" if case["body"]["stream"] else ""
        rules = case.get("expect", {})
        limits = _GREEDY if rules else _BRIEF
        ask = partial(_expect, body=limits | case["body"], rules=rules, thinking=thinking)
        yield case["group"], f"{case['name']}{way}", ask
    yield "key order", "prompt", partial(_show_prompt, body=bodies["arguments"])
    yield "usage", "counts", partial(_count, body=_GREEDY | bodies["adaptive"], thinking=thinking)
    yield "usage", "cached tokens", _repeat_prompt
    for name in ("adaptive", "disabled", "required", "no parallel calls"):
        yield "stream equality", name, partial(_compare, body=_GREEDY | bodies[name])


def find_wrong_call(answer: JudgedAnswer, tools: Iterable[Mapping[str, Any]] | None) -> str | None:
    """Return None if all calls follow their schemas, else describe the wrong or missing call."""
    declared = {tool["function"]["name"]: tool["function"] for tool in tools or ()}
    for name, text in answer.calls:
        if name not in declared:
            return f"the answer calls {name[:60]!r}, which is not declared"
        schema = declared[name].get("parameters", {"type": "object"})
        try:
            schemas = Schemas(schema, strict=False, infers=False)
            if not schemas.admits((schema,), parse_json(text)):
                return f"arguments of {name} do not follow its schema: {text[:80]!r}"
        except ValueError:
            return f"arguments of {name} are not JSON: {text[:80]!r}"
        except InvalidRequestError as error:  # the tool's schema is too large
            return f"the schema of {name} cannot be checked: {error}"
    return None if answer.calls else f"no call (finish_reason {answer.finish_reason!r})"


def find_leak(answer: JudgedAnswer) -> str | None:
    """Describe tags of the model's format in the content, or return None without tags."""
    tag = next((tag for tag in TAGS if tag in answer.content), None)
    return tag and f"content has {tag}: {answer.content[:60]!r}"


def find_shared_delta(answer: JudgedAnswer) -> str | None:
    """Describe a delta with content and reasoning, or return None if there is no such delta."""
    for event in answer.events:
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if delta.get("content") and (delta.get("reasoning_content") or delta.get("reasoning")):
                return f"one delta has content and reasoning: {delta['content'][:60]!r}"
    return None


async def _expect(
    probe: ServerProbe, *, body: Case, rules: Mapping[str, Any], thinking: str
) -> None:
    """Send a case, and check the answer by `rules`, the field `expect` of the case."""
    allowed = rules.get("status") or (REFUSED if rules.get("may_refuse") else ())
    try:
        answer = await probe.chat(body)
    except CheckFailure as failure:
        if failure.status in allowed:
            return
        raise
    if "status" in rules:
        words = " or ".join(map(str, allowed))
        raise CheckFailure(f"the request was accepted; expected: status {words}")
    _judge_text(answer, rules, thinking)
    _judge_calls(answer, rules, body.get("tools") or ())
    if rules.get("finish", answer.finish_reason) != answer.finish_reason:
        raise CheckFailure(f"finish_reason is {answer.finish_reason!r}, not {rules['finish']!r}")
    if "output" in rules and (count := answer.count("completion_tokens")) != rules["output"]:
        raise CheckFailure(f"completion_tokens is {count}; the limit is {rules['output']}")


def _judge_text(answer: JudgedAnswer, rules: Mapping[str, Any], thinking: str) -> None:
    if rules.get("content") and not answer.content.strip():
        raise CheckFailure(f"the answer has no content (finish_reason {answer.finish_reason!r})")
    rule = rules.get("reasoning")
    if rule == "off" and thinking == "switchable" and answer.reasoning:
        raise CheckFailure(f"the answer has disabled reasoning: {answer.reasoning[:60]!r}")
    is_needed = rule == "required" or (rule is not None and thinking == "forced")
    if is_needed and not answer.reasoning:
        raise CheckFailure("no reasoning")


def _judge_calls(answer: JudgedAnswer, rules: Mapping[str, Any], tools: Iterable[Any]) -> None:
    names = [name for name, _ in answer.calls]
    expected = rules.get("calls")
    if expected == "none" and (names or answer.finish_reason == "tool_calls"):
        raise CheckFailure(f"no tool call is expected, but the answer calls {names}")
    is_needed = expected == "some" or isinstance(expected, list)
    if is_needed and (wrong := find_wrong_call(answer, tools)):
        raise CheckFailure(wrong)
    if isinstance(expected, list) and set(names) != set(expected):
        raise CheckFailure(f"the answer calls {names}, not {expected}")
    if rules.get("never") in names:
        raise CheckFailure(f"the answer calls the undeclared tool {rules['never']!r}")
    if len(names) > rules.get("most_calls", len(names)):
        raise CheckFailure(f"the answer has {len(names)} calls; allowed: {rules['most_calls']}")
    if "keys" in rules and (keys := [*json.loads(answer.calls[0][1])]) != rules["keys"]:
        raise CheckFailure(f"the call's keys are {', '.join(keys)}, not {', '.join(rules['keys'])}")


async def _show_prompt(probe: ServerProbe, *, body: Case) -> None:
    """Check the order of a tool's keys in the prompt, with the routes /tokenize and /detokenize."""
    asked = {"model": probe.model, "messages": body["messages"], "tools": body["tools"]}
    try:
        tokens = read_object(await exchange(probe.client, "POST", "/tokenize", asked)).get("tokens")
        asked = {"model": probe.model, "tokens": tokens}
        prompt = read_object(await exchange(probe.client, "POST", "/detokenize", asked))["prompt"]
    except CheckFailure as failure:
        if failure.status in (*ABSENT, *REFUSED):
            raise CheckSkipped from None
        raise
    except LookupError:
        raise CheckSkipped from None
    keys = [*body["tools"][0]["function"]["parameters"]["properties"]]
    places = [str(prompt).find(key) for key in keys]
    if places[0] < 0 or places != sorted(places):
        raise CheckFailure(f"the prompt must show the tool's keys in the order {', '.join(keys)}")


async def _count(probe: ServerProbe, *, body: Case, thinking: str) -> None:
    """Check the usage of two answers to `body`: one with streaming, and one without."""
    whole, streamed = [await probe.chat(body | {"stream": way}) for way in (False, True)]
    for answer in (whole, streamed):
        prompt, output = answer.count("prompt_tokens"), answer.count("completion_tokens")
        if not prompt or not output or answer.count("total_tokens") != prompt + output:
            raise CheckFailure(f"usage does not add up: {json.dumps(answer.usage)[:120]}")
        details = answer.usage.get("completion_tokens_details")
        if answer.reasoning and (details or thinking == "forced"):
            name = "completion_tokens_details.reasoning_tokens"
            if not 0 < answer.count(name) <= output:
                raise CheckFailure(f"{name} is {answer.count(name)}; allowed: 1 to {output}")
    if whole.count("prompt_tokens") != streamed.count("prompt_tokens"):
        raise CheckFailure("prompt_tokens of the answers with and without streaming differ")
    with_usage = [index for index, event in enumerate(streamed.events) if event.get("usage")]
    if with_usage != [len(streamed.events) - 1]:
        raise CheckFailure("an event before the last event has usage, or the last event has none")


async def _repeat_prompt(probe: ServerProbe) -> None:
    body = {"messages": [_LONG, {"role": "user", "content": "Hello"}], **_BRIEF}
    _, answer = [await probe.chat(body) for _ in range(2)]
    if not answer.count("prompt_tokens_details.cached_tokens"):
        raise CheckFailure("cached_tokens is 0 for a repeated prompt")


async def _compare(probe: ServerProbe, *, body: Case) -> None:
    """Compare texts and calls of two answers to `body`: one with streaming, and one without."""
    for _ in range(EQUAL_ATTEMPTS):
        whole, streamed = [await probe.chat(body | {"stream": way}) for way in (False, True)]
        names = ("content", "reasoning", "calls", "finish_reason")
        pairs = {name: (getattr(whole, name), getattr(streamed, name)) for name in names}
        different = [name for name, (one, other) in pairs.items() if one != other]
        if not different:
            return
    one, other = pairs[different[0]]
    raise CheckFailure(f"{different[0]} is {str(one)[-60:]!r}; the stream has {str(other)[-60:]!r}")
