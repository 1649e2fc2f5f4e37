"""Seeded tool-call problems with exact expected calls: the `nano-tools` suite.

A problem declares one to four tools with random names, descriptions and typed parameters, and asks
for up to three calls. One sixteenth of all problems, by a hash of tools and text, is held out.
"""

# ruff: noqa: SIM905 (long word lists read better as text)

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nano.suites import common
from nano.suites.tool_domains import DOMAINS, Row
from nano.suites.tool_values import Value, draw_value, schema_of, show

VERBS = (
    "create add delete remove update get find list search open close start stop send check book "
    "cancel move copy rename "
    "assign approve reject archive restore export import print schedule track measure reset "
    "enable disable lock unlock set "
    "change build test inspect order return repair clean pack ship sort filter tag rate review "
    "publish register record "
    "upload download share merge split"
).split()

SMALL_TALK = (
    "Hello!|Hi there|Good morning|Thanks a lot!|Thank you|How are you?|Who are you?|What can you "
    "do?|Bye!|"
    "What is your name?|Hey|That was helpful, thanks|Good evening!|See you later|Nice to meet "
    "you|Are you a robot?"
).split("|")

SINGULAR_TYPES = (
    ("string:any", 42), ("integer:0-9999", 20), ("integer:-50-50", 4), ("number:0-500", 9),
    ("boolean", 12), ("enum", 14),
    ("strings:any", 6), ("strings:noun", 5), ("integers:0-999", 6),
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One expected tool call."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ToolProblem:
    """A request, the declared tools, and the calls that answer it, in order."""

    messages: tuple[dict[str, Any], ...]  # one user message
    # as in a chat request: {"type": "function", "function": {...}}
    tools: tuple[dict[str, Any], ...]
    calls: tuple[Call, ...]

    @property
    def text(self) -> str:
        """Return the request as the user writes it."""
        return str(self.messages[0]["content"])


@dataclass(frozen=True)
class Parameter:
    """A parameter of a tool, with its kind of values and the ways a request mentions it."""

    name: str
    kind: str
    schema: dict[str, Any]
    required: bool
    fragments: tuple[str, ...]  # ways to mention an optional value


@dataclass(frozen=True)
class Tool:
    """A tool and the ways people ask for it."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]  # texts with {0} .. and {opt}; empty for composed tools
    list_requests: tuple[str, ...]
    action: str  # what the user asks a composed tool for, such as "create an invoice"


def generate(seed: int) -> ToolProblem:
    """Return the problem of this seed, which is equal on all platforms."""
    return draw(random.Random(f"nano-tools:{seed}"))


def held_out(problem: ToolProblem) -> bool:
    """Return whether this problem is held out from training."""
    canonical = (
        json.dumps(problem.tools, sort_keys=True, ensure_ascii=False)
        + "\n"
        + common.normalise(problem.text)
    )
    return common.is_held_out("nano-tools\n" + canonical)


def problems(count: int, seed: int = 0) -> list[ToolProblem]:
    """Return `count` distinct held-out problems."""
    return common.distinct_problems(
        generate,
        held_out,
        lambda problem: json.dumps(problem.tools) + problem.text,
        count=count,
        seed=seed,
    )


def draw(rng: random.Random) -> ToolProblem:
    """Draw a random problem from `rng`."""
    declared = draw_tools(rng, rng.choices((1, 2, 3, 4), weights=(30, 30, 24, 16))[0])
    tools = tuple(as_json(tool, rng) for tool in declared)
    if rng.random() < 0.04:
        return ToolProblem(({"role": "user", "content": rng.choice(SMALL_TALK)},), tools, ())
    text, calls = draw_request(declared, rng)
    return ToolProblem(({"role": "user", "content": text},), tools, calls)


def draw_request(declared: Sequence[Tool], rng: random.Random) -> tuple[str, tuple[Call, ...]]:
    """Draw a user's text and the calls that it asks for: usually one, sometimes two or three."""
    target = rng.choice(declared)
    if target.list_requests and rng.random() < 0.35:
        return _list_request(target, rng)
    texts: list[str] = []
    calls: list[Call] = []
    for _ in range(rng.choices((1, 2, 3), weights=(74, 19, 7))[0]):
        text, call = _single_request(target, rng)
        texts.append(text)
        calls.append(call)
        target = rng.choice(declared)
    joiner = rng.choice((" ", " ", "\n", " Also: ", " Then: ", " After that: "))
    if any(text[-1] not in ".?!" for text in texts):
        joiner = "\n"  # Without a full stop, a text could run into the next one.
    prefix = rng.choice(
        (
            "",
            "",
            "",
            "",
            "",
            "Hi! ",
            "Hello, ",
            "Please help me. ",
            "Hey, ",
            "I need your help. ",
            "Quick one: ",
        )
    )
    return prefix + joiner.join(texts), tuple(calls)


def draw_tools(rng: random.Random, count: int) -> list[Tool]:
    """Draw `count` tools with different names in one naming style."""
    style = rng.choices(("snake", "camel", "kebab"), weights=(80, 16, 4))[0]
    tools: dict[str, Tool] = {}
    related = ""
    while len(tools) < count:
        if rng.random() < 0.5:
            tool = _everyday_tool(rng.choice(DOMAINS), style, rng)
            if any(tool.requests == other.requests for other in tools.values()):
                continue
        else:
            tool = _composed_tool(style, related if rng.random() < 0.5 else "", rng)
            related = tool.action
        if not any(tool.action == other.action and tool.action for other in tools.values()):
            tools.setdefault(tool.name, tool)
    return list(tools.values())


def as_json(tool: Tool, rng: random.Random) -> dict[str, Any]:
    """Declare the tool as an API request does, with small variations of the key order."""
    properties = {parameter.name: parameter.schema for parameter in tool.parameters}
    required = [parameter.name for parameter in tool.parameters if parameter.required]
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required or rng.random() < 0.5:
        parameters["required"] = required
    if rng.random() < 0.15:
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": parameters,
    }
    if rng.random() < 0.05:
        del function["description"]
    return {"type": "function", "function": function}


