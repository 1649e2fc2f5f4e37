"""Invent tool results, and write the sentences that report the results."""

# ruff: noqa: SIM905 (long word lists read better as text)

from __future__ import annotations

import json
import random
from typing import Any

from nano import openings, unseen
from nano.suites import common
from nano.suites.tool_calls import Call

KEYS = (
    "temperature condition humidity wind price total status id name date time message count "
    "distance duration rating "
    "amount balance result location country currency rate score speed size level title owner "
    "city phone email address "
    "available delivered description summary forecast rain sunrise order_id confirmation_number "
    "booking_id event_id "
    "language translation value unit"
).split()
WORDS = (
    "sunny|cloudy|rainy|clear|windy|snow|open|closed|delivered|pending|confirmed|in "
    "transit|active|done|ready|high|low|"
    "medium|free"
).split("|")
FAILURES = (
    "not found|timeout|permission denied|invalid date|no such user|service unavailable|out of "
    "stock|rate limit reached|"
    "bad request"
).split("|")
TEXTS = (
    "It is {w} and {n} degrees.|{n} items found.|The {w2} is {w}.|{name} confirmed the {w2}.|No "
    "problems found.|"
    "{w2} number {n} was created.|Sent at {t}.|{name} will arrive at {t}.|The total is "
    "{n}.|{n}|{w}|{n} degrees, {w}|"
    "{w2}: {w}|Saved as {f}.|Order {c} is {w}."
).split("|")


def draw_result(rng: random.Random) -> tuple[str, str]:
    """Draw a tool result and the sentence that reports it."""
    kind = rng.choices(
        ("object", "done", "text", "number", "failure", "list", "rows", "empty", "lines"),
        weights=(54, 10, 13, 4, 7, 6, 4, 2, 2),
    )[0]
    value: Any
    match kind:
        case "object":
            value = _object(rng, rng.choices((1, 2, 3, 4), weights=(24, 38, 26, 12))[0])
            sentence = _report(value)
            if rng.random() < 0.1:
                value = {
                    rng.choice(("data", "result", "response", rng.choice(common.NOUNS))): value
                }
        case "done":
            value, sentence = _done(rng)
        case "text":
            text = rng.choice(TEXTS).format(
                w=rng.choice(WORDS), w2=rng.choice(common.NOUNS), n=rng.randint(0, 999),
                name=rng.choice(common.NAMES),
                t=common.clock_time(rng), f=common.file_name(rng), c=common.code(rng),
            )  # fmt: skip
            return text, f"The tool answered: {text}"
        case "lines":
            return openings.paste(
                rng, rng.randint(4, 30)
            ), "The tool answered with a longer text. I cannot summarize it."
        case "number":
            number = rng.randint(0, 9999) if rng.random() < 0.7 else round(rng.random() * 500, 2)
            return str(number), f"The result is {number}."
        case "failure":
            reason = (
                rng.choice(FAILURES)
                if rng.random() < 0.8
                else f"unknown {rng.choice(common.NOUNS)}"
            )
            if rng.random() < 0.4:
                return f"Error: {reason}", f"The call failed: {reason}."
            value, sentence = {"error": reason}, f"The call failed: {reason}."
        case "list":
            items = [common.text_value(rng).replace(",", "") for _ in range(rng.randint(1, 4))]
            value, sentence = items, f"I found {_count(len(items))}: {_join(items)}."
        case "rows":
            keys = rng.sample(KEYS, 2)
            rows = [{key: _scalar(rng) for key in keys} for _ in range(rng.randint(2, 3))]
            shown = "; ".join(
                _join([f"{_words(key)} {_show(item)}" for key, item in row.items()]) for row in rows
            )
            value, sentence = rows, f"I found {_count(len(rows))}: {shown}."
        case _:
            value, sentence = rng.choice(([], {"results": []})), "Nothing was found."
    return _dump(value, rng), sentence


