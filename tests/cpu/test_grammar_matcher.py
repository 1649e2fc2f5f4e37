"""Check grammars with the real compiler and the built-in model's vocabulary."""

import json
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from grammar_support import TOKENIZER, choice, ebnf, reasoning, regex, schema, tool
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from negamax.base.errors import InvalidRequestError
from negamax.config.grammar import Grammar, Reasoning
from negamax.models.minimax_m2.chat import MINIMAX_M2, M2Calls
from negamax.models.minimax_m3.chat import MINIMAX_M3, M3Calls
from negamax.models.registry import CALL_STYLES, TOKEN_TAGS
from negamax.text.grammar.dead_ends import find_dead_end
from negamax.text.grammar.matcher import GrammarCompiler, GrammarMatcher, Mask
from negamax.text.grammar.structural_tag import structural_tag
from negamax.text.grammar.tool_calls import CallStyle, tool_grammar
from negamax.text.parser.events import ParsedOutput
from negamax.text.parser.output_format import OutputFormat
from tests.layouts import full
from tests.unit.parser_support import parse
from tests.unit.template_support import m2_template, m3_template

VOCAB_SIZE = 4160
EOS = TOKENIZER.eos_token_id or 0
COMPILER = GrammarCompiler(
    TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS], num_threads=1, token_tags=TOKEN_TAGS
)
JSON = Grammar(kind="json_object")
TAG_IDS = MINIMAX_M2.tag_ids(TOKENIZER)

LATITUDE = {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]}
WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "place": {"$ref": "#/$defs/place"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city", "days"],
        "$defs": {"place": LATITUDE},
    },
}
PING = tool("ping")


def matcher(grammar: Grammar, reasoning: Reasoning | None = None) -> GrammarMatcher:
    return GrammarMatcher(COMPILER.compile(structural_tag(grammar, reasoning, CALL_STYLES)))


def allowed(following: GrammarMatcher) -> set[int]:
    return ids(following.mask(COMPILER))


def ids(mask: Mask) -> set[int]:
    return set(np.nonzero(np.unpackbits(mask, bitorder="little"))[0].tolist())


def takes(grammar: Grammar, text: str, reasoning: Reasoning | None = None) -> bool:
    following = matcher(grammar, reasoning)
    for token_id in TOKENIZER.encode(text):
        if token_id not in allowed(following) or not following.take(token_id):
            return False
    return EOS in allowed(following)


Texts = Sequence[str]


def check(grammar: Grammar | None, good: Texts, bad: Texts, start: Reasoning | None = None) -> None:
    assert grammar is not None
    assert [text for text in good if not takes(grammar, text, start)] == []
    assert [text for text in bad if takes(grammar, text, start)] == []


def tags(**fields: Any) -> Grammar:
    return Grammar(kind="structural_tag", text=json.dumps(fields))


def triggered(value: Any) -> Grammar:
    """Return a grammar of free text in which `<f` starts a tag with a JSON schema."""
    return tags(triggers=["<f"], structures=[{"begin": "<f>", "schema": value, "end": "</f>"}])


