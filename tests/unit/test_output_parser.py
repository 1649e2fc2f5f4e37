"""MiniMax-M2 output to reasoning, content and calls: the shared cases, and stream equals non-stream for every cut."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_support import make_tokenizer

from negamax.text.detokenizer import Detokenizer, TextPiece
from negamax.text.minimax_m2_format import MINIMAX_M2
from negamax.text.output_parser import (
    ContentDelta,
    OutputParser,
    ParsedOutput,
    ParserEvent,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    collect,
    parse,
)
from negamax.text.tag_lexer import MAX_ATTRIBUTE_CHARS

SHARED_CASES = Path(__file__).parents[3] / "shared" / "cases" / "parser_cases.jsonl"
OWN_CASES = Path(__file__).parents[1] / "golden" / "minimax_m2_outputs.jsonl"

# Policy cases where we choose otherwise: id -> reason. All others must pass.
OTHER_CHOICE: dict[str, str] = {}

TAG_IDS = {"<think>": 50, "</think>": 51, "<minimax:tool_call>": 52, "</minimax:tool_call>": 53}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "content": {"type": "string"},
                    "mode": {"type": "integer"},
                    "note": {"type": ["string", "null"]},
                    "tags": {"type": "array"},
                },
            },
        },
    }
]


def read_cases(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    cases = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    return [case for case in cases if case["format"] == "m2"]


CASES = read_cases(SHARED_CASES) + read_cases(OWN_CASES)


def stream(
    chunks: Iterable[Sequence[TextPiece]],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    tag_ids: dict[str, int] | None = None,
) -> list[ParserEvent]:
    parser = OutputParser(MINIMAX_M2, tools=tools, in_reasoning=True, tag_ids=tag_ids)
    events = [event for chunk in chunks for event in parser.feed(chunk)]
    return events + parser.finish()


def text_chunks(parts: Iterable[str]) -> list[list[TextPiece]]:
    return [[TextPiece(part, None)] for part in parts]


def cut_at(text: str, positions: Iterable[int]) -> list[str]:
    borders = [0, *sorted(positions), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(borders)]


def one_shot(text: str, tools: Sequence[dict[str, Any]] | None = None) -> ParsedOutput:
    return parse(MINIMAX_M2, text, tools=tools, in_reasoning=True)


def comparable(reasoning: str | None, content: str | None, calls: Iterable[tuple[str, Any]]) -> str:
    """The comparison of the cases: white space normalised in text, null equal to "", arguments as JSON."""
    texts = [" ".join((text or "").split()) for text in (reasoning, content)]
    return json.dumps([*texts, [[name, arguments] for name, arguments in calls]], sort_keys=True)


def check(case: dict[str, Any], output: ParsedOutput) -> None:
    expected = case["expected"]
    wanted = comparable(
        expected["reasoning"], expected["content"], [(call["name"], call["arguments"]) for call in expected["tool_calls"]]
    )
    calls = [(call.name, json.loads(call.arguments)) for call in output.tool_calls]
    assert comparable(output.reasoning, output.content, calls) == wanted


def check_well_formed(events: Sequence[ParserEvent]) -> None:
    """Calls follow each other, have a name first, and arguments that are one JSON object when they end; no delta is empty."""
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
    assert open_call is None


@pytest.mark.skipif(not SHARED_CASES.exists(), reason="the shared parser cases are not beside this checkout")
def test_shared_cases_are_found() -> None:
    assert len(read_cases(SHARED_CASES)) >= 60


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
class TestCases:
    def test_parsed_whole(self, case: dict[str, Any]) -> None:
        if case["id"] in OTHER_CHOICE:
            assert case["tier"] == "policy", "core cases are not ours to choose"
            pytest.skip(OTHER_CHOICE[case["id"]])
        check(case, one_shot(case["model_text"], case["tools"]))

    def test_every_cut_gives_the_same(self, case: dict[str, Any]) -> None:
        text = case["model_text"]
        whole = one_shot(text, case["tools"])
        rng = random.Random(case["id"])
        cuts = [[i] for i in range(1, len(text))] + [range(1, len(text))]
        cuts += [rng.sample(range(len(text)), min(len(text), rng.randint(2, 30))) for _ in range(40)]
        for positions in cuts:
            events = stream(text_chunks(cut_at(text, positions)), tools=case["tools"])
            check_well_formed(events)
            assert collect(events) == whole

    def test_tag_tokens_give_the_same(self, case: dict[str, Any]) -> None:
        """The text as a model emits it: tags as their tokens. Quoted tags cannot be told apart from it by the text alone."""
        text = case["model_text"]
        pieces = tagged_pieces(text)
        events = stream([[piece] for piece in pieces], tools=case["tools"], tag_ids=TAG_IDS)
        assert collect(events) == one_shot(text, case["tools"])


def tagged_pieces(text: str) -> list[TextPiece]:
    """`text` with every tag as one piece with its id, and all other characters one by one."""
    pieces: list[TextPiece] = []
    while text:
        tag = next((tag for tag in TAG_IDS if text.startswith(tag)), None)
        pieces.append(TextPiece(tag, TAG_IDS[tag]) if tag else TextPiece(text[0], None))
        text = text[len(pieces[-1].text) :]
    return pieces


FRAGMENTS = [
    "<think>",
    "</think>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    '<invoke name="write_file">',
    '<invoke name="other">',
    '<invoke name write_file">',
    '<invoke name="">',
    "</invoke>",
    '<parameter name="path">',
    '<parameter name="content">',
    "<parameter name='mode'>",
    '<parameter name="note">',
    '<parameter name="tags">',
    '<parameter name="free">',
    "<parameter>",
    "</parameter>",
    "\n",
    " ",
    "<",
    "</",
    "null",
    "nul",
    "5",
    "[1, 2]",
    '"\\',
    "word",
    "🙂",
]
OUTPUTS = st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join)
CALLS = OUTPUTS.map(lambda text: f'ok\n</think>\n\n<minimax:tool_call>\n<invoke name="write_file">\n{text}')


@settings(max_examples=600, deadline=None)
@given(text=OUTPUTS | CALLS, seed=st.integers(0, 2**32))
def test_streamed_equals_whole_for_generated_outputs(text: str, seed: int) -> None:
    whole = one_shot(text, TOOLS)
    rng = random.Random(seed)
    for num_cuts in (1, 4, len(text)):
        positions = rng.sample(range(len(text)), min(num_cuts, len(text)))
        events = stream(text_chunks(cut_at(text, positions)), tools=TOOLS)
        check_well_formed(events)
        assert collect(events) == whole


@settings(max_examples=200, deadline=None)
@given(text=OUTPUTS | CALLS, sizes=st.lists(st.integers(1, 6), min_size=1, max_size=10))
def test_grouping_of_token_pieces_does_not_matter(text: str, sizes: list[int]) -> None:
    pieces = tagged_pieces(text)
    chunks, start = [], 0
    while start < len(pieces):
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(pieces[start : start + size])
        start += size
    whole = stream([pieces], tools=TOOLS, tag_ids=TAG_IDS)
    events = stream(chunks, tools=TOOLS, tag_ids=TAG_IDS)
    check_well_formed(events)
    assert collect(events) == collect(whole)


VALUES = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('<>/\n"\\ '), max_size=40)


@settings(deadline=None)
@given(path=VALUES, content=VALUES, mode=st.integers(), tags=st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_what_the_template_writes_is_read_back(path: str, content: str, mode: int, tags: list[str]) -> None:
    arguments = {"path": path, "content": content, "mode": mode, "tags": tags}
    lines = [
        f'<parameter name="{key}">{value if isinstance(value, str) else json.dumps(value)}</parameter>\n'
        for key, value in arguments.items()
    ]
    call = '<minimax:tool_call>\n<invoke name="write_file">\n' + "".join(lines) + "</invoke>\n</minimax:tool_call>"
    output = one_shot("why\n</think>\n\n\n" + call, TOOLS)
    assert (output.reasoning, output.content) == ("why", None)
    assert [json.loads(call.arguments) for call in output.tool_calls] == [arguments]


@settings(deadline=None)
@given(content=st.text(st.characters(exclude_categories=["Cs"])))
def test_plain_answers_are_untouched(content: str) -> None:
    answer = f"Answer: {content}"
    assert one_shot(f"\n</think>\n\n{answer}").content == answer


def feed_text(parser: OutputParser, text: str) -> list[ParserEvent]:
    return parser.feed([TextPiece(text, None)])


def test_string_arguments_grow_while_they_are_generated() -> None:
    parser = OutputParser(MINIMAX_M2, tools=TOOLS, in_reasoning=True, tag_ids=None)
    feed_text(parser, "x</think>\n\n<minimax:tool_call>\n")
    assert feed_text(parser, '<invoke name="write_file">') == [ToolCallStart(0, "write_file")]
    assert feed_text(parser, '\n<parameter name="content">') == []
    assert feed_text(parser, "def") == [ToolArgumentsDelta(0, '{"content": "def')]
    assert feed_text(parser, ' f():\n  "') == [ToolArgumentsDelta(0, ' f():\\n  \\"')]
    assert feed_text(parser, "</parameter>\n") == []
    assert feed_text(parser, '<parameter name="mode">') == [ToolArgumentsDelta(0, '"')]
    assert feed_text(parser, "42") == []
    assert feed_text(parser, "0</parameter>\n</invoke>") == [ToolArgumentsDelta(0, ', "mode": 420}'), ToolCallEnd(0)]


def test_nullable_string_streams_once_it_cannot_be_null() -> None:
    parser = OutputParser(MINIMAX_M2, tools=TOOLS, in_reasoning=True, tag_ids=None)
    feed_text(parser, '</think><minimax:tool_call><invoke name="write_file"><parameter name="note">')
    assert feed_text(parser, "nu") == []
    assert feed_text(parser, "ts") == [ToolArgumentsDelta(0, '{"note": "nuts')]


def test_reasoning_and_content_stream_at_once() -> None:
    parser = OutputParser(MINIMAX_M2, tools=None, in_reasoning=True, tag_ids=None)
    assert feed_text(parser, "Let me") == [ReasoningDelta("Let me")]
    assert feed_text(parser, " see <b") == [ReasoningDelta(" see <b")]
    assert feed_text(parser, "\n</think>\n\nYes: 1 <") == [ContentDelta("Yes: 1")]
    assert feed_text(parser, " 2") == [ContentDelta(" < 2")]
    assert parser.finish() == []


def test_tags_count_only_as_tokens_when_ids_are_known() -> None:
    quoted = 'see </think> and <minimax:tool_call>\n<invoke name="write_file">'
    pieces = [TextPiece(quoted, None), TextPiece("</think>", 51), TextPiece("\n\nthe answer", None)]
    output = collect(stream([pieces], tools=TOOLS, tag_ids=TAG_IDS))
    assert output == ParsedOutput(quoted, "the answer", [])


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_from_token_ids_to_the_parsed_answer(case: dict[str, Any]) -> None:
    tokenizer = make_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    tag_ids = {tag: tokenizer.encode(tag)[0] for tag in TAG_IDS}
    parser = OutputParser(MINIMAX_M2, tools=case["tools"], in_reasoning=True, tag_ids=tag_ids)
    events: list[ParserEvent] = []
    for token_id in tokenizer.encode(case["model_text"]):
        events += parser.feed(detokenizer.push([token_id]))
    events += parser.feed(detokenizer.finish()) + parser.finish()
    check_well_formed(events)
    assert collect(events) == one_shot(case["model_text"], case["tools"])


def test_a_format_may_have_no_tags_in_text() -> None:
    tokens_only = dataclasses.replace(MINIMAX_M2, patterns=())
    parser = OutputParser(tokens_only, tools=None, in_reasoning=True, tag_ids=TAG_IDS)
    pieces = [TextPiece("a </think> <", None), TextPiece("</think>", 51), TextPiece('<invoke name="f">', None)]
    assert collect([*parser.feed(pieces), *parser.finish()]) == ParsedOutput("a </think> <", '<invoke name="f">', [])


def test_indentation_of_the_first_line_is_kept() -> None:
    assert one_shot("\n  why\n</think>\n\n    code\n  more\n") == ParsedOutput("  why", "    code\n  more\n", [])


def test_beginning_of_a_tag_before_a_tag_token_is_text() -> None:
    pieces = [TextPiece("a <", None), TextPiece("</think>", 51), TextPiece("b", None)]
    assert collect(stream([pieces], tag_ids=TAG_IDS)) == ParsedOutput("a <", "b", [])


def test_space_after_the_last_block_is_layout() -> None:
    call = '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>\n'
    assert one_shot(f"a</think>\n\nb\n{call}").content == "b"
    assert one_shot("a</think>\n\nb\n").content == "b\n"


def test_endless_tags_are_released_as_text() -> None:
    parser = OutputParser(MINIMAX_M2, tools=None, in_reasoning=False, tag_ids=None)
    text = "see <parameter " + "a" * 2 * MAX_ATTRIBUTE_CHARS
    events = [event for char in text for event in feed_text(parser, char)]
    assert collect(events).content == text


def test_without_open_reasoning_everything_is_content() -> None:
    assert parse(MINIMAX_M2, "\nHello.", tools=None, in_reasoning=False) == ParsedOutput(None, "Hello.", [])
    assert parse(MINIMAX_M2, "<think>a</think>b", tools=None, in_reasoning=False) == ParsedOutput("a", "b", [])


def test_duplicate_parameter_leaves_the_last_value() -> None:
    text = (
        '</think><minimax:tool_call><invoke name="write_file"><parameter name="path">a</parameter>'
        '<parameter name="path">b</parameter></invoke></minimax:tool_call>'
    )
    assert one_shot(text, TOOLS).tool_calls[0].arguments == '{"path": "a", "path": "b"}'


HEAD = 'x\n</think>\n\n<minimax:tool_call>\n<invoke name="write_file">\n<parameter name="content">'
LONG_OUTPUTS = {
    "words": "plain words here. " * 55_000,
    "code": HEAD + "if a < b: return '<tag>' \n" * 38_000 + "</parameter>\n</invoke>\n</minimax:tool_call>",
    "angles": HEAD + "<" * 1_000_000,
    "closers": HEAD + "</parameter>" * 83_000,
    "closer and space": HEAD + "</parameter>" + " " * 1_000_000 + "x",
    "space": " " * 1_000_000 + "x",
    "openers": "x<minimax:tool_call>" * 50_000,
    "long tags": HEAD + ("<parameter " + "a" * 500) * 1950,
    "brackets": HEAD.replace("content", "tags") + "[" * 1_000_000 + "</parameter>\n</invoke>",
    "calls": HEAD
    + "</parameter></invoke>"
    + '\n<invoke name="write_file"><parameter name="mode">5</parameter></invoke>' * 14_000,
}


@pytest.mark.parametrize("name", LONG_OUTPUTS)
def test_a_megabyte_takes_under_a_second(name: str) -> None:
    text = LONG_OUTPUTS[name]
    start = time.process_time()
    one_shot(text, TOOLS)
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize("name", LONG_OUTPUTS)
def test_streaming_time_is_linear_and_close_to_that_of_plain_text(name: str) -> None:
    def seconds(text: str) -> float:
        chunks = text_chunks(text[i : i + 4] for i in range(0, len(text), 4))
        start = time.process_time()
        stream(chunks, tools=TOOLS)
        return time.process_time() - start

    plain = seconds(LONG_OUTPUTS["words"][:100_000])
    assert seconds(LONG_OUTPUTS[name][:100_000]) < 10 * max(plain, 0.05)
    assert seconds(LONG_OUTPUTS[name][:400_000]) < 40 * max(plain, 0.05)
