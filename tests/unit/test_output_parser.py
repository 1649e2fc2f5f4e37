import dataclasses
import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import parser_support as parsing
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from parser_support import MARKER, MINIMAX_M2, MINIMAX_M3, TOOLS, feed_text, new_parser, parse
from text_support import definition_text, make_tokenizer

from negamax.text.detokenizer import Detokenizer, TextPiece
from negamax.text.parser.element_arguments import MAX_DEPTH
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
from negamax.text.parser.output_parser import Thinking
from negamax.text.parser.tag_lexer import MAX_ATTRIBUTE_CHARS, TagBeginnings
from negamax.text.tokenizer import Tokenizer

M = MARKER
TAG_IDS = {"<think>": 50, "</think>": 51, "<minimax:tool_call>": 52, "</minimax:tool_call>": 53}
CLOSER = TextPiece("</think>", 51)
M2_WRITE = '</think><minimax:tool_call><invoke name="write_file">'
M2_PATH = '<invoke name="write_file">\n<parameter name="path">a</parameter>\n</invoke>'
M2_CALL = f"<minimax:tool_call>\n{M2_PATH}\n</minimax:tool_call>"
M3_WRITE = f'{M}<tool_call>\n{M}<invoke name="write_file">'
M3_EVENT = f'{M}<tool_call>\n{M}<invoke name="create_event">'
M3_END = f"{M}</invoke>\n{M}</tool_call>"

CASES = parsing.read_cases(parsing.CASE_FILES)
by_format = pytest.mark.parametrize("format", [MINIMAX_M2, MINIMAX_M3], ids=["m2", "m3"])
SEEDS = st.integers(0, 2**32)
UNICODE = st.characters(exclude_categories=["Cs"])


def make_m3_tokenizer() -> Tokenizer:
    definition = json.loads(definition_text())
    added = definition["added_tokens"]
    for text in (MARKER, "<mm:think>", "</mm:think>"):
        plain = dict.fromkeys(("special", "normalized", "single_word", "lstrip", "rstrip"), False)
        added.append({"id": 1 + max(token["id"] for token in added), "content": text, **plain})
    return Tokenizer(json.dumps(definition), config={})


TOKENIZERS = {"minimax_m2": make_tokenizer(), "minimax_m3": make_m3_tokenizer()}


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
class TestCases:
    def test_every_reading_is_as_expected(self, case: parsing.Case) -> None:
        parsed = parse(case.format, case.text, tools=case.tools, in_reasoning=case.in_reasoning)
        if case.id in parsing.OTHER_CHOICE:
            assert case.tier == "policy", "a core case must not be in OTHER_CHOICE"
            with pytest.raises(AssertionError, match=case.id):
                parsing.check_expected(case, parsed)
        else:
            parsing.check_expected(case, parsed)
        rng = random.Random(case.id)
        places = range(rng.randint(1, 8), len(case.text), 8)
        parsing.check_readings(case, rng, tools=case.tools, places=places)

    @pytest.mark.full
    def test_every_reading_is_the_same_when_split_at_each_place(self, case: parsing.Case) -> None:
        places = range(1, len(case.text))
        parsing.check_readings(case, random.Random(case.id), tools=case.tools, places=places)

    def test_token_ids_give_the_same_answer(self, case: parsing.Case) -> None:
        tokenizer = TOKENIZERS[case.format.name]
        detokenizer = Detokenizer(tokenizer)
        options: dict[str, Any] = {"tools": case.tools, "in_reasoning": case.in_reasoning}
        parser = new_parser(case.format, tag_ids=case.format.tag_ids(tokenizer), **options)
        events: list[ParserEvent] = []
        for token_id in tokenizer.encode(case.text):
            events += parser.feed(detokenizer.push([token_id]))
        events += parser.feed(detokenizer.finish()) + parser.finish()
        parsing.check_well_formed(events)
        whole = parse(case.format, case.text, **options)
        content = whole.content or ""
        if case.format.think_close in content:  # In the stream this tag is a token, not text.
            whole = dataclasses.replace(whole, content=content.replace(case.format.think_close, ""))
        assert collect(events) == whole