ONE_FIELD = {"type": "object", "properties": {"a": {"type": "integer"}}}
UNIQUE_NUMBERS = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
UNIQUE_FIELD = {"items": {"type": "object", "properties": {"x": {"uniqueItems": True}}}}


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (JSON, ["{}", '{"a": [1, {"b": null}]}'], ["[1]", "1", '{"a": 1', "{} "]),
        (regex(r"[a-c]{2,3}-\d+"), ["ab-1", "abc-42"], ["a-1", "ab-", "ab-1 "]),
        (choice("yes", "no", "no way"), ["yes", "no", "no way"], ["maybe", "yess", "n"]),
        (ebnf('root ::= "a" root? "b"'), ["ab", "aabb"], ["a", "aab", "ba"]),
        (tags(format={"type": "const_string", "value": "hi"}), ["hi"], ["h", "hi there"]),
        (triggered({"type": "integer"}), ["so <f>12</f> then", "nothing"], ["<f>x</f>"]),
        (schema(ONE_FIELD), ['{"a": 1}', '{"b": 1}'], ['{"b": 1, "a": 1}', '{"a": "x"}']),
        (schema({"type": "string", "nullable": True}), ["null", '"x"'], ["1"]),
        (schema({"type": "object", "required": ["a"]}), ['{"a": [1]}'], ["{}"]),
        (schema({"type": "array"}), ['[1, "a"]', "[]"], ["{}"]),
        (schema({"type": "string", "maxLength": 3}), ['"abc"'], ['"abcd"']),
        (schema(True), ["1", "[]"], ["x"]),
        # The grammar enforces what it can.
        (schema(UNIQUE_NUMBERS, strict=False), ["[1, 1]"], ['["a"]']),
    ],
)
def test_each_kind_accepts_only_its_texts(grammar: Grammar, good: Texts, bad: Texts) -> None:
    check(grammar, good, bad)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (regex("(?=a)b"), "Lookahead"),
        (regex("[a"), "compiled"),
        (ebnf("root ::= missing"), "missing"),
        (schema({"type": "foo"}), "foo"),
        (schema({"not": {"type": "string"}}), "'not'"),
        (schema(UNIQUE_FIELD), "uniqueItems"),
        (schema({"$ref": "#/$defs/gone"}), "#/\\$defs/gone"),
        (schema({"$ref": "https://example.com/schema"}), "example.com"),
        (tags(), "format"),
        (tags(format={"type": "unheard of"}), "compiled"),
    ],
)
def test_refuses_grammars_that_cannot_be_enforced(grammar: Grammar, words: str) -> None:
    grammar.check()
    with pytest.raises(InvalidRequestError, match=words):
        matcher(grammar)


END = {"type": "token", "token": EOS}
LOOPS = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
TOKEN = {"type": "token", "token": 20}
TRIGGERED = {"type": "tag", "begin": TOKEN, "content": END, "end": "x"}


@pytest.mark.parametrize(
    "grammar",
    [
        schema({"$ref": "#"}),
        schema({**LOOPS["b"], "$defs": LOOPS}),
        schema({"anyOf": [{"$ref": "#"}]}),
        schema({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}),
        schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
        schema({"type": "array", "items": {"$ref": "#/items"}}),
        ebnf('root ::= "ab" x | "c"\nx ::= y "c"\ny ::= x'),
        ebnf('root ::= "ab" [\\U00110000-\\U00120000]'),
        regex(r"a|b[^\s\S]"),
        triggered({"$ref": "#"}),
        tags(format=END),
        tags(format={"type": "token_triggered_tags", "trigger_tokens": [20], "tags": [TRIGGERED]}),
    ],
)
def test_refuses_grammars_in_which_outputs_get_stuck(grammar: Grammar) -> None:
    grammar.check()
    for before in (None, reasoning("open"), reasoning("optional")):
        with pytest.raises(InvalidRequestError, match=r"finite|cannot end|no schema|to itself"):
            matcher(grammar, before)


def test_an_unknown_version_of_grammars_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert find_dead_end('{"__VERSION__": "v99"}', stop_token_ids=()) is None
    assert [record.message.count("v99") for record in caplog.records] == [1]


