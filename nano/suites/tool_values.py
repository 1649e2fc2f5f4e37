"""Typed values of `tool_calls`: drawing, JSON schema, and wording.

A kind is `string:<name>`, `integer:<low>-<high>`, `number:<low>-<high>`, `boolean`,
`enum:<a>,<b>,…`, `strings:<name>` or `integers:<low>-<high>`. `strings` and `integers` are lists.
"""

# ruff: noqa: E501, SIM905 (word lists and tables read better as text)

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from nano.suites import common

Value = str | int | float | bool | list[str] | list[int]

ROOMS = (
    "kitchen|living room|bedroom|bathroom|office|hall|garage|garden|basement|attic|dining "
    "room|guest room|studio|lobby"
).split("|")
DEVICES = (
    "coffee machine|fan|heater|TV|radio|dishwasher|washing machine|lamp|printer|router|air "
    "conditioner|speaker|oven|pump"
).split("|")
TICKERS = (
    "AAPL MSFT GOOG AMZN TSLA NVDA META NFLX AMD INTC IBM ORCL SAP BMW SONY UBER SHOP SPOT BABA "
    "NIO DIS NKE KO PEP WMT"
).split()
FOODS = (
    "rice pasta eggs tomatoes cheese beans chicken potatoes carrots onions mushrooms spinach "
    "tofu salmon bread lentils"
).split()
ROADS = ["tolls", "highways", "ferries", "tunnels", "bridges", "motorways", "traffic"]
PLACES = (
    "the station|the airport|Main Street|the museum|City Hall|Central Park|the harbor|the "
    "university|Oak Avenue 12|the old town"
).split("|")
ERRANDS = (
    "call {n}|buy {o}|pick up the {w}|water the plants|pay the {w}|clean the {w}|check the "
    "{w}|send the {w} to {n}|"
    "meet {n} at the {w}|I will be {m} minutes late|the {w} is ready|please bring {o}|see you at "
    "the {w}|happy birthday|"
    "good luck with the {w}|where are you|feed the cat|take out the trash|thank you for the "
    "{w}|the {w} starts at {m} past|"
    "book the {w}|let us talk about the {w}|good night|the meeting is moved to Friday|I am on my "
    "way|renew the {w}|"
    "return the {w} to {n}|finish the {w} report|good morning|how are you"
).split("|")
QUERIES = (
    "best {w} in {c}|{w} near {c}|cheap {w}s to {c}|how to {v} a {w}|{j} {w} for {n}|{w} with {o}|"
    "{n} {u}|{u} {w}|{w} {u}|news about {c}|{o} on {w}|{j} {j2} {w}|what is a {u}|{u}|{u} to {u2}|"
    "flights from {c} to {c2}|{w} in the {w2}|{v} the {w}|{o} and {w}s|{j} {o}"
).split("|")
FOLDERS = "src docs tests /var/log /tmp lib app /etc ~ build data /home scripts".split()
CURRENCIES = "EUR USD GBP JPY CHF euros dollars yen pounds PLN SEK INR".split()
LANGUAGES = (
    "French German Spanish Italian Japanese Chinese Korean Polish Dutch Turkish Greek Russian "
    "Hindi Arabic Swedish Portuguese Latin Finnish Czech Danish"
).split()
COMMANDS = (
    "ls -la|git status|df -h|cat {f}|grep -r {w} .|python {f}|tail -n {m} {f}|ps aux|rm "
    "{f}|mkdir {w}|curl {u}|make {w}|"
    "echo {w}"
).split("|")


def _errand(rng: random.Random) -> str:
    text = rng.choice(ERRANDS).format(
        n=rng.choice(common.NAMES),
        o=rng.choice(common.OBJECTS)[1],
        w=rng.choice(common.NOUNS),
        m=rng.randint(2, 59),
    )
    return text[0].upper() + text[1:] if rng.random() < 0.3 else text


def _query(rng: random.Random) -> str:
    """Draw a text in lower case with words that also introduce parameters, such as "in"."""
    text = rng.choice(QUERIES).format(
        w=rng.choice(common.NOUNS),
        w2=rng.choice(common.NOUNS),
        c=rng.choice(common.CITIES),
        c2=rng.choice(common.CITIES),
        v=rng.choice("fix cook find open clean paint build grow train write".split()),
        j=rng.choice(common.ADJECTIVES),
        j2=rng.choice(common.ADJECTIVES),
        n=rng.choice(common.NAMES),
        o=rng.choice(common.OBJECTS)[1],
        u=common.pseudo_word(rng),
        u2=common.pseudo_word(rng),
    )
    return text.lower() if rng.random() < 0.3 else text


def _clock(rng: random.Random) -> str:
    """Draw a time as people say it."""
    hour, minute = rng.randint(1, 12), rng.choice(("", "", ":30", ":15", ":45"))
    if rng.random() < 0.3:
        return rng.choice(
            ("noon", "midnight", "tomorrow", f"{hour} o'clock", "half past " + str(hour))
        )
    return f"{hour}{minute}{rng.choice((' ', ''))}{rng.choice(('am', 'pm', 'PM'))}"


def _command(rng: random.Random) -> str:
    return rng.choice(COMMANDS).format(
        f=common.file_name(rng), w=rng.choice(common.NOUNS), m=rng.randint(1, 99), u=common.url(rng)
    )


def _title(rng: random.Random) -> str:
    words = (
        rng.choice(rng.choice((common.NOUNS, common.ADJECTIVES, common.WORDS))).capitalize()
        for _ in range(rng.randint(1, 3))
    )
    return (
        " ".join(words)
        if rng.random() < 0.8
        else f"{rng.choice(common.NAMES)}'s {rng.choice(common.NOUNS).capitalize()}"
    )