def report(calls: list[Call], sentences: list[str]) -> str:
    """Return the final answer: one sentence, or one labelled line per call."""
    if len(calls) == 1:
        return sentences[0]
    return "\n".join(
        f"{label(call)}: {sentence}" for call, sentence in zip(calls, sentences, strict=True)
    )


def label(call: Call) -> str:
    for value in call.arguments.values():
        if isinstance(value, str):
            return value
    return call.name


def _dump(value: Any, rng: random.Random) -> str:
    roll = rng.random()
    if roll < 0.7:
        return json.dumps(value, ensure_ascii=False)
    if roll < 0.9:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return json.dumps(value, ensure_ascii=False, indent=2)


def _scalar(rng: random.Random) -> Any:
    roll = rng.random()
    if roll < 0.32:
        return rng.randint(-20, 99) if rng.random() < 0.6 else rng.randint(0, 99999)
    if roll < 0.42:
        return round(rng.random() * rng.choice((10, 100, 1000)), rng.choice((1, 2)))
    if roll < 0.48:
        return rng.random() < 0.5
    if roll < 0.62:
        return unseen.value(rng)
    return rng.choice(WORDS) if rng.random() < 0.4 else common.text_value(rng)


def _object(rng: random.Random, size: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    while len(value) < size:
        key = rng.choice(KEYS)
        roll = rng.random()
        if roll < 0.2:
            key = (
                rng.choice(common.NOUNS)
                if rng.random() < 0.5
                else f"{rng.choice(common.ADJECTIVES)}_{rng.choice(common.NOUNS)}"
            )
        elif roll < 0.55:
            key = unseen.identifier(rng)
        item = _scalar(rng)
        if key in ("temperature", "temp", "feels_like", "temp_c") and rng.random() < 0.8:
            item = (
                rng.randint(-15, 40)
                if rng.random() < 0.8
                else round(rng.randint(-15, 39) + rng.random(), 1)
            )
        if (
            key in ("condition", "status", "forecast", "sky", "weather", "conditions", "summary")
            and rng.random() < 0.8
        ):
            item = rng.choice(WORDS)
        if key in ("city", "location") and rng.random() < 0.8:
            item = rng.choice(common.CITIES)
        if key == "unit" and rng.random() < 0.7:
            item = rng.choice(("celsius", "fahrenheit", "C", "F", "metric"))
        if rng.random() < 0.05:
            item = [rng.choice(common.NOUNS) for _ in range(rng.randint(2, 3))]
        elif rng.random() < 0.03:
            item = {unseen.identifier(rng): _scalar(rng) for _ in range(rng.randint(1, 2))}
        value[key] = item
    return value


def _done(rng: random.Random) -> tuple[dict[str, Any], str]:
    flag: dict[str, Any] = rng.choice(
        ({"status": "ok"}, {"success": True}, {"ok": True}, {"status": "success"}, {"result": "ok"})
    )
    extra = _object(rng, rng.choice((0, 1, 1, 2)))
    for key in flag:
        extra.pop(key, None)
    return {**flag, **extra}, f"Done: {_lower(_report(extra))}" if extra else "Done."


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def _report(value: dict[str, Any]) -> str:
    clauses: list[str] = []
    for key, item in value.items():
        parts = (
            {f"{key} {inner}": part for inner, part in item.items()}
            if isinstance(item, dict)
            else {key: item}
        )
        clauses += [
            f"the {_words(name)} {'are' if isinstance(part, list) else 'is'} {_show(part)}"
            for name, part in parts.items()
        ]
    text = _join(clauses)
    return text[0].upper() + text[1:] + "."


def _words(key: str) -> str:
    return key.replace("_", " ")


def _show(item: Any) -> str:
    if isinstance(item, bool):
        return "true" if item else "false"
    return _join([str(part) for part in item]) if isinstance(item, list) else str(item)


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _count(number: int) -> str:
    return "1 result" if number == 1 else f"{number} results"
