import dataclasses
import json
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from parser_support import (
    MARKER,
    MINIMAX_M2,
    MINIMAX_M3,
    feed_text,
    new_parser,
    one_shot,
    outputs,
    parse,
    proof,
)
from text_support import definition_text, make_tokenizer

from negamax.text.detokenizer import Detokenizer, TextPiece
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
from negamax.text.parser.output_parser import OutputParser, Thinking
from negamax.text.parser.tag_lexer import MAX_ATTRIBUTE_CHARS, NO_BEGINNINGS
from negamax.text.tokenizer import Tokenizer

CASES = proof.read_cases(proof.CASE_FILES)
TAG_IDS = {"<think>": 50, "</think>": 51, "<minimax:tool_call>": 52, "</minimax:tool_call>": 53}
TOOLS = outputs.TOOLS
SEEDS = st.integers(0, 2**32)


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
class TestCases:
    def test_parsed_whole(self, case: proof.Case) -> None:
        parsed = parse(case.format, case.text, tools=case.tools, in_reasoning=case.in_reasoning)
        if case.id in proof.OTHER_CHOICE:
            assert case.tier == "policy", "core cases are not ours to choose"
            with pytest.raises(AssertionError, match=case.id):
                proof.check_expected(case, parsed)
        else:
            proof.check_expected(case, parsed)

    def test_every_reading_gives_the_same(self, case: proof.Case) -> None:
        rng = random.Random(case.id)
        places = range(rng.randint(1, 8), len(case.text), 8)
        proof.check_readings(case, rng, tools=case.tools, places=places)

    @pytest.mark.full
    def test_every_reading_gives_the_same_when_cut_at_each_place(self, case: proof.Case) -> None:
        places = range(1, len(case.text))
        proof.check_readings(case, random.Random(case.id), tools=case.tools, places=places)

    def test_from_token_ids_to_the_parsed_answer(self, case: proof.Case) -> None:
        tokenizer = TOKENIZERS[case.format.name]
        detokenizer = Detokenizer(tokenizer)
        parser = OutputParser(
            case.format,
            tools=case.tools,
            in_reasoning=case.in_reasoning,
            tag_ids=case.format.tag_ids(tokenizer),
        )
        events: list[ParserEvent] = []
        for token_id in tokenizer.encode(case.text):
            events += parser.feed(detokenizer.push([token_id]))
        events += parser.feed(detokenizer.finish()) + parser.finish()
        proof.check_well_formed(events)
        whole = parse(case.format, case.text, tools=case.tools, in_reasoning=case.in_reasoning)
        content = whole.content or ""
        if case.format.think_close in content:  # a token here, so not a quotation
            whole = dataclasses.replace(whole, content=content.replace(case.format.think_close, ""))
        assert collect(events) == whole


def make_m3_tokenizer() -> Tokenizer:
    definition = json.loads(definition_text())
    next_id = 1 + max(token["id"] for token in definition["added_tokens"])
    for offset, text in enumerate((MARKER, "<mm:think>", "</mm:think>")):
        token = {"id": next_id + offset, "content": text, "special": False, "normalized": False}
        definition["added_tokens"].append(
            {**token, "single_word": False, "lstrip": False, "rstrip": False}
        )
    return Tokenizer(
        json.dumps(definition), config={"bos_token": "]~!b[", "eos_token": {"content": "[e~["}}
    )


TOKENIZERS = {"minimax_m2": make_tokenizer(), "minimax_m3": make_m3_tokenizer()}


@pytest.mark.parametrize("format", [MINIMAX_M2, MINIMAX_M3], ids=["m2", "m3"])
@settings(max_examples=80, deadline=None)
@given(seed=SEEDS)
def test_generated_outputs_read_the_same_in_pieces(format: OutputFormat, seed: int) -> None:
    proof.check_generated(format, random.Random(seed), all_places=False)


@pytest.mark.full
@pytest.mark.parametrize("format", [MINIMAX_M2, MINIMAX_M3], ids=["m2", "m3"])
@settings(max_examples=300, deadline=None)
@given(seed=SEEDS)
def test_generated_outputs_read_the_same_when_cut_at_each_place(
    format: OutputFormat, seed: int
) -> None:
    proof.check_generated(format, random.Random(seed), all_places=True)


FRAGMENTS = [
    *MARKER,
    "]<]mini",
    "max[>[",
    "</",
    "tool_call>",
    "<invoke ",
    "a",
    "\n",
    " ",
    '"',
    "\\",
]
PARTS = st.lists(st.sampled_from(FRAGMENTS), max_size=30)