def _style(words: str, style: str) -> str:
    parts = words.replace("_", " ").split()
    if style == "camel":
        return parts[0] + "".join(part.capitalize() for part in parts[1:])
    return ("-" if style == "kebab" else "_").join(parts)


def _everyday_tool(row: Row, style: str, rng: random.Random) -> Tool:
    names, descriptions, columns, requests, list_requests = row
    parameters: list[Parameter] = []
    for column_names, kind, texts, fragment in columns:
        if fragment and rng.random() < 0.3:
            continue  # This variant of the tool lacks the optional parameter.
        name = _style(
            _fresh(column_names.split("|"), [p.name for p in parameters], rng),
            "snake" if style == "kebab" else style,
        )
        schema = schema_of(kind, rng.choice(texts.split("|")), rng)
        parameters.append(
            Parameter(
                name, kind, schema, not fragment, tuple(fragment.split("|")) if fragment else ()
            )
        )
    name = _style(rng.choice(names.split("|")), style)
    return Tool(
        name,
        rng.choice(descriptions.split("|")),
        tuple(parameters),
        tuple(requests.split("|")),
        _split(list_requests),
        "",
    )


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split("|")) if text else ()


def _fresh(options: Sequence[str], taken: Sequence[str], rng: random.Random) -> str:
    free = [option for option in options if option not in taken]
    return rng.choice(free or [f"{options[0]}_{len(taken)}"])


def _composed_tool(style: str, related: str, rng: random.Random) -> Tool:
    """Draw a tool from a random verb and noun.

    `related` is an earlier action, with which the tool may share the verb or the noun.
    """
    verb = rng.choice(VERBS)
    noun = rng.choice(common.NOUNS) if rng.random() < 0.85 else common.pseudo_word(rng)
    if rng.random() < 0.4:
        before = common.ADJECTIVES if rng.random() < 0.5 else common.NOUNS
        noun = f"{rng.choice(before)} {noun}"
    if related:
        old_verb, _, rest = related.partition(" ")
        verb, noun = (old_verb, noun) if rng.random() < 0.5 else (verb, rest.partition(" ")[2])
    article = "an" if noun[0] in "aeiou" else "a"
    action = f"{verb} {article} {noun}"
    parameters: list[Parameter] = []
    for _ in range(rng.choices((0, 1, 2, 3, 4, 5), weights=(4, 24, 30, 24, 12, 6))[0]):
        parameters.append(_composed_parameter(style, parameters, rng))
    description = rng.choice((f"{verb.capitalize()} {article} {noun}.", f"{verb.capitalize()} "
                                                                        f"{article} {noun} in "
                                                                        f"the system.",
                              f"Use this to {verb} {article} {noun}.",
                              f"{verb.capitalize()}s the given {noun}."))  # fmt: skip
    name = _style(f"{verb} {noun}" if rng.random() < 0.8 else f"{noun} {verb}", style)
    return Tool(name, description, tuple(parameters), (), (), action)


