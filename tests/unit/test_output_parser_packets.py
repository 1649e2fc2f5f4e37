"""Fragment sizes within the limits of MiniMax's acceptance suite; holding loses no text."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from parser_support import MARKER, MINIMAX_M2, MINIMAX_M3, outputs, proof

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
from negamax.text.parser.packets import Packets

ESSAY = (
    "The history of tea begins, as many stories do, with an accident: leaves fell into a pot of "
    "water. " * 40
)
CODE = "def area(r: float) -> float:\n    return 3.14159 * r ** 2  # [m2]\n"
NESTED = {
    "a": {
        "title": "Plan of the week",
        "steps": ["rise", "work", "rest"],
        "notes": {"b": "see the second page"},
    }
}
TOOLS = [
    {"name": name, "parameters": {"type": "object", "properties": properties}}
    for name, properties in {
        "write": {"filename": {"type": "string"}, "content": {"type": "string"}},
        "save": {"data": {"type": "object"}},
        "weather": {"city": {"type": "string"}},
    }.items()
]


@dataclass(frozen=True)
class Limits:
    """Shares of the non-empty fragments and of their characters, in percent."""

    tiny: float
    good: float
    huge: float
    good_mass: float
    huge_mass: float


def nested(num_chars: int) -> dict[str, object]:
    parts = [{**NESTED["a"], "number": f"entry {index}"} for index in range(num_chars // 120)]
    return {"data": {"parts": parts}}


CITIES = ("Rome", "Oslo", "Lima", "Tokyo", "New York")
Calls = Sequence[tuple[str, dict[str, object]]]
SCENARIOS: dict[str, tuple[str | None, str | None, Calls, Limits]] = {
    "essay": (None, ESSAY, [], Limits(5, 95, 2, 90, 10)),
    "JSON as content": (None, json.dumps(nested(3000)), [], Limits(5, 95, 2, 90, 10)),
    **{
        name: (None, None, calls, limits)
        for name, calls, limits in (
            (
                "string of 500",
                [("write", {"content": (CODE * 10)[:500]})],
                Limits(15, 85, 0, 95, 0),
            ),
            ("two", [("write", {"filename": "a", "content": CODE * 3})], Limits(10, 90, 0, 95, 0)),
            ("10K", [("write", {"content": (CODE * 160)[:10_000]})], Limits(5, 90, 10, 65, 35)),
            ("nested object of 2K", [("save", nested(2000))], Limits(20, 75, 10, 60, 40)),
            ("five", [("weather", {"city": city}) for city in CITIES], Limits(15, 85, 0, 95, 0)),
        )
    },
    "reasoning then call": (
        "The user wants the weather of Rome, so I ask.",
        None,
        [("weather", {"city": "Rome"})],
        Limits(10, 85, 5, 85, 15),
    ),
}


def written(
    format: OutputFormat,
    reasoning: str | None,
    content: str | None,
    calls: Sequence[tuple[str, dict[str, object]]],
) -> str:
    if format is MINIMAX_M2:
        return f"{reasoning or ''}\n</think>\n\n{content or ''}" + (
            outputs.m2_block(calls) if calls else ""
        )
    thinking = f"<mm:think>{reasoning}</mm:think>" if reasoning else ""
    return thinking + (content or "") + (outputs.m3_block(calls) if calls else "")


def packets_of(format: OutputFormat, text: str, *, tokens_per_step: int) -> list[ParserEvent]:
    tokens = outputs.pieces(text)
    steps = [tokens[i : i + tokens_per_step] for i in range(0, len(tokens), tokens_per_step)]
    packets = Packets()
    out: list[ParserEvent] = []
    for step in proof.stream(format, steps, tools=TOOLS, in_reasoning=format is MINIMAX_M2):
        out += packets.push(step)
    return out + packets.flush()


@pytest.mark.parametrize("tokens_per_step", [1, 3, 8, 10_000])
@pytest.mark.parametrize("format", [MINIMAX_M2, MINIMAX_M3], ids=["m2", "m3"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_shares_of_fragment_sizes_keep_to_the_table(
    name: str, format: OutputFormat, tokens_per_step: int
) -> None:
    reasoning, content, calls, limits = SCENARIOS[name]
    events = packets_of(
        format, written(format, reasoning, content, calls), tokens_per_step=tokens_per_step
    )
    output = collect(events)
    assert (output.reasoning, output.content or "") == (reasoning, (content or ""))
    assert proof.calls_of(output) == calls
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


def test_text_is_held_until_a_fragment_is_there() -> None:
    packets = Packets()
    assert packets.push([ContentDelta("Hi")]) == []
    assert packets.is_holding
    assert packets.push([ContentDelta(" y")]) == []
    assert packets.push([ContentDelta("ou")]) == [ContentDelta("Hi you")]
    assert not packets.is_holding
    assert packets.push([ContentDelta("!")]) == []
    assert packets.flush() == [ContentDelta("!")]
    assert packets.flush() == []
    assert packets.push([ContentDelta("Hello")]) == [ContentDelta("Hello")]


def test_the_end_of_arguments_joins_the_fragment_before_it() -> None:
    packets = Packets()
    start = ToolCallStart(0, "f")
    assert packets.push([start, ToolArgumentsDelta(0, '{"city": "')]) == [start]
    assert packets.is_holding
    assert packets.push([ToolArgumentsDelta(0, "Lima")]) == []
    assert packets.push([ToolArgumentsDelta(0, '"}'), ToolCallEnd(0)]) == [
        ToolArgumentsDelta(0, '{"city": "'),
        ToolArgumentsDelta(0, 'Lima"}'),
        ToolCallEnd(0),
    ]


def test_held_text_goes_out_before_anything_of_another_kind() -> None:
    packets = Packets()
    assert packets.push([ReasoningDelta("a"), ContentDelta("b")]) == [ReasoningDelta("a")]
    start = ToolCallStart(0, "f")
    assert packets.push([start]) == [ContentDelta("b"), start]
    events = [ToolArgumentsDelta(0, "{}"), ToolCallEnd(0), ContentDelta("\n")]
    assert packets.push(events) == events[:2]
    assert packets.flush() == events[2:]


def test_long_text_is_split_evenly() -> None:
    fragments = Packets().push([ContentDelta("x" * 401)])
    assert [len(fragment.text) for fragment in fragments] == [133, 134, 134]


@pytest.mark.parametrize("text", ["[SILENCE]", "a]", "hello\nworld\n", "🙂", "x]<]mini"])
def test_nothing_is_lost_at_the_end(text: str) -> None:
    assert collect(packets_of(MINIMAX_M3, text, tokens_per_step=1)).content == text
    argument = (
        f"{MARKER}<tool_call>{MARKER}<invoke "
        f'name="write">{MARKER}<content>{text}{MARKER}</content>{MARKER}</invoke>'
    )
    output = collect(packets_of(MINIMAX_M3, argument, tokens_per_step=1))
    assert json.loads(output.tool_calls[0].arguments) == {"content": text}


def test_reasoning_and_content_never_share_a_fragment_and_emoji_stay_whole() -> None:
    rng = random.Random(0)
    for _ in range(50):
        output = outputs.generate(rng.choice([MINIMAX_M2, MINIMAX_M3]), rng)
        whole = proof.parse(
            output.format, output.text, tools=outputs.TOOLS, in_reasoning=output.in_reasoning
        )
        tokens = outputs.pieces(output.text)
        steps = proof.stream(
            output.format,
            [[token] for token in tokens],
            tools=outputs.TOOLS,
            in_reasoning=output.in_reasoning,
        )
        packets = Packets()
        fragments = [event for step in steps for event in packets.push(step)] + packets.flush()
        assert "".join(f.text for f in fragments if isinstance(f, ReasoningDelta)) == (
            whole.reasoning or ""
        )
        assert "".join(f.text for f in fragments if isinstance(f, ContentDelta)) == (
            whole.content or ""
        )