@settings(max_examples=150, deadline=None)
@given(parts=PARTS, cut=st.integers(0, 60))
def test_a_value_without_a_marker_comes_out_as_it_went_in(parts: list[str], cut: int) -> None:
    value = "x" + "".join(parts) + "|"
    assume(MARKER not in value)
    parser = new_parser(MINIMAX_M3, tools=TOOLS)
    events = feed_text(
        parser,
        f'{MARKER}<tool_call>{MARKER}<invoke name="write_file">{MARKER}<content>{value[:cut]}',
    )
    events += (
        feed_text(parser, f"{value[cut:]}{MARKER}</content>{MARKER}</invoke>") + parser.finish()
    )
    assert json.loads(collect(events).tool_calls[0].arguments) == {"content": value}


VALUES = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from('<>/\n"\\ '), max_size=40
)


@settings(deadline=None)
@given(
    path=VALUES,
    content=VALUES,
    mode=st.integers(),
    tags=st.lists(st.text(st.characters(exclude_categories=["Cs"]))),
)
def test_what_the_template_writes_is_read_back(
    path: str, content: str, mode: int, tags: list[str]
) -> None:
    arguments = {"path": path, "content": content, "mode": mode, "tags": tags}
    lines = [
        f"<parameter "
        f'name="{key}">{value if isinstance(value, str) else json.dumps(value)}</parameter>\n'
        for key, value in arguments.items()
    ]
    call = (
        '<minimax:tool_call>\n<invoke name="write_file">\n'
        + "".join(lines)
        + "</invoke>\n</minimax:tool_call>"
    )
    output = one_shot("why\n</think>\n\n\n" + call, TOOLS)
    assert (output.reasoning, output.content) == ("why", None)
    assert [json.loads(call.arguments) for call in output.tool_calls] == [arguments]


@settings(deadline=None)
@given(content=st.text(st.characters(exclude_categories=["Cs"])))
def test_plain_answers_are_untouched(content: str) -> None:
    assume("<minimax:tool_call>" not in content)
    answer = f"Answer: {content}"
    assert one_shot(f"\n</think>\n\n{answer}").content == answer


def test_string_arguments_grow_while_they_are_generated() -> None:
    parser = new_parser(tools=TOOLS)
    feed_text(parser, "x</think>\n\n<minimax:tool_call>\n")
    assert feed_text(parser, '<invoke name="write_file">') == [ToolCallStart(0, "write_file")]
    assert feed_text(parser, '\n<parameter name="content">') == []
    assert feed_text(parser, "def") == [ToolArgumentsDelta(0, '{"content": "def')]
    assert feed_text(parser, ' f():\n  "') == [ToolArgumentsDelta(0, ' f():\\n  \\"')]
    assert feed_text(parser, "</parameter>\n") == []
    assert feed_text(parser, '<parameter name="mode">') == [ToolArgumentsDelta(0, '"')]
    assert feed_text(parser, "42") == []
    assert feed_text(parser, "0</parameter>\n</invoke>") == [
        ToolArgumentsDelta(0, ', "mode": 420}'),
        ToolCallEnd(0),
    ]


def test_nullable_string_streams_once_it_cannot_be_null() -> None:
    parser = new_parser(tools=TOOLS)
    feed_text(
        parser, '</think><minimax:tool_call><invoke name="write_file"><parameter name="note">'
    )
    assert feed_text(parser, "nu") == []
    assert feed_text(parser, "ts") == [ToolArgumentsDelta(0, '{"note": "nuts')]


def test_reasoning_and_content_stream_at_once() -> None:
    parser = new_parser()
    assert feed_text(parser, "Let me") == [ReasoningDelta("Let me")]
    assert feed_text(parser, " see <b") == [ReasoningDelta(" see <b")]
    assert feed_text(parser, "\n</think>\n\nYes: 1 <") == [ContentDelta("Yes: 1")]
    assert feed_text(parser, " 2") == [ContentDelta(" < 2")]
    assert parser.finish() == []


def test_tags_count_only_as_tokens_when_ids_are_known() -> None:
    quoted = 'see </think> and <minimax:tool_call>\n<invoke name="write_file">'
    pieces = [TextPiece(quoted, None), TextPiece("</think>", 51), TextPiece("\n\nthe answer", None)]
    parser = OutputParser(MINIMAX_M2, tools=TOOLS, in_reasoning=True, tag_ids=TAG_IDS)
    output = collect(parser.feed(pieces) + parser.finish())
    assert output == ParsedOutput(quoted, "the answer", [])


@pytest.mark.parametrize("thinking", [Thinking.SPLIT, Thinking.APPEND])
@pytest.mark.parametrize("step", [1, 100])
def test_a_closer_that_is_a_token_is_never_content(thinking: Thinking, step: int) -> None:
    closer = TextPiece("</think>", 51)
    pieces = [
        closer,
        TextPiece("So `</think>` ends it.", None),
        closer,
        TextPiece("\n\nYes.", None),
        closer,
    ]
    parser = OutputParser(
        MINIMAX_M2, tools=None, in_reasoning=False, tag_ids=TAG_IDS, thinking=thinking
    )
    chunks = [pieces[start : start + step] for start in range(0, len(pieces), step)]
    events = [event for chunk in chunks for event in parser.feed(chunk)]
    output = collect([*events, *parser.finish()])
    assert output == ParsedOutput(None, "So `</think>` ends it.\n\nYes.", [])