def _composed_parameter(style: str, earlier: Sequence[Parameter], rng: random.Random) -> Parameter:
    taken = {parameter.name for parameter in earlier}
    while True:
        words = rng.choice(common.NOUNS) if rng.random() < 0.9 else common.pseudo_word(rng)
        roll = rng.random()
        if roll < 0.45:
            words = f"{rng.choice(common.ADJECTIVES)} {words}"
        elif roll < 0.55:
            words = f"{words} {rng.choice('id name count type level size code list time'.split())}"
        name = _style(words, "snake" if style == "kebab" else style)
        if name not in taken:
            break
    kind = rng.choices(
        [kind for kind, _ in SINGULAR_TYPES], weights=[weight for _, weight in SINGULAR_TYPES]
    )[0]
    if kind == "enum":
        pool = rng.choice((common.ADJECTIVES, common.NOUNS, common.COLOURS))
        kind = "enum:" + ",".join(rng.sample(pool, rng.randint(2, 5)))
    description = rng.choice(
        (
            "",
            f"The {words}",
            f"{words.capitalize()} to use",
            f"Which {words}",
            f"The {words} of the request",
        )
    )
    if rng.random() < 0.06:  # Sometimes the description, not the name, explains the tool.
        name = f"{rng.choice('abcdefgkmnpqrstuvwxyz')}{len(earlier) + 1}"
        description = f"The {words}"
    fragments = (
        f"{words} {{v}}",
        f"{words}: {{v}}",
        f"{words} = {{v}}",
        f"the {words} {{v}}",
        f"{words} set to {{v}}",
        f"{{v}} as the {words}",
    )
    return Parameter(name, kind, schema_of(kind, description, rng), rng.random() < 0.65, fragments)


def _single_request(tool: Tool, rng: random.Random) -> tuple[str, Call]:
    """Draw a request for one call of this tool. Arguments follow the order of the schema."""
    chosen = [
        parameter for parameter in tool.parameters if parameter.required or rng.random() < 0.5
    ]
    values = {parameter.name: draw_value(parameter.kind, rng) for parameter in chosen}
    text = (
        _everyday_text(tool, chosen, values, rng)
        if tool.requests
        else _composed_text(tool, chosen, values, rng)
    )
    return text, Call(tool.name, values)


def _everyday_text(
    tool: Tool, chosen: Sequence[Parameter], values: dict[str, Value], rng: random.Random
) -> str:
    required = [
        show(values[parameter.name], on_off=True) for parameter in chosen if parameter.required
    ]
    extras = ""
    for parameter in chosen:
        if not parameter.required:
            value = values[parameter.name]
            fragment = rng.choice(parameter.fragments)
            if isinstance(value, bool):
                when_true, when_false = fragment.split("^")
                extras += when_true if value else when_false
            else:
                extras += fragment.format(v=show(value))
    return rng.choice(tool.requests).format(*required, opt=extras)


def _composed_text(
    tool: Tool, chosen: Sequence[Parameter], values: dict[str, Value], rng: random.Random
) -> str:
    action = tool.action
    opening = rng.choice(
        (
            f"Please {action}", f"{action[0].upper()}{action[1:]}", f"I want to "
                                                                    f"{action}", f"Can you "
                                                                                 f"{action}",
            f"I need you to {action}",
            f"Could you {action}", f"Use {tool.name}", f"Call {tool.name}", f"{action}", f"Help "
                                                                                         f"me "
                                                                                         f"{action}",
        )
    )  # fmt: skip
    if not chosen:
        return opening + rng.choice((".", ".", "!", "?", " now.", ", please."))
    order = list(chosen)
    if rng.random() < 0.5:
        rng.shuffle(order)
    pieces: list[str] = []
    for parameter in order:
        value = values[parameter.name]
        quoted = isinstance(value, str) and (
            " and " in value or rng.random() < (0.7 if " " in value else 0.2)
        )
        shown = f'"{value}"' if quoted else show(value, yes_no=rng.random() < 0.5)
        pieces.append(rng.choice(parameter.fragments).format(v=shown))
    if rng.random() < 0.3:
        return f"{opening}. " + ", ".join(pieces) + "."
    joined = (
        pieces[0]
        if len(pieces) == 1
        else ", ".join(pieces[:-1]) + rng.choice((" and ", ", ")) + pieces[-1]
    )
    return f"{opening} with {joined}" + rng.choice((".", ".", "", ", please."))


def _list_request(tool: Tool, rng: random.Random) -> tuple[str, tuple[Call, ...]]:
    """Request several values of the first parameter in one sentence, with one call per value."""
    parameter = tool.parameters[0]
    values: list[Value] = []
    wanted = rng.choice((2, 2, 3))
    while len(values) < wanted:
        value = draw_value(parameter.kind, rng)
        if value not in values and "," not in str(value):
            values.append(value)
    shown = [show(value) for value in values]
    listed = ", ".join(shown[:-1]) + " and " + shown[-1]
    return rng.choice(tool.list_requests).format(list=listed), tuple(
        Call(tool.name, {parameter.name: value}) for value in values
    )