@by_format
@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_generated_outputs_read_the_same_in_pieces(format: OutputFormat, seed: int) -> None:
    parsing.check_generated(format, random.Random(seed), all_places=False)


@pytest.mark.full
@pytest.mark.timeout(1800)
@by_format
@settings(max_examples=300, deadline=None)
@given(seed=SEEDS)
def test_generated_outputs_read_the_same_at_each_split(format: OutputFormat, seed: int) -> None:
    parsing.check_generated(format, random.Random(seed), all_places=True)


FRAGMENTS = [*MARKER, "]<]mini", "max[>[", "</", "tool_call>", "<invoke ", "a", "\n", " ", '"']


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.sampled_from([*FRAGMENTS, "\\"]), max_size=30), place=st.integers(0, 60))
def test_m3_values_without_a_marker_are_kept(parts: list[str], place: int) -> None:
    value = "x" + "".join(parts) + "|"
    assume(MARKER not in value)
    head, tail = f"{M3_WRITE}{M}<content>{value[:place]}", f"{value[place:]}{M}</content>"
    chunks = parsing.text_chunks([head, f"{tail}{M}</invoke>"])
    (call,) = parsing.read_chunks(MINIMAX_M3, chunks, tools=TOOLS).tool_calls
    assert json.loads(call.arguments) == {"content": value}


@settings(deadline=None)
@given(
    texts=st.tuples(*[st.text(UNICODE | st.sampled_from('<>/\n"\\ '), max_size=40)] * 2),
    mode=st.integers(),
    tags=st.lists(st.text(UNICODE)),
)
def test_m2_calls_are_read_back(texts: tuple[str, str], mode: int, tags: list[str]) -> None:
    arguments = {"path": texts[0], "content": texts[1], "mode": mode, "tags": tags}
    block = parsing.write_block(MINIMAX_M2, [("write_file", arguments)])
    output = parse(MINIMAX_M2, f"why\n</think>\n\n{block}", tools=TOOLS)
    assert (output.reasoning, output.content) == ("why", None)
    assert parsing.calls_of(output) == [("write_file", arguments)]


@settings(deadline=None)
@given(content=st.text(UNICODE))
def test_plain_answers_are_unchanged(content: str) -> None:
    assume("<minimax:tool_call>" not in content)
    answer = f"Answer: {content}"
    assert parse(MINIMAX_M2, f"\n</think>\n\n{answer}").content == answer


def delta(text: str) -> ToolArgumentsDelta:
    return ToolArgumentsDelta(0, text)


