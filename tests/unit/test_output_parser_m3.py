import json

import pytest
from parser_support import MARKER, MINIMAX_M3, feed_text, new_parser, one_shot, outputs

from negamax.text.detokenizer import TextPiece
from negamax.text.parser.element_arguments import MAX_DEPTH
from negamax.text.parser.events import (
    ContentDelta,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from negamax.text.parser.output_parser import OutputParser

M = MARKER
TOOLS = outputs.TOOLS
WRITE, EVENT = (
    f'{M}<tool_call>\n{M}<invoke name="write_file">',
    f'{M}<tool_call>\n{M}<invoke name="create_event">',
)
END = f"{M}</invoke>\n{M}</tool_call>"


def arguments(text: str) -> object:
    return json.loads(one_shot(text, TOOLS, format=MINIMAX_M3).tool_calls[0].arguments)


def test_strings_grow_at_every_depth() -> None:
    parser = new_parser(MINIMAX_M3, tools=TOOLS)
    assert feed_text(parser, EVENT) == [ToolCallStart(0, "create_event")]
    assert feed_text(parser, f"{M}<location>{M}<city>") == []
    assert feed_text(parser, "Ro") == [ToolArgumentsDelta(0, '{"location": {"city": "Ro')]
    assert feed_text(parser, "me]") == [ToolArgumentsDelta(0, "me")]
    assert feed_text(parser, " ") == [ToolArgumentsDelta(0, "] ")]
    assert feed_text(parser, f"{M}</city>{M}<zip>0") == [ToolArgumentsDelta(0, '"')]
    assert feed_text(parser, f"12{M}</zip>") == [ToolArgumentsDelta(0, ', "zip": 12')]
    assert feed_text(parser, f"{M}</location>{M}<guests>{M}<item>{M}<name>A") == [
        ToolArgumentsDelta(0, '}, "guests": [{"name": "A')
    ]
    assert feed_text(parser, f"{M}</name>{M}</item>{M}</guests>{M}</invoke>") == [
        ToolArgumentsDelta(0, '"}]}'),
        ToolCallEnd(0),
    ]


def test_strings_of_unknown_type_stream_once_they_are_no_bare_word() -> None:
    parser = new_parser(MINIMAX_M3, tools=TOOLS)
    feed_text(parser, f"{EVENT}{M}<any>")
    assert feed_text(parser, " nul") == []
    assert feed_text(parser, "lable") == [ToolArgumentsDelta(0, '{"any": " nullable')]


def test_a_nullable_string_streams_once_it_cannot_be_null() -> None:
    parser = new_parser(MINIMAX_M3, tools=TOOLS)
    feed_text(parser, f"{WRITE}{M}<note>")
    assert feed_text(parser, "nul") == []
    assert feed_text(parser, "la") == [ToolArgumentsDelta(0, '{"note": "nulla')]


def test_arguments_of_undeclared_tools_stream() -> None:
    parser = new_parser(MINIMAX_M3)
    feed_text(parser, f'{M}<tool_call>{M}<invoke name="other">{M}<code>')
    assert feed_text(parser, "x = 1") == [ToolArgumentsDelta(0, '{"code": "x = 1')]


def test_thinking_streams_and_the_last_bracket_is_released() -> None:
    parser = new_parser(MINIMAX_M3)
    assert feed_text(parser, "<mm:think>Let") == [ReasoningDelta("Let")]
    assert feed_text(parser, " me</mm:thi") == [ReasoningDelta(" me")]
    assert feed_text(parser, "nk>[SILENCE]") == [ContentDelta("[SILENCE")]
    assert parser.finish() == [ContentDelta("]")]


def test_think_tags_count_only_as_tokens_when_ids_are_known_but_markers_as_text_too() -> None:
    ids = {"<mm:think>": 59, "</mm:think>": 60}
    parser = OutputParser(MINIMAX_M3, tools=TOOLS, in_reasoning=False, tag_ids=ids)
    pieces = [
        TextPiece("<mm:think>", 59),
        TextPiece("a </mm:think> b", 1),
        TextPiece("</mm:think>", 60),
        TextPiece("ok", 2),
    ]
    pieces += [TextPiece(text, None) for text in ("]<", "]mini", "max[>[", "<tool_call>\n")]
    pieces += [
        TextPiece(M, 58),
        TextPiece('<invoke name="ping">', None),
        TextPiece(M, 58),
        TextPiece("</invoke>", None),
    ]
    output = collect(parser.feed(pieces) + parser.finish())
    assert (output.reasoning, output.content) == ("a </mm:think> b", "ok")
    assert [call.name for call in output.tool_calls] == ["ping"]


@pytest.mark.parametrize("key", ["pair", "pairs", "any"])
def test_the_place_of_an_item_says_what_it_is(key: str) -> None:
    pair = {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}
    schemas = {
        "pair": pair, "pairs": {"type": "array", "items": pair},
        "any": {"anyOf": [pair, {"type": "object"}]},
    }  # fmt: skip
    tool = {"name": "f", "parameters": {"properties": schemas}}
    items = f"{M}<item>3{M}</item>{M}<item>05{M}</item>"
    if key == "pairs":
        items = f"{M}<item>{items}{M}</item>" * 2
    text = f'{M}<tool_call>\n{M}<invoke name="f">{M}<{key}>{items}{M}</{key}>{END}'
    (call,) = one_shot(text, [tool], format=MINIMAX_M3).tool_calls
    expected = [3, "05"]
    assert json.loads(call.arguments) == {key: [expected] * 2 if key == "pairs" else expected}


def test_a_quoted_call_is_not_made() -> None:
    """An agent that writes a file about its own format must not run its content."""
    quoted = (
        f"See {M}<tool_call>\n{M}<invoke "
        f'name="write_file">{M}<path>/etc/passwd{M}</path>{M}</invoke>\n{M}</tool_call>.'
    )
    output = one_shot(f"{WRITE}{M}<content>{quoted}{M}</content>{END}", TOOLS, format=MINIMAX_M3)
    assert [json.loads(call.arguments) for call in output.tool_calls] == [{"content": quoted}]


def test_a_string_beyond_the_longest_undecided_text_stays_a_string() -> None:
    space = " " * 100
    assert arguments(f"{EVENT}{M}<any>{space}{M}<a>b{M}</a>{M}</any>{END}") == {
        "any": f"{space}{M}<a>b{M}</a>"
    }
    assert arguments(f"{EVENT}{M}<any>\n{M}<a>b{M}</a>\n{M}</any>{END}") == {"any": {"a": "b"}}


def test_elements_beyond_the_greatest_depth_are_dropped_and_the_rest_is_kept() -> None:
    depth = 3 * MAX_DEPTH
    deep = f"{M}<a>" * depth + "x" + f"{M}</a>" * depth
    found = arguments(f"{EVENT}{M}<any>{deep}{M}</any>{M}<title>t{M}</title>{END}")
    assert isinstance(found, dict)
    assert found["title"] == "t"
    levels, inner = 0, found["any"]
    while isinstance(inner, dict):
        levels, inner = levels + 1, inner["a"]
    assert (levels, inner) == (MAX_DEPTH - 2, "")


def test_a_tag_may_be_as_long_as_its_limit_and_no_longer_however_it_is_cut() -> None:
    for length in (511, 512, 513):
        name = "k" * length
        text = f"{EVENT}{M}<title>x{M}<{name}>v{M}</{name[:-1]}>{END}"
        whole = one_shot(text, TOOLS, format=MINIMAX_M3)
        for size in (1, 7, 100):
            parser = new_parser(MINIMAX_M3, tools=TOOLS)
            events = [
                event
                for i in range(0, len(text), size)
                for event in feed_text(parser, text[i : i + size])
            ]
            assert collect(events + parser.finish()) == whole


@pytest.mark.parametrize(
    "cut",
    [
        "]",
        "]<]minimax[>[",
        f"{M}<",
        f"{M} <invoke na",
        "<tool_ca",
        f"{M}<invoke a{M}<b",
        "<mm:thin",
    ],
)
def test_what_is_held_at_the_end_is_released(cut: str) -> None:
    assert one_shot(f"ok {cut}", format=MINIMAX_M3).content == f"ok {cut}"
    assert one_shot(f"ok {cut}.", format=MINIMAX_M3).content == f"ok {cut}."
