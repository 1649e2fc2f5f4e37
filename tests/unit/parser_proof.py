"""Properties of the output parser: any splitting gives the same answer, with valid events."""

import json
import random
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parser_outputs import TAG_IDS, TOOLS, GeneratedOutput, cut_at_random, generate, parse, pieces

from negamax.models.minimax_m2.chat import MINIMAX_M2
from negamax.models.minimax_m3.chat import MARKER, MINIMAX_M3
from negamax.text.detokenizer import TextPiece
from negamax.text.parser.events import (
    ContentDelta,
    ParsedOutput,
    ParserEvent,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from negamax.text.parser.output_format import OutputFormat
from negamax.text.parser.output_parser import OutputParser
from negamax.text.parser.packets import MAX_CHARS, Packets

CASE_FILES = tuple(
    Path(__file__).parents[1] / "golden" / name
    for name in ("parser_cases.jsonl", "minimax_m2_outputs.jsonl", "minimax_m3_outputs.jsonl")
)
FORMATS = {"m2": MINIMAX_M2, "m3": MINIMAX_M3}
_MARKED_THINK_TAG = re.compile(rf"{re.escape(MARKER)}\s*</?mm:think>")

# Policy cases with another choice of ours, and why; see docs/parsing.md.
OTHER_CHOICE = {"m3-045": "arguments that are cut off stay cut, so that nobody runs half a call"}


@dataclass(frozen=True)
class Case:
    id: str
    tier: str
    format: OutputFormat
    tools: list[dict[str, Any]]
    text: str
    in_reasoning: bool
    expected: dict[str, Any]


def read_cases(paths: Iterable[Path]) -> list[Case]:
    lines = [
        line for path in paths for line in path.read_text(encoding="utf-8").split("\n") if line
    ]
    return [
        Case(
            id=case["id"],
            tier=case["tier"],
            format=FORMATS[case["format"]],
            tools=case["tools"],
            text=case["model_text"],
            in_reasoning=case["format"] == "m2" or case.get("thinking_mode") == "enabled",
            expected=case["expected"],
        )
        for case in map(json.loads, lines)
    ]


def comparable(reasoning: str | None, content: str | None, calls: Iterable[tuple[str, Any]]) -> str:
    """Normalize for comparison: white space in text, null as "", arguments as JSON."""
    texts = [" ".join((text or "").split()) for text in (reasoning, content)]
    return json.dumps([*texts, [[name, arguments] for name, arguments in calls]], sort_keys=True)


def calls_of(output: ParsedOutput) -> list[tuple[str, Any]]:
    return [
        (call.name, json.loads(call.arguments) if call.is_whole else call.arguments)
        for call in output.tool_calls
    ]


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def check_expected(case: Case, output: ParsedOutput) -> None:
    expected = case.expected
    wanted_calls = [(call["name"], call["arguments"]) for call in expected["tool_calls"]]
    wanted = comparable(expected["reasoning"], expected["content"], wanted_calls)
    assert comparable(output.reasoning, output.content, calls_of(output)) == wanted, case.id


def check_well_formed(events: Sequence[ParserEvent]) -> None:
    """Check that events are well-formed.

    Calls follow each other and begin with a name; no delta is empty. Arguments are one JSON object
    at their end; the last call may be truncated.
    """
    open_call: int | None = None
    num_calls = 0
    arguments = ""
    for event in events:
        match event:
            case ReasoningDelta(text) | ContentDelta(text):
                assert open_call is None and text
            case ToolCallStart(index, name):
                assert open_call is None and index == num_calls and name
                open_call, num_calls, arguments = index, num_calls + 1, ""
            case ToolArgumentsDelta(index, text):
                assert open_call == index and text
                arguments += text
            case ToolCallEnd(index):
                assert open_call == index and isinstance(json.loads(arguments), dict)
                open_call = None
    if open_call is not None:
        assert arguments.startswith("{") and not is_json(arguments)


def stream(
    format: OutputFormat,
    chunks: Iterable[Sequence[TextPiece]],
    *,
    tools: Sequence[dict[str, Any]] | None,
    in_reasoning: bool,
    tag_ids: dict[str, int] | None = None,
) -> list[list[ParserEvent]]:
    parser = OutputParser(format, tools=tools, in_reasoning=in_reasoning, tag_ids=tag_ids)
    return [*(parser.feed(chunk) for chunk in chunks), parser.finish()]


def text_chunks(parts: Iterable[str]) -> list[list[TextPiece]]:
    return [[TextPiece(part, None)] for part in parts]


def two_piece_cuts(text: str, places: Iterable[int]) -> Iterator[list[list[TextPiece]]]:
    return (text_chunks([text[:place], text[place:]]) for place in places)


def check_readings(
    source: Case | GeneratedOutput,
    rng: random.Random,
    *,
    tools: Sequence[dict[str, Any]],
    places: Iterable[int],
) -> None:
    """Read a text in every kind of pieces; `places` are the splits in two."""
    text, format = source.text, source.format
    whole = parse(format, text, tools=tools, in_reasoning=source.in_reasoning)
    by_text = [
        *two_piece_cuts(text, places),
        text_chunks(text),
        text_chunks(text[i : i + 4] for i in range(0, len(text), 4)),
    ]
    by_text += [
        text_chunks(cut_at_random(text, rng, num_cuts=rng.randint(2, 30))) for _ in range(8)
    ]
    tokens = pieces(text, rng)
    by_token = [[tokens], [[token] for token in tokens]]
    by_token += [
        cut_at_random(tokens, rng, num_cuts=max(1, len(tokens) // size)) for size in (2, 3, 5, 8)
    ]
    tag_ids = {tag: TAG_IDS[tag] for tag in format.literals}
    for chunks, ids in [
        *((chunks, None) for chunks in by_text),
        *((chunks, tag_ids) for chunks in by_token),
    ]:
        steps = stream(format, chunks, tools=tools, in_reasoning=source.in_reasoning, tag_ids=ids)
        events = [event for step in steps for event in step]
        check_well_formed(events)
        if chunks is by_token[0] and reads_otherwise_by_token(format, text, whole):
            whole = collect(events)
            assert format.think_close not in (whole.content or ""), text
        assert collect(events) == whole, (
            text,
            [[piece.text for piece in chunk] for chunk in chunks],
        )
    check_packets(steps, whole)


def reads_otherwise_by_token(format: OutputFormat, text: str, whole: ParsedOutput) -> bool:
    """Return whether tokens change the reading beyond the text.

    Cases: the text ends in the beginning of a tag with a token; a think closer in the content or a
    think tag after M3's marker is text only if it is no token.
    """
    ends_in_tag = any(
        text.endswith(tag[:length]) for tag in format.literals for length in range(1, len(tag))
    )
    is_marked = _MARKED_THINK_TAG.search(text) is not None
    return ends_in_tag or is_marked or format.think_close in (whole.content or "")


def check_packets(steps: Iterable[Sequence[ParserEvent]], whole: ParsedOutput) -> None:
    """Check that a stream's packets give the same answer within the size limit."""
    packets = Packets()
    events = [event for step in steps for event in packets.push(step)] + packets.flush()
    check_well_formed(events)
    assert collect(events) == whole
    assert all(
        len(event.text) <= MAX_CHARS
        for event in events
        if not isinstance(event, ToolCallStart | ToolCallEnd)
    )


def check_generated(format: OutputFormat, rng: random.Random, *, all_places: bool) -> None:
    """Generate an output, check its known answer if it has one, and read it in pieces."""
    output = generate(format, rng)
    if output.expected is not None:
        whole = parse(format, output.text, tools=TOOLS, in_reasoning=output.in_reasoning)
        found = json.dumps([whole.reasoning, whole.content, calls_of(whole)], sort_keys=True)
        assert found == json.dumps(output.expected, sort_keys=True), output.text
    length = len(output.text)
    places = range(1, length) if all_places else rng.sample(range(length), min(5, length))
    if output.expected is not None:
        check_ended_early(output, places)
    check_readings(output, rng, tools=TOOLS, places=places)


def check_ended_early(output: GeneratedOutput, places: Iterable[int]) -> None:
    """Read a truncated valid output: its calls are those of the whole one, the last truncated."""
    whole = parse(
        output.format, output.text, tools=TOOLS, in_reasoning=output.in_reasoning
    ).tool_calls
    for place in places:
        text = output.text[:place]
        parser = OutputParser(
            output.format, tools=TOOLS, in_reasoning=output.in_reasoning, tag_ids=None
        )
        found = collect(
            [*parser.feed([TextPiece(text, None)]), *parser.finish(is_cut=True)]
        ).tool_calls
        assert found[:-1] == whole[: max(0, len(found) - 1)], text
        if found:
            made, cut = whole[len(found) - 1], found[-1]
            assert made.name == cut.name and made.arguments.startswith(cut.arguments), text
            assert made == cut or not (cut.is_whole or is_json(cut.arguments)), text


def long_outputs(num_chars: int) -> dict[str, tuple[OutputFormat, str]]:
    m2 = 'x\n</think>\n\n<minimax:tool_call>\n<invoke name="write_file">\n'
    m2_content = f'{m2}<parameter name="content">'
    m3 = f'<mm:think>x</mm:think>{MARKER}<tool_call>\n{MARKER}<invoke name="write_file">'
    m3_event = m3.replace("write_file", "create_event")
    m3_content = f"{m3}{MARKER}<content>"

    def fill(head: str, part: str, tail: str = "") -> str:
        return head + part * (num_chars // len(part)) + tail

    numbered = range(num_chars // 45)
    call = '\n<invoke name="write_file"><parameter name="mode">5</parameter></invoke>'
    m2_texts = {
        "reasoning": fill("", "a < b, ] and </thin or <minimax: "),
        "content": fill("x</think>", "words < and <b> or [x] "),
        "string": fill(
            m2_content,
            "if a < b: return '<tag>' \n",
            "</parameter>\n</invoke>\n</minimax:tool_call>",
        ),
        "angles": fill(m2_content, "<"),
        "closers": fill(m2_content, "</parameter>"),
        "closer and space": fill(f"{m2_content}</parameter>", " ", "x"),
        "space": fill("", " ", "x"),
        "quoted openers": fill("", "x<minimax:tool_call>"),
        "unclosed tag": fill(f"{m2_content}<parameter ", "a"),
        "long tags": fill(m2_content, "<parameter " + "a" * 500),
        "JSON": fill(f'{m2}<parameter name="tags">', "[", "</parameter>\n</invoke>"),
        "parameters": m2
        + "".join(f'<parameter name="p{i}">{i}</parameter>\n' for i in numbered)
        + "</invoke>",
        "calls": fill(m2, call),
    }
    m3_texts = {
        "reasoning": fill("<mm:think>", "a < b ] and ]<] or <mm:thin "),
        "content": fill("", "words ]< and [x] or <tool "),
        "string": fill(m3_content, "if a[i] < b: return '<tag>' \n", f"{MARKER}</content>"),
        "brackets": fill(m3_content, "]"),
        "markers": fill(m3_content, MARKER),
        "quoted elements": fill(f"{m3_content}x", f"{MARKER}<b>{MARKER}</b>"),
        "quoted openers": fill(f"{m3_content}x", f"{MARKER}<b>", f"{MARKER}</c>" * 1000),
        "unclosed tag": fill(f"{m3_content}{MARKER}<", "a"),
        "spliced tags": fill(f"{m3_content}x", f"{MARKER}<invoke x{MARKER}<yy"),
        "wrong closers": fill(m3, f"{MARKER}<path>a{MARKER}</q>"),
        "arguments": m3 + "".join(f"{MARKER}<p{i}>v{i}{MARKER}</p{i}>" for i in numbered),
        "items": fill(
            f"{m3}{MARKER}<tags>", f"{MARKER}<item>ab{MARKER}</item>", f"{MARKER}</tags>"
        ),
        "untyped items": fill(
            f"{m3_event}{MARKER}<any>", f"{MARKER}<item>ab{MARKER}</item>", f"{MARKER}</any>"
        ),
        "repeated members": fill(
            f"{m3_event}{MARKER}<meta>", f"{MARKER}<a>v{MARKER}</a>", f"{MARKER}</meta>"
        ),
        "deep nesting": fill(f"{m3_event}{MARKER}<any>", f"{MARKER}<a>"),
        "space": fill(f"{m3_event}{MARKER}<any>", " "),
        "calls": fill(f"{m3}{MARKER}</invoke>", f'{MARKER}<invoke name="ping">{MARKER}</invoke>\n'),
    }
    return {f"m2 {name}": (MINIMAX_M2, text) for name, text in m2_texts.items()} | {
        f"m3 {name}": (MINIMAX_M3, text) for name, text in m3_texts.items()
    }


def seconds_to_read(format: OutputFormat, text: str, *, size: int) -> float:
    chunks = text_chunks(text[i : i + size] for i in range(0, len(text), size))
    parser = OutputParser(format, tools=TOOLS, in_reasoning=format is MINIMAX_M2, tag_ids=None)
    start = time.process_time()
    for chunk in chunks:
        parser.feed(chunk)
    parser.finish()
    return time.process_time() - start