# format and case -> pairs of a text and the events after it
STREAMS: dict[str, list[tuple[str, list[ParserEvent]]]] = {
    "m2 string arguments": [
        ("x</think>\n\n<minimax:tool_call>\n", [ReasoningDelta("x")]),
        ('<invoke name="write_file">', []),  # The arguments may be unreadable.
        ('\n<parameter name="content">', [ToolCallStart(0, "write_file")]),
        ("def", [delta('{"content": "def')]),
        (' f():\n  "', [delta(' f():\\n  \\"')]),
        ("</parameter>\n", []),
        ('<parameter name="mode">', [delta('"')]),
        ("42", []),
        ("0</parameter>\n</invoke>", [delta(', "mode": 420}'), ToolCallEnd(0)]),
    ],
    "m2 nullable string": [
        (f'{M2_WRITE}<parameter name="note">', [ToolCallStart(0, "write_file")]),
        ("nu", []),
        ("ts", [delta('{"note": "nuts')]),
    ],
    "m2 reasoning and content": [
        ("Let me", [ReasoningDelta("Let me")]),
        (" see <b", [ReasoningDelta(" see <b")]),
        ("\n</think>\n\nYes: 1 <", [ContentDelta("Yes: 1")]),
        (" 2", [ContentDelta(" < 2")]),
    ],
    "m3 strings at every depth": [
        (M3_EVENT, []),
        (f"{M}<location>{M}<city>", [ToolCallStart(0, "create_event")]),
        ("Ro", [delta('{"location": {"city": "Ro')]),
        ("me]", [delta("me")]),
        (" ", [delta("] ")]),
        (f"{M}</city>{M}<zip>0", [delta('"')]),
        (f"12{M}</zip>", [delta(', "zip": 12')]),
        (f"{M}</location>{M}<guests>{M}<item>{M}<name>A", [delta('}, "guests": [{"name": "A')]),
        (f"{M}</name>{M}</item>{M}</guests>{M}</invoke>", [delta('"}]}'), ToolCallEnd(0)]),
    ],
    "m3 unknown type that is no bare word": [
        (f"{M3_EVENT}{M}<any>", [ToolCallStart(0, "create_event")]),
        (" nul", []),
        ("lable", [delta('{"any": " nullable')]),
    ],
    "m3 nullable string": [
        (f"{M3_WRITE}{M}<note>", [ToolCallStart(0, "write_file")]),
        ("nul", []),
        ("la", [delta('{"note": "nulla')]),
    ],
    "m3 undeclared tool": [
        (f'{M}<tool_call>{M}<invoke name="other">{M}<code>', [ToolCallStart(0, "other")]),
        ("x = 1", [delta('{"code": "x = 1')]),
    ],
    "m3 thinking, and the last bracket": [
        ("<mm:think>Let", [ReasoningDelta("Let")]),
        (" me</mm:thi", [ReasoningDelta(" me")]),
        ("nk>[SILENCE]", [ContentDelta("[SILENCE")]),
        ("", [ContentDelta("]")]),  # the end
    ],
}


@pytest.mark.parametrize("name", STREAMS)
def test_text_streams_as_soon_as_it_is_certain(name: str) -> None:
    format, steps = parsing.FORMATS[name[:2]], STREAMS[name]
    parser = new_parser(format, tools=TOOLS)
    assert parser.in_reasoning is (format is MINIMAX_M2)
    for text, events in steps:
        assert (feed_text(parser, text) if text else parser.finish()) == events
    assert not parser.in_reasoning


QUOTED = 'see </think> and <minimax:tool_call>\n<invoke name="write_file">'
TOKENS_ONLY = dataclasses.replace(MINIMAX_M2, patterns=(), beginnings=TagBeginnings(()))
M3_IDS = {"<mm:think>": 59, "</mm:think>": 60}
M3_THINKING = ["<mm:think>", "a </mm:think> b", "</mm:think>", "ok"]
M3_PING = ["]<", "]mini", "max[>[", "<tool_call>\n", M, '<invoke name="ping">', M, "</invoke>"]


@pytest.mark.parametrize(
    ("format", "ids", "texts", "expected"),
    [
        (MINIMAX_M2, TAG_IDS, [QUOTED, "</think>", "\n\nthe answer"], (QUOTED, "the answer")),
        (MINIMAX_M2, TAG_IDS, ["a <", "</think>", "b"], ("a <", "b")),
        (TOKENS_ONLY, TAG_IDS, ["a </think> <", "</think>", '<invoke name="f">'],
         ("a </think> <", '<invoke name="f">')),
        # The markers of calls are also accepted as text.
        (MINIMAX_M3, M3_IDS, M3_THINKING + M3_PING, ("a </mm:think> b", "ok", "ping")),
    ],
)  # fmt: skip
def test_tags_with_ids_count_only_as_tokens(
    format: OutputFormat, ids: dict[str, int], texts: list[str], expected: tuple[str, ...]
) -> None:
    pieces = [TextPiece(text, ids.get(text)) for text in texts]
    output = parsing.read_chunks(
        format, [pieces], tools=TOOLS, in_reasoning=format is not MINIMAX_M3, tag_ids=ids
    )
    names = [call.name for call in output.tool_calls]
    assert (output.reasoning, output.content, *names) == expected