@pytest.mark.parametrize(
    ("grammar", "good"),
    [
        (schema({"anyOf": [{"type": "integer"}, LOOPS["b"]], "$defs": LOOPS}, strict=False), "7"),
        (schema({"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]}), "[[]]"),
        (ebnf('root ::= x | "c"\nx ::= y "c"\ny ::= x'), "c"),
    ],
)
def test_recursive_references_with_an_end_are_followed(grammar: Grammar, good: str) -> None:
    assert takes(grammar, good)


OBJECT_TAG = {"type": "json_schema", "json_schema": {"type": "object"}}
OBJECTS = [JSON, schema({"type": "object"}), schema(True), tags(format=OBJECT_TAG)]
OBJECTS.append(tags(format={**OBJECT_TAG, "max_whitespace_cnt": None}))


@pytest.mark.parametrize("grammar", OBJECTS)
def test_json_has_a_limit_of_white_space_between_its_parts(grammar: Grammar) -> None:
    gaps = ("{%s}", '{"a":%s1}', '{"a":1%s}', '{"a":[%s1]}', '{"a":[1,%s2]}', '{"a":{%s"b":1}}')
    assert all(takes(grammar, gap % ("\n" + " " * 8)) for gap in gaps)
    too_long = [white * 21 for white in (" ", "\n", "\t")]
    assert not any(takes(grammar, gap % white) for gap in gaps for white in too_long)


def test_text_never_holds_tags_or_control_tokens() -> None:
    """Before a closer, xgrammar alone would allow every token in a string."""
    call = tool_grammar([WEATHER], M2Calls(TAG_IDS), choice="required")
    assert call is not None
    raw = matcher(call)
    start = '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Ro'
    for token_id in TOKENIZER.encode(start):
        assert raw.take(token_id)
    string = matcher(JSON)
    assert string.take(b'{"a')
    for following in (raw, string):
        tokens = allowed(following)
        assert not [i for i in tokens if TOKENIZER.is_added(i) or i >= TOKENIZER.vocab_size]
        assert len(tokens) > 3000


def test_end_is_allowed_where_the_grammar_may_end() -> None:
    following = matcher(regex("a+b?"))
    seen = []
    for text in (b"a", b"a", b"b"):
        seen.append(EOS in allowed(following))
        assert following.take(text)
    assert [*seen, EOS in allowed(following)] == [False, True, True, True]
    assert allowed(following) == {EOS}
    assert following.take(EOS) and following.has_ended
    check(JSON, ["\n\n{}", "{}"], ["\n\n\n\n{}", " {}"], reasoning("open"))


@pytest.mark.parametrize("by_id", [True, False])
def test_optional_reasoning_may_come_before_the_content(by_id: bool) -> None:
    opener, closer = ("<think>", "</think>") if by_id else ("<mm:think>", "</mm:think>")
    good = [f"{opener}so {{ then{closer}{{}}", f"{closer}{{}}", "{}"]
    bad = [f"{opener}so {{}}", f"so{closer}{{}}", f"{opener}so{closer}"]
    check(JSON, good, bad, reasoning("optional", by_id=by_id))


def m2_call(arguments: str, name: str = "get_weather") -> str:
    return f'<invoke name="{name}">\n{arguments}</invoke>\n'


def m2_block(*calls: str) -> str:
    return f"<minimax:tool_call>\n{''.join(calls)}</minimax:tool_call>"


def m2_arguments(**values: str) -> str:
    lines = [f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items()]
    return "".join(lines)


ROME = m2_arguments(city="Rome", days="3")


def test_a_required_call_is_a_declared_one_with_arguments_that_follow_the_schema() -> None:
    hard = m2_arguments(city='a <b> & "c"\n</param>', days="-1", unit="celsius")
    good = [
        m2_block(m2_call(ROME)),
        "\n\n\n" + m2_block(m2_call(ROME)),
        m2_block(m2_call(ROME), m2_call("", name="ping")),
        m2_block(m2_call(hard)),
        m2_block(m2_call(ROME + m2_arguments(place='{"lat": 1.5}', tags='["x", "y"]'))),
    ]
    wrong = [
        m2_arguments(city="Rome", days="three"),
        m2_arguments(city="Rome"),
        ROME + m2_arguments(unit="kelvin"),
        ROME + m2_arguments(place="{}"),
        ROME + m2_arguments(other="1"),
    ]
    bad = [
        *(m2_block(m2_call(arguments)) for arguments in wrong),
        m2_block(m2_call(ROME, name="get_whether")),
        m2_block(),
        "Sure. " + m2_block(m2_call(ROME)),
    ]
    check(tool_grammar([WEATHER, PING], M2Calls(TAG_IDS), choice="required"), good, bad)


def test_a_named_choice_and_no_parallel_calls_leave_one_call() -> None:
    tools, style = [WEATHER, PING], M2Calls(TAG_IDS)
    one, two = m2_block(m2_call(ROME)), m2_block(m2_call(ROME), m2_call(ROME))
    ping = m2_block(m2_call("", name="ping"))
    named = tool_grammar(tools, style, choice="function", name="get_weather")
    check(named, [one], [ping, two])
    check(tool_grammar(tools, style, choice="required", parallel=False), [one, ping], [two])
    # Without `strict`, the grammar enforces one call of a declared tool with any arguments.
    loose = m2_block(m2_call(m2_arguments(city="Rome", days="three", what="ever")))
    free = tool_grammar(tools, style, parallel=False)
    check(free, ["Hello", f"So:\n{one}", loose], [two, f"{one}{one}"])
    grammar = tool_grammar([PING], M2Calls(TAG_IDS), content=JSON)
    ping = m2_block(m2_call("", name="ping"))
    check(grammar, ["{}", ping], ["Hi", f"{{}}{ping}"])


def test_a_strict_tool_in_free_text_is_held_to_its_schema_once_a_call_begins() -> None:
    grammar = tool_grammar([{**WEATHER, "strict": True}, PING], M2Calls(TAG_IDS))
    good, bad = m2_block(m2_call(ROME)), m2_block(m2_call(m2_arguments(city="Rome", days="three")))
    check(grammar, ["Hi", f"Hi {good} and {good}"], [bad, "a </think> b"])
    assert tool_grammar([WEATHER, PING], M2Calls(TAG_IDS)) is None


@pytest.mark.parametrize(
    ("options", "good"),
    [
        ({}, {"Hi", "ping", "pings", "{}"}),
        ({"choice": "required"}, {"ping"}),
        ({"parallel": False}, {"Hi", "ping", "{}"}),
        ({"content": JSON}, {"ping", "{}"}),
    ],
)
def test_only_allowed_tools_can_be_called(options: dict[str, Any], good: set[str]) -> None:
    ping, weather = m2_block(m2_call("", name="ping")), m2_block(m2_call(ROME))
    texts = {"Hi": "Hi", "{}": "{}", "ping": ping, "pings": f"So:\n{ping} and {ping}"}
    texts |= {"weather": weather, "text and weather": f"So: {weather}"}
    texts["pi"] = m2_block(m2_call("", name="pi"))
    grammar = tool_grammar([WEATHER, PING], M2Calls(TAG_IDS), allowed=["ping"], **options)
    assert grammar is not None
    assert {name for name, text in texts.items() if takes(grammar, text)} == good


def test_m3_refuses_other_calls_of_every_shape_that_the_parser_reads() -> None:
    grammar = tool_grammar([WEATHER, PING], M3Calls(), allowed=["ping"])
    good = [
        "Hi",
        'a @ b <tool_call> "invoke"',
        '@<tool_call>\n@<invoke name="ping">@</invoke>\n@</tool_call>',
    ]
    bad = [
        '@<tool_call>\n@<invoke name="get_weather">@</invoke>\n@</tool_call>',
        '@<invoke name="get_weather">@</invoke>\n',
        '<tool_call>\n@<invoke name="get_weather">@</invoke>\n@</tool_call>',
        '@ <tool_call >@<invoke name="get_weather">@</invoke>@</tool_call>',
        '@<invoke @name="get_weather">@</invoke>',
    ]
    check(grammar, [m3(text) for text in good], [m3(text) for text in bad])
    for text in bad:
        read = parse(MINIMAX_M3, m3(text), tools=[WEATHER, PING], in_reasoning=False).tool_calls
        assert [call.name for call in read] == ["get_weather"]


@pytest.mark.parametrize("output_format", [MINIMAX_M2, MINIMAX_M3])
def test_call_without_its_block_needs_a_callable_tool(output_format: OutputFormat) -> None:
    mark = "" if output_format is MINIMAX_M2 else m3("@")
    text = f'{mark}<invoke name="get_weather">{mark}</invoke>\n'
    for tools, names in (([WEATHER, PING], ["get_weather"]), ([PING], [])):
        parsed = parse(output_format, text, tools=tools, in_reasoning=False)
        assert [call.name for call in parsed.tool_calls] == names


def m3(text: str) -> str:
    return text.replace("@", "]<]minimax[>[")


def m3_call(name: str, arguments: str) -> str:
    return m3(f'@<tool_call>\n@<invoke name="{name}">{arguments}@</invoke>\n@</tool_call>')


def test_m3_calls_nest_their_values_under_short_names() -> None:
    rome = "@<city>Rome@</city>@<days>3@</days>"
    good = [
        rome,
        "@<city>a <b>@</city>@<days>3@</days>@<place>@<lat>1.5@</lat>@</place>",
        f"{rome}@<tags>@<item>x@</item>@<item>@</item>@</tags>",
    ]
    bad = [
        "@<city>Rome@</city>@<days>x@</days>",
        "@<city>Rome@</city>",
        f"{rome}@<place>@</place>",
        f"{rome}@<unit>kelvin@</unit>",
    ]
    texts = ([m3_call("get_weather", arguments) for arguments in part] for part in (good, bad))
    check(tool_grammar([WEATHER], M3Calls(), choice="required"), *texts)
    free = {"name": "put", "strict": True, "parameters": {"properties": {"to": {"type": "object"}}}}
    good, bad = (
        m3_call("put", f"@<to>@<{'k' * length}>v@</{'k' * length}>@</to>") for length in (64, 65)
    )
    check(tool_grammar([free], M3Calls(), choice="required"), [good], [bad])


HALF_CHARACTERS = {i for i in range(VOCAB_SIZE) if "\ufffd" in TOKENIZER.token_text(i)}


def walk(grammar: Grammar, seed: int, *, closer: str) -> str:
    rng = np.random.default_rng(seed)
    following, taken = matcher(grammar), []
    for _ in range(4000):
        tokens = sorted(allowed(following) - HALF_CHARACTERS)
        chosen = [int(rng.choice(tokens))]
        end = TOKENIZER.encode(closer)
        if len(tokens) > 2000 and rng.random() < 0.2 and following.take(closer.encode()):
            following.take_back(1)  # The text is raw text, not a tool's name.
            chosen = end
        if chosen == [EOS]:
            return TOKENIZER.decode(taken)
        for token_id in chosen:
            assert token_id in allowed(following) and following.take(token_id)
        taken += chosen
    raise AssertionError(f"no end: {TOKENIZER.decode(taken)[:200]}")


DEEP = {"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"]}
FIELDS: dict[str, Any] = {
    "path": {"type": "string", "minLength": 1, "maxLength": 12},
    "text": {"type": "string"},
    "count": {"type": ["integer", "null"]},
    "mode": {"anyOf": [{"const": "fast"}, {"type": "boolean"}]},
    "day": {"type": "string", "format": "date"},
    "options": DEEP,
}
PARAMETERS = {"type": "object", "properties": FIELDS, "required": [*FIELDS]}
RICH: dict[str, Any] = {
    "name": "edit", "strict": True, "parameters": {**PARAMETERS, "additionalProperties": False}
}  # fmt: skip


def check_rich(parsed: ParsedOutput) -> None:
    assert parsed.tool_calls and all(call.name in ("edit", "ping") for call in parsed.tool_calls)
    for call in parsed.tool_calls:
        arguments = json.loads(call.arguments)
        if call.name == "ping":
            assert arguments == {}
            continue
        assert list(arguments) == [*FIELDS]
        assert 1 <= len(arguments["path"]) <= 12
        assert arguments["count"] is None or type(arguments["count"]) is int
        assert arguments["mode"] in ("fast", True, False)
        assert len(arguments["day"]) == 10 and type(arguments["options"]["deep"]) is bool


@pytest.mark.parametrize("seed", [0, 1, 2, *map(full, range(3, 12))])
@pytest.mark.parametrize("style", ["m2", "m3"])
def test_parser_reads_valid_arguments_of_random_forced_calls(style: str, seed: int) -> None:
    calls: CallStyle = M2Calls(TAG_IDS) if style == "m2" else M3Calls()
    grammar = tool_grammar([RICH, PING], calls, choice="required")
    assert grammar is not None
    text = walk(grammar, seed, closer=calls.end_of_text)
    output_format = MINIMAX_M2 if style == "m2" else MINIMAX_M3
    parsed = parse(output_format, text, tools=[RICH, PING], in_reasoning=False)
    assert parsed.content in (None, "")
    check_rich(parsed)


NAMES = st.text(st.sampled_from("ab<>\"'[]/=&. é"), min_size=1, max_size=6)
MAP_KEYS = st.from_regex(r"[ab\[\]é.'=][ab\[\]é.' /]{0,5}", fullmatch=True)
WORDS = st.text(st.sampled_from('<>/ab\n "0[{'), max_size=12)
NO_LITERALS = WORDS.map("x{}".format)
STRING = {"type": "string"}
EITHER = {"enum": ["1", "<a>", "b c", 2]}
PAIR = {"type": "object", "properties": {"a>": STRING, "b": STRING}}
PAIRS = st.lists(
    st.tuples(WORDS, WORDS).map(lambda pair: dict(zip(("a>", "b"), pair, strict=True)))
)
# schemas, and values that can be written in only one way
VALUES: list[tuple[dict[str, Any], st.SearchStrategy[Any]]] = [
    (STRING, WORDS),
    ({"type": ["string", "integer"]}, st.integers() | NO_LITERALS),
    (EITHER, st.sampled_from(EITHER["enum"])),
    ({"anyOf": [STRING, {"type": "array", "items": STRING}]},
     st.lists(WORDS, min_size=1) | NO_LITERALS),
    ({"type": "object", "additionalProperties": {"type": "integer"}},
     st.dictionaries(MAP_KEYS, st.integers())),
    ({"type": "array", "items": PAIR}, PAIRS),
]  # fmt: skip


@pytest.mark.parametrize("style", ["m2", "m3"])
@pytest.mark.parametrize("count", [5, full(200)])
def test_rendered_calls_are_accepted_and_read_back(style: str, count: int) -> None:
    @settings(max_examples=count, deadline=None, phases=[Phase.generate])
    @given(data=st.data())
    def check_call(data: st.DataObject) -> None:
        name, *keys = data.draw(st.lists(NAMES, min_size=2, max_size=4, unique=True))
        assume(not any(one.startswith(other) for one, other in permutations(keys, 2)))
        chosen = {key: data.draw(st.sampled_from(VALUES)) for key in keys}
        arguments = {key: data.draw(values) for key, (_, values) in chosen.items()}
        odd = tool(name, **{key: schema for key, (schema, _) in chosen.items()})
        template, output = (
            (m2_template(), MINIMAX_M2) if style == "m2" else (m3_template(), MINIMAX_M3)
        )
        call = {"function": {"name": name, "arguments": arguments}}
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
        turn = template.render(messages, add_generation_prompt=False).split("]~b]ai\n")[1]
        text = turn.partition("[e~[")[0].removeprefix(output.think_close)
        calls = M2Calls(TAG_IDS) if style == "m2" else M3Calls()
        check(
            tool_grammar([{**odd["function"], "strict": True}], calls, choice="required"),
            [text],
            [],
        )
        parsed = parse(output, text, tools=[odd], in_reasoning=False)
        assert [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls] == [(name, arguments)]

    check_call()


def test_compiled_grammars_are_kept_and_found_again() -> None:
    tag = structural_tag(schema({"type": "integer", "minimum": 17}), None, CALL_STYLES)
    assert COMPILER.compile(tag) is COMPILER.compile(tag)