def test_a_format_may_have_no_tags_in_text() -> None:
    tokens_only = dataclasses.replace(MINIMAX_M2, patterns=(), beginnings=NO_BEGINNINGS)
    parser = OutputParser(tokens_only, tools=None, in_reasoning=True, tag_ids=TAG_IDS)
    pieces = [
        TextPiece("a </think> <", None),
        TextPiece("</think>", 51),
        TextPiece('<invoke name="f">', None),
    ]
    assert collect([*parser.feed(pieces), *parser.finish()]) == ParsedOutput(
        "a </think> <", '<invoke name="f">', []
    )


def test_indentation_of_the_first_line_is_kept() -> None:
    assert one_shot("\n  why\n</think>\n\n    code\n  more\n") == ParsedOutput(
        "  why", "    code\n  more\n", []
    )


def test_beginning_of_a_tag_before_a_tag_token_is_text() -> None:
    pieces = [TextPiece("a <", None), TextPiece("</think>", 51), TextPiece("b", None)]
    parser = OutputParser(MINIMAX_M2, tools=None, in_reasoning=True, tag_ids=TAG_IDS)
    assert collect(parser.feed(pieces) + parser.finish()) == ParsedOutput("a <", "b", [])


def test_space_after_the_last_block_is_layout() -> None:
    call = '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>\n'
    assert one_shot(f"a</think>\n\nb\n{call}").content == "b"
    assert one_shot("a</think>\n\nb\n").content == "b\n"


def test_endless_tags_are_released_as_text() -> None:
    parser = new_parser(in_reasoning=False)
    text = "see <parameter " + "a" * 2 * MAX_ATTRIBUTE_CHARS
    events = [event for char in text for event in feed_text(parser, char)]
    assert collect(events).content == text


def test_without_open_reasoning_everything_is_content() -> None:
    assert parse(MINIMAX_M2, "\nHello.", tools=None, in_reasoning=False) == ParsedOutput(
        None, "Hello.", []
    )
    assert parse(MINIMAX_M2, "<think>a</think>b", tools=None, in_reasoning=False) == ParsedOutput(
        "a", "b", []
    )


def test_duplicate_parameter_leaves_the_last_value() -> None:
    text = (
        '</think><minimax:tool_call><invoke name="write_file"><parameter name="path">a</parameter>'
        '<parameter name="path">b</parameter></invoke></minimax:tool_call>'
    )
    assert one_shot(text, TOOLS).tool_calls[0].arguments == '{"path": "a", "path": "b"}'


CALL = (
    '<minimax:tool_call>\n<invoke name="write_file">\n<parameter '
    'name="path">a</parameter>\n</invoke>\n</minimax:tool_call>'
)


def test_without_calls_their_markup_is_content() -> None:
    output = parse(
        MINIMAX_M2.without_calls(), f"x</think>\n\nok\n{CALL}", tools=TOOLS, in_reasoning=True
    )
    assert output == ParsedOutput("x", f"ok\n{CALL}", [])


@pytest.mark.parametrize(("thinking", "opener"), [(Thinking.APPEND, "<think>"), (Thinking.RAW, "")])
def test_thinking_can_stay_in_the_content_as_generated(thinking: Thinking, opener: str) -> None:
    text = "\nI think.\n</think>\n\nHello <think>.\n"
    assert parse(
        MINIMAX_M2, text, tools=None, in_reasoning=True, thinking=thinking
    ) == ParsedOutput(None, opener + text, [])
    cut_off = parse(MINIMAX_M2, "I th\n", tools=None, in_reasoning=True, thinking=thinking)
    assert cut_off == ParsedOutput(None, f"{opener}I th\n", [])


def test_calls_are_found_where_thinking_stays_in_the_content() -> None:
    output = parse(
        MINIMAX_M2, f"I call.\n{CALL}", tools=TOOLS, in_reasoning=True, thinking=Thinking.APPEND
    )
    assert (output.content, len(output.tool_calls)) == ("<think>I call.", 1)


def test_the_parser_knows_when_it_is_in_reasoning() -> None:
    parser = new_parser()
    assert parser.in_reasoning
    feed_text(parser, "x</think>y")
    assert not parser.in_reasoning


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
def test_whether_a_prompt_opens_reasoning(
    format: OutputFormat, prompt: str, expected: bool
) -> None:
    assert format.opens_reasoning(prompt) is expected