@pytest.mark.parametrize("thinking", [Thinking.SPLIT, Thinking.APPEND])
@pytest.mark.parametrize("step", [1, 100])
def test_a_closer_that_is_a_token_is_never_content(thinking: Thinking, step: int) -> None:
    said = TextPiece("So `</think>` ends it.", None)
    pieces = [CLOSER, said, CLOSER, TextPiece("\n\nYes.", None), CLOSER]
    chunks = [pieces[start : start + step] for start in range(0, len(pieces), step)]
    options: dict[str, Any] = {"in_reasoning": False, "tag_ids": TAG_IDS, "thinking": thinking}
    output = parsing.read_chunks(MINIMAX_M2, chunks, **options)
    assert output == ParsedOutput(None, "So `</think>` ends it.\n\nYes.", [])


def test_reasoning_and_content_are_split() -> None:
    for format, text, in_reasoning, expected in (
        (MINIMAX_M2, "\n  why\n</think>\n\n    co\n  de\n", True, ("  why", "    co\n  de\n")),
        (MINIMAX_M2, f"a</think>\n\nb\n{M2_CALL}\n", True, ("a", "b")),
        (MINIMAX_M2, "a</think>\n\nb\n", True, ("a", "b\n")),
        (MINIMAX_M2, "\nHello.", False, (None, "Hello.")),
        (MINIMAX_M2, "<think>a</think>b", False, ("a", "b")),
        (MINIMAX_M2.drop_calls(), f"x</think>\n\nok\n{M2_CALL}", True, ("x", f"ok\n{M2_CALL}")),
    ):
        output = parse(format, text, tools=TOOLS, in_reasoning=in_reasoning)
        assert (output.reasoning, output.content) == expected


def test_endless_tags_and_too_deep_elements_are_released_as_text() -> None:
    text = "see <parameter " + "a" * 2 * MAX_ATTRIBUTE_CHARS
    steps = parsing.stream(MINIMAX_M2, parsing.text_chunks(text), in_reasoning=False)
    assert collect(event for step in steps[:-1] for event in step).content == text
    deep = f"{M}<a>" * (MAX_DEPTH + 1) + "x" + f"{M}</a>" * (MAX_DEPTH + 1)
    text = f"{M3_EVENT}{M}<any>{deep}{M}</any>{M}<title>t{M}</title>{M3_END}"
    output = parse(MINIMAX_M3, text, tools=TOOLS)
    assert [call.is_whole for call in output.tool_calls] == [False]
    assert "x" in (output.content or "")


@pytest.mark.parametrize(("thinking", "opener"), [(Thinking.APPEND, "<think>"), (Thinking.RAW, "")])
def test_thinking_can_stay_in_the_content_as_generated(thinking: Thinking, opener: str) -> None:
    for text in ("\nI think.\n</think>\n\nHello <think>.\n", "I th\n"):
        output = parse(MINIMAX_M2, text, thinking=thinking)
        assert output == ParsedOutput(None, opener + text, [])
    output = parse(MINIMAX_M2, f"I call.\n{M2_CALL}", tools=TOOLS, thinking=thinking)
    assert (output.content, len(output.tool_calls)) == (f"{opener}I call.", 1)


@pytest.mark.parametrize(
    ("format", "prompt", "expected"),
    [
        (MINIMAX_M2, "]~b]user\nhi[e~[\n]~b]ai\n<think>\n", True),
        (MINIMAX_M2, "]~b]ai\n<think>\nI know that", True),
        (MINIMAX_M2, "]~b]ai\n<think>\nI know\n</think>\n\nHello", False),
        (MINIMAX_M2, "]~b]ai\n<think>\nx[e~[\n]~b]user\nhi[e~[\n", False),
        (MINIMAX_M2, "]~b]user\nwhat is <think>?[e~[\n]~b]ai\nHello", False),
        (MINIMAX_M2, "plain <think>", True),
        (MINIMAX_M3, "quoted <mm:think></mm:think>[e~[\n]~b]ai\n<mm:think>", True),
        (MINIMAX_M3, "quoted <mm:think>[e~[\n]~b]ai\n</mm:think>", False),
        (MINIMAX_M3, "quoted <mm:think>[e~[\n]~b]ai\n", False),
    ],
)
def test_prompts_that_open_reasoning(format: OutputFormat, prompt: str, expected: bool) -> None:
    assert format.opens_reasoning(prompt) is expected


