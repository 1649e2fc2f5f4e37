"""Fragment sizes meet the limits of MiniMax's acceptance suite, and holding loses no text."""

import json
from typing import Any, NamedTuple

import pytest
from parser_support import MINIMAX_M2, MINIMAX_M3, calls_of, pieces, stream, write_block

from negamax.text.parser.events import (
    ContentDelta,
    ParserEvent,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from negamax.text.parser.output_format import OutputFormat
from negamax.text.parser.packets import HOLD_SECONDS, PacedPackets, Packets

ESSAY = "The history of tea begins, as many do, with an accident: leaves fell into a pot. " * 45
CODE = "def area(r: float) -> float:\n    return 3.14159 * r ** 2  # [m2]\n"
PROPERTIES = {
    "write": {"filename": {"type": "string"}, "content": {"type": "string"}},
    "save": {"data": {"type": "object"}},
    "weather": {"city": {"type": "string"}},
}
TOOLS = [
    {"name": name, "parameters": {"type": "object", "properties": properties}}
    for name, properties in PROPERTIES.items()
]


class Limits(NamedTuple):
    """Limit the shares of non-empty fragments and of their characters, in percent."""

    tiny: float
    good: float
    huge: float
    good_mass: float
    huge_mass: float


def nested(num_chars: int) -> dict[str, object]:
    part = {"title": "Plan of the week", "steps": ["rise", "work", "rest"], "notes": {"b": "page"}}
    return {"data": {"parts": [part | {"number": f"entry {i}"} for i in range(num_chars // 120)]}}


CITIES = ("Rome", "Oslo", "Lima", "Tokyo", "New York")
WHY = "The user wants the weather of Rome, so I ask."
FIVE = [("weather", {"city": city}) for city in CITIES]
STRING = [("write", {"content": (CODE * 10)[:500]})]
LONG_STRING = [("write", {"content": (CODE * 160)[:10_000]})]
TWO = [("write", {"filename": "a", "content": CODE * 3})]
# reasoning, content, calls and limits of each scenario
SCENARIOS: dict[str, tuple[str | None, str | None, list[tuple[str, Any]], Limits]] = {
    "essay": (None, ESSAY, [], Limits(5, 95, 2, 90, 10)),
    "JSON as content": (None, json.dumps(nested(3000)), [], Limits(5, 95, 2, 90, 10)),
    "string of 500": (None, None, STRING, Limits(15, 85, 0, 95, 0)),
    "two arguments": (None, None, TWO, Limits(10, 90, 0, 95, 0)),
    "string of 10K": (None, None, LONG_STRING, Limits(5, 90, 10, 65, 35)),
    "nested object of 2K": (None, None, [("save", nested(2000))], Limits(20, 75, 10, 60, 40)),
    "five calls": (None, None, FIVE, Limits(15, 85, 0, 95, 0)),
    "reasoning then call": (WHY, None, FIVE[:1], Limits(10, 85, 5, 85, 15)),
}


def packets_of(format: OutputFormat, text: str, *, tokens_per_step: int) -> list[ParserEvent]:
    tokens = pieces(text)
    steps = [tokens[i : i + tokens_per_step] for i in range(0, len(tokens), tokens_per_step)]
    packets = Packets()
    sized = [packets.push(events) for events in stream(format, steps, tools=TOOLS)]
    return [event for events in [*sized, packets.flush()] for event in events]


@pytest.mark.parametrize("tokens_per_step", [1, 3, 8, 10_000])
@pytest.mark.parametrize("format", [MINIMAX_M2, MINIMAX_M3], ids=["m2", "m3"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_sizes_are_within_limits(name: str, format: OutputFormat, tokens_per_step: int) -> None:
    reasoning, content, calls, limits = SCENARIOS[name]
    thinking = f"<mm:think>{reasoning}</mm:think>" if reasoning else ""
    if format is MINIMAX_M2:
        thinking = f"{reasoning or ''}\n</think>\n\n"
    text = thinking + (content or "") + write_block(format, calls)
    events = packets_of(format, text, tokens_per_step=tokens_per_step)
    output = collect(events)
    assert (output.reasoning, output.content, calls_of(output)) == (reasoning, content, calls)
    lengths = [
        len(event.text) for event in events if not isinstance(event, ToolCallStart | ToolCallEnd)
    ]
    tiny, huge = [n for n in lengths if n < 5], [n for n in lengths if n > 200]
    percent, percent_of_mass = 100 / len(lengths), 100 / sum(lengths)
    assert percent * len(tiny) <= limits.tiny
    assert percent * len(huge) <= limits.huge
    assert percent * (len(lengths) - len(tiny) - len(huge)) >= limits.good
    assert percent_of_mass * sum(huge) <= limits.huge_mass
    assert percent_of_mass * (sum(lengths) - sum(tiny) - sum(huge)) >= limits.good_mass


def test_text_is_held_until_its_fragment_is_complete() -> None:
    packets = Packets()
    assert packets.push([ContentDelta("Hi")]) == []
    assert packets.is_holding
    assert packets.push([ContentDelta(" y")]) == []
    assert packets.push([ContentDelta("ou")]) == [ContentDelta("Hi you")]
    assert not packets.is_holding
    assert packets.push([ContentDelta("!")]) == []
    assert packets.flush() == [ContentDelta("!")]
    assert packets.flush() == []
    lengths = [len(fragment.text) for fragment in packets.push([ContentDelta("x" * 401)])]
    assert lengths == [133, 134, 134]


def test_held_text_is_released_before_other_events_and_with_its_end() -> None:
    packets = Packets()
    assert packets.push([ReasoningDelta("a"), ContentDelta("b")]) == [ReasoningDelta("a")]
    start = ToolCallStart(0, "f")
    assert packets.push([start]) == [ContentDelta("b"), start]
    events = [ToolArgumentsDelta(0, "{}"), ToolCallEnd(0), ContentDelta("\n")]
    assert packets.push(events) == events[:2]
    assert packets.flush() == events[2:]
    packets = Packets()
    start, end = ToolCallStart(0, "f"), ToolCallEnd(0)
    first = ToolArgumentsDelta(0, '{"city": "')
    assert packets.push([start, first]) == [start]
    assert packets.is_holding
    assert packets.push([ToolArgumentsDelta(0, "Lima")]) == []
    last = ToolArgumentsDelta(0, 'Lima"}')
    assert packets.push([ToolArgumentsDelta(0, '"}'), end]) == [first, last, end]


@pytest.mark.parametrize("text", ["[SILENCE]", "a]", "hello\nworld\n", "🙂", "x]<]mini"])
def test_nothing_is_lost_at_the_end(text: str) -> None:
    assert collect(packets_of(MINIMAX_M3, text, tokens_per_step=1)).content == text
    call = write_block(MINIMAX_M3, [("write", {"content": text})])
    output = collect(packets_of(MINIMAX_M3, call, tokens_per_step=1))
    assert calls_of(output) == [("write", {"content": text})]


# --- pacing --------------------------------------------------------------------------------------

FAST = HOLD_SECONDS / 5


def texts(events: list[ParserEvent]) -> list[str]:
    return [event.text for event in events if not isinstance(event, ToolCallStart | ToolCallEnd)]


def send(
    fragments: list[str], *, step: float, kind: type[ContentDelta | ReasoningDelta] = ContentDelta
) -> list[list[str]]:
    """Push one fragment every `step` seconds. Return the fragments sent after each push."""
    packets, last = PacedPackets(), len(fragments) - 1
    times = [(kind(text), 100 + i * step, i == last) for i, text in enumerate(fragments)]
    return [texts(packets.push([event], now=now, is_last=ends)) for event, now, ends in times]


def test_first_text_is_sent_at_once_and_slow_outputs_are_not_held() -> None:
    sent = send(["I", " a", "m ", "he", "re", "!"], step=FAST)
    assert sent == [["I"], [], [], [" am he"], [], ["re!"]]
    packets = PacedPackets()  # An output without text is not the first fragment.
    assert packets.push([], now=100, is_last=False) == []
    assert texts(packets.push([ContentDelta("I")], now=100 + FAST, is_last=False)) == ["I"]
    assert send(["I", " a", "m ", "he"], step=1.2 * HOLD_SECONDS) == [["I"], [" a"], ["m "], ["he"]]
    assert send(["Hello", " [", "S"], step=FAST)[-1] == [" [S"]


@pytest.mark.parametrize("kind", [ContentDelta, ReasoningDelta])
def test_held_text_is_sent_in_time(kind: type[ContentDelta | ReasoningDelta]) -> None:
    step = HOLD_SECONDS * 0.6
    fragments = [str(i % 10) for i in range(40)]
    out = ["".join(sent) for sent in send(fragments, step=step, kind=kind)]
    assert "".join(out) == "".join(fragments)
    for i in range(len(out)):
        assert (i + 1 - len("".join(out[: i + 1]))) * step <= 2 * HOLD_SECONDS


def test_quick_arguments_are_sized_and_complete() -> None:
    packets = PacedPackets()
    out = packets.push([ToolCallStart(0, "f")], now=100, is_last=False)
    for i, text in enumerate(['{"', "a", '": "', *(["xyz"] * 50), '"}']):
        event, now = ToolArgumentsDelta(0, text), 100 + (i + 1) * FAST
        out += packets.push([event], now=now, is_last=text == '"}')
    sizes = [len(text) for text in texts(out)]
    assert "".join(texts(out)) == '{"a": "' + "xyz" * 50 + '"}'
    assert min(sizes) >= 5 and max(sizes) <= 200