def _expression(rng: random.Random) -> str:
    spaced = rng.choice(("{} {} {}", "{}{}{}"))
    text = spaced.format(rng.randint(2, 999), rng.choice("+-*/"), rng.randint(2, 999))
    return text if rng.random() < 0.6 else f"({text}) {rng.choice('+-*/')} {rng.randint(2, 99)}"


_STRINGS: dict[str, Callable[[random.Random], str]] = {
    "any": common.text_value,
    "city": lambda rng: rng.choice(common.CITIES) if rng.random() < 0.85 else common.pseudo_word(rng).capitalize(),
    "town": lambda rng: rng.choice(common.CITIES) + (f", "
                                                     f"{rng.choice((*common.COUNTRIES, 'CA', 'NY', 'UK', 'TX'))}" if rng.random() < 0.12 else ""),
    "person": common.person,
    "email": common.email,
    "phrase": lambda rng: common.phrase(rng) if rng.random() < 0.6 else f"{rng.choice(common.ADJECTIVES)} {rng.choice(common.NOUNS)}",
    "sentence": lambda rng: _errand(rng) if rng.random() < 0.75 else common.phrase(rng),
    "query": _query,
    "folder": lambda rng: rng.choice(FOLDERS) + rng.choice(("", f"/{rng.choice(common.NOUNS)}")),
    "branch": lambda rng: rng.choice(("main", "dev", f"fix-{rng.choice(common.NOUNS)}", f"feature/{rng.choice(common.NOUNS)}")),
    "currency": lambda rng: rng.choice(CURRENCIES),
    "language": lambda rng: rng.choice(LANGUAGES),
    "clock": _clock,
    "date": common.iso_date,
    "time": common.clock_time,
    "place": lambda rng: rng.choice((rng.choice(PLACES), rng.choice(common.CITIES), f"room "
                                                                                    f"{rng.randint(1, 400)}", f"the {rng.choice(common.NOUNS)}")),
    "noun": lambda rng: rng.choice(common.NOUNS),
    "title": _title,
    "ticker": lambda rng: rng.choice(TICKERS) if rng.random() < 0.7 else "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(2, 4))),
    "room": lambda rng: rng.choice(ROOMS),
    "any_url": common.url,
    "colour": lambda rng: rng.choice(common.COLOURS),
    "device": lambda rng: rng.choice(DEVICES) if rng.random() < 0.7 else f"{rng.choice(common.ADJECTIVES)} {rng.choice(common.NOUNS)}",
    "object": lambda rng: rng.choice(common.OBJECTS)[1],
    "code": common.code,
    "file": common.file_name,
    "command": _command,
    "food": lambda rng: rng.choice(FOODS),
    "road": lambda rng: rng.choice(ROADS),
    "expression": _expression,
}  # fmt: skip


def _bounds(spec: str) -> tuple[int, int]:
    match = re.fullmatch(r"(-?\d+)-(-?\d+)", spec)
    assert match is not None, spec
    return int(match.group(1)), int(match.group(2))


def _integer(spec: str, rng: random.Random) -> int:
    low, high = _bounds(spec)
    if high > 99 and rng.random() < 0.6:
        high = rng.choice((20, 99)) if low < 20 else high  # People often use small numbers.
    return rng.randint(low, high)


def _number(spec: str, rng: random.Random) -> int | float:
    low, high = _bounds(spec)
    if rng.random() < 0.5:
        return _integer(spec, rng)
    value = round(rng.randint(low, high - 1) + rng.random(), rng.choice((1, 2)))
    return int(value) if value == int(value) else value


def draw_value(kind: str, rng: random.Random) -> Value:
    """Draw a random value of this kind."""
    family, _, spec = kind.partition(":")
    match family:
        case "string":
            return _STRINGS[spec](rng)
        case "integer":
            return _integer(spec, rng)
        case "number":
            return _number(spec, rng)
        case "boolean":
            return rng.random() < 0.5
        case "enum":
            return rng.choice(spec.split(","))
        case "strings":
            return list(
                dict.fromkeys(
                    _STRINGS[spec](rng).replace(",", "") for _ in range(rng.randint(2, 4))
                )
            )
        case "integers":
            return [_integer(spec, rng) for _ in range(rng.randint(2, 5))]
        case _:
            raise ValueError(f"unknown kind {kind!r}")


def schema_of(kind: str, description: str, rng: random.Random) -> dict[str, Any]:
    """Return the JSON schema of a kind. The description is the first or the last key."""
    family, _, spec = kind.partition(":")
    schema: dict[str, Any]
    match family:
        case "enum":
            schema = {"type": "string", "enum": spec.split(",")}
        case "strings":
            schema = {"type": "array", "items": {"type": "string"}}
        case "integers":
            schema = {"type": "array", "items": {"type": "integer"}}
        case _:
            schema = {"type": family}
    if not description:
        return schema
    return (
        {"description": description, **schema}
        if rng.random() < 0.15
        else {**schema, "description": description}
    )


def show(value: Value, *, on_off: bool = False, yes_no: bool = False) -> str:
    """Write a value as people do in a sentence."""
    if isinstance(value, bool):
        words = ("on", "off") if on_off else ("yes", "no") if yes_no else ("true", "false")
        return words[0] if value else words[1]
    if isinstance(value, list):
        shown = [str(item) for item in value]
        return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " and " + shown[-1]
    return str(value)