# --- arguments of M3 -----------------------------------------------------------------------------


def m3_arguments(text: str, tools: Sequence[dict[str, Any]] = TOOLS) -> Any:
    (call,) = parse(MINIMAX_M3, text, tools=tools).tool_calls
    return json.loads(call.arguments)


@pytest.mark.parametrize("key", ["pair", "pairs", "any"])
def test_the_place_of_an_item_decides_its_type(key: str) -> None:
    pair = {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}
    pairs, either = {"type": "array", "items": pair}, {"anyOf": [pair, {"type": "object"}]}
    schemas = {"pair": pair, "pairs": pairs, "any": either}
    tool = {"name": "f", "parameters": {"properties": schemas}}
    items = f"{M}<item>3{M}</item>{M}<item>05{M}</item>"
    if key == "pairs":
        items = f"{M}<item>{items}{M}</item>" * 2
    text = f'{M}<tool_call>\n{M}<invoke name="f">{M}<{key}>{items}{M}</{key}>{M3_END}'
    assert m3_arguments(text, [tool]) == {key: [[3, "05"]] * 2 if key == "pairs" else [3, "05"]}


@pytest.mark.parametrize("tail", ['<parameter name="until>\nabc', '<parameter name="any" x="">y'])
def test_an_unreadable_call_is_shown_whole_and_once(tail: str) -> None:
    """Split the text within a tag in all ways. One tag begins with the declared name `until>`."""
    head = '<minimax:tool_call>\n<invoke name="write_file">\n{x'
    for begin, end in itertools.combinations(range(len(tail) + 1), 2):
        chunks = parsing.text_chunks([head + tail[:begin], tail[begin:end], tail[end:]])
        events = [
            event for step in parsing.stream(MINIMAX_M2, chunks, tools=TOOLS) for event in step
        ]
        assert collect(events).content == head + tail


def test_values_stay_strings_beyond_limits() -> None:
    inner, space = f"{M}<a>b{M}</a>", " " * 100
    found = m3_arguments(f"{M3_EVENT}{M}<any>{space}{inner}{M}</any>{M3_END}")
    assert found == {"any": f"{space}{inner}"}
    found = m3_arguments(f"{M3_EVENT}{M}<any>\n{inner}\n{M}</any>{M3_END}")
    assert found == {"any": {"a": "b"}}
    path = '<parameter name="path">'
    text = f"{M2_WRITE}{path}a</parameter>{path}b</parameter></invoke></minimax:tool_call>"
    (call,) = parse(MINIMAX_M2, text, tools=TOOLS).tool_calls
    assert call.arguments == '{"path": "a", "path": "b"}'
    # Check that an agent which writes a file about its own format does not run that file.
    quoted = f"See {M3_WRITE}{M}<path>/etc/passwd{M}</path>{M3_END}."
    found = m3_arguments(f"{M3_WRITE}{M}<content>{quoted}{M}</content>{M3_END}")
    assert found == {"content": quoted}


@pytest.mark.parametrize("length", [511, 512, 513])
def test_a_tag_at_its_length_limit_reads_the_same_in_pieces(length: int) -> None:
    name = "k" * length
    text = f"{M3_EVENT}{M}<title>x{M}<{name}>v{M}</{name[:-1]}>{M3_END}"
    for size in (1, 7, 100):
        chunks = parsing.text_chunks(text[i : i + size] for i in range(0, len(text), size))
        output = parsing.read_chunks(MINIMAX_M3, chunks, tools=TOOLS)
        assert output == parse(MINIMAX_M3, text, tools=TOOLS)


@pytest.mark.parametrize(
    "text", ["]", M, f"{M}<", f"{M} <invoke na", "<tool_ca", f"{M}<invoke a{M}<b", "<mm:thin"]
)
def test_held_text_is_released_at_the_end(text: str) -> None:
    assert parse(MINIMAX_M3, f"ok {text}").content == f"ok {text}"
    assert parse(MINIMAX_M3, f"ok {text}.").content == f"ok {text}."
