"""Check the output parser on recorded cases and generated outputs, split in every way."""

import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

FORMATS = {"m2": MINIMAX_M2, "m3": MINIMAX_M3}
CASE_FILES = tuple(
    Path(__file__).parents[1] / "golden" / name
    for name in ("parser_cases.jsonl", "minimax_m2_outputs.jsonl", "minimax_m3_outputs.jsonl")
)
# In these policy cases we decide otherwise than the case file; docs/parsing.md says why.
OTHER_CHOICE = {"m3-045": "truncated arguments stay truncated, so that no client runs half a call"}
_M2_TAGS = ("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>")
TAG_IDS = dict(zip((*_M2_TAGS, MARKER, "<mm:think>", "</mm:think>"), range(50, 57), strict=True))

_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}


def _tool(name: str, properties: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, **more} if properties else {}
    function = {"name": name, "description": name, "parameters": schema}
    return {"type": "function", "function": function}


_GUEST = {"name": _STRING, "age": _INTEGER, "vip": {"type": "boolean"}}
_WRITE_FILE = {
    "path": _STRING, "content": _STRING, "mode": _INTEGER, "note": {"type": ["string", "null"]},
    "tags": {"type": "array", "items": _STRING},
}  # fmt: skip
_CREATE_EVENT = {
    "title": _STRING,
    "location": {"type": "object", "properties": {"city": _STRING, "zip": _INTEGER}},
    "guests": {"type": "array", "items": {"$ref": "#/$defs/Guest"}},
    "matrix": {"type": "array", "items": {"type": "array", "items": _INTEGER}},
    "price": {"type": "number"},
    "limit": {"anyOf": [_INTEGER, {"type": "null"}]},
    "meta": {"type": "object"},
    "kind": {"enum": ["none", "low", "high"]},
    "any": {"description": "anything"},
    **{"until>": _STRING, "<at": _STRING, 'say "hi">': _INTEGER},
}
_DEFINITIONS = {"$defs": {"Guest": {"type": "object", "properties": _GUEST}}}
_EVENT_TOOL = _tool("create_event", _CREATE_EVENT, **_DEFINITIONS)
TOOLS = [_tool("write_file", _WRITE_FILE), _EVENT_TOOL, _tool("ping")]


# --- parsing -------------------------------------------------------------------------------------


def new_parser(
    format: OutputFormat = MINIMAX_M2,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    in_reasoning: bool | None = None,
    **options: Any,
) -> OutputParser:
    """Return a parser that finds tags by their text; M2 begins in reasoning by default."""
    begins = format is MINIMAX_M2 if in_reasoning is None else in_reasoning
    return OutputParser(format, tools=tools, in_reasoning=begins, **{"tag_ids": None, **options})


def feed_text(parser: OutputParser, text: str) -> list[ParserEvent]:
    return parser.feed([TextPiece(text, None)])


def parse(
    format: OutputFormat, text: str, *, is_truncated: bool = False, **options: Any
) -> ParsedOutput:
    parser = new_parser(format, **options)
    return collect([*feed_text(parser, text), *parser.finish(is_truncated=is_truncated)])


def stream(
    format: OutputFormat, chunks: Iterable[Sequence[TextPiece]], **options: Any
) -> list[list[ParserEvent]]:
    parser = new_parser(format, **options)
    return [*(parser.feed(chunk) for chunk in chunks), parser.finish()]


def read_chunks(
    format: OutputFormat, chunks: Iterable[Sequence[TextPiece]], **options: Any
) -> ParsedOutput:
    return collect(event for step in stream(format, chunks, **options) for event in step)


def text_chunks(parts: Iterable[str]) -> list[list[TextPiece]]:
    return [[TextPiece(part, None)] for part in parts]


_TOKEN = re.compile("|".join([*map(re.escape, TAG_IDS), r" ?\w{1,6}", r"\s", "."]), re.DOTALL)


def pieces(text: str, rng: random.Random | None = None) -> list[TextPiece]:
    """Split `text` into tokens. Tags are whole and have ids; the rest is split into words.

    With `rng`, M3's marker may be split into several tokens.
    """
    found: list[TextPiece] = []
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token == MARKER and rng is not None and rng.random() < 0.3:
            place = rng.randint(1, len(token) - 1)
            found += [TextPiece(token[:place], None), TextPiece(token[place:], None)]
        else:
            found.append(TextPiece(token, TAG_IDS.get(token)))
    return found


def split_at_random(items: Any, rng: random.Random, *, count: int) -> list[Any]:
    places = range(1, len(items))
    borders = sorted(rng.sample(places, min(count, len(places))))
    ends = [*borders, len(items)]
    return [items[start:end] for start, end in zip([0, *borders], ends, strict=True)]


# --- recorded cases ------------------------------------------------------------------------------


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
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").split("\n")]
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
        for case in map(json.loads, filter(None, lines))
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


def check_expected(case: Case, output: ParsedOutput) -> None:
    expected = case.expected
    calls = [(call["name"], call["arguments"]) for call in expected["tool_calls"]]
    wanted = comparable(expected["reasoning"], expected["content"], calls)
    assert comparable(output.reasoning, output.content, calls_of(output)) == wanted, case.id


# --- generated outputs ---------------------------------------------------------------------------

_WORDS = [
    "the", "Plan", "x", "if a < b:", "return", "naïve", "日本語", "🙂", "👩\u200d🚀", "العربية",
    "\n", "\n\n  ", "\t", " ", "[x]", "]", "[1, 2]", "]<]", "<b>", "</div>", "<", ">", "&amp;",
    '"quoted"', "\\", "\\n", "null", "true", "none", "007", "[SILENCE]", "{", "}", "\u2028",
    "\x00", "</param>", "<para", "minimax", "=", "`",
]  # fmt: skip
_ENDINGS = ["nul", "5", "[1, 2]", '{"a": 1}', "True"]
_M2_FRAGMENTS = [
    *('<parameter name="until>', '<parameter name="<at">', '<parameter name="path>', '">'),
    *("\n```\n", "</thinking>", "</thinking>\n"),
    *_M2_TAGS, "</invoke>", "</parameter>", "<parameter>", "<invoke ", "</param",
    "<minimax:tool", '<invoke name write_file">', '<invoke nameping">', "<parameter name=path>",
    "<invoke name='ping' />", "<parameter name='mode'>", '<parameter name = "any" type="x">',
    *(f'<invoke name="{name}">' for name in ("write_file", "create_event", "o", "", "Write_File")),
    *(f'<parameter name="{name}">' for name in ("path", "content", "note", "tags", "meta", "free")),
]  # fmt: skip
_M3_OPENED = (
    "path content mode note tags title location city zip guests matrix meta any limit item item "
    'free a name age tool_call item invoke tags/ city&a="b"'
)
_M3_CLOSED = (
    "path content mode tags location city guests meta any zip matrix item item item free a name "
    "strange tool_call invoke"
)
_M3_FRAGMENTS = [
    *(f"{MARKER}<until>", f"{MARKER}<<at>", f'{MARKER}<invoke name="a>b', '">'),
    *("\n```\n", "</think>", "</think>\n"),
    "<mm:think>", "</mm:think>", "<mm:thin", "<tool_call>", "</tool_call>", "</invoke>",
    '<invoke name="ping">', "</city>", " \n ", MARKER[:5], MARKER[5:],
    *(MARKER + rest for rest in ("", " ", "<", "</", "\n<tool_call>", '<invoke nameping">')),
    *(f'{MARKER}<invoke name="{name}">' for name in ("write_file", "create_event", "other")),
    f'{MARKER}<invoke name{MARKER}<write_file">', f'{MARKER}<invoke{MARKER} name="ping">',
    f'{MARKER}<invoke name name="ping">',
    *(f"{MARKER}<{name.replace('&', ' ')}>" for name in _M3_OPENED.split()),
    *(f"{MARKER}</{name}>" for name in _M3_CLOSED.split()),
]  # fmt: skip
_FRAGMENTS = {
    "minimax_m2": [*_WORDS, *_ENDINGS, *_M2_FRAGMENTS],
    "minimax_m3": [*_WORDS, *_ENDINGS, *_M3_FRAGMENTS],
}
_CALL_HEADS = {
    "minimax_m2": 'ok\n</think>\n\n<minimax:tool_call>\n<invoke name="write_file">\n',
    "minimax_m3": f'{MARKER}<tool_call>\n{MARKER}<invoke name="create_event">',
}
_TAG = re.compile(rf"(?:{re.escape(MARKER)})?</?[^<>]+>")


@dataclass(frozen=True)
class GeneratedOutput:
    """A text and, if it is valid, its parts: reasoning, content, calls."""

    format: OutputFormat
    text: str
    in_reasoning: bool
    expected: tuple[str | None, str | None, list[tuple[str, Any]]] | None = None


def generate(format: OutputFormat, rng: random.Random) -> GeneratedOutput:
    """Generate a valid output, a damaged one, or a sequence of fragments; perhaps truncated."""
    kind = rng.random()
    output = _generate_valid(format, rng)
    if kind < 0.35:
        return output
    text, fragments = output.text, _FRAGMENTS[format.name]
    if kind < 0.7:
        for _ in range(rng.randint(1, 4)):
            text = _damage(text, fragments, rng)
    else:
        head = rng.choice(["", text[: rng.randint(0, len(text))], _CALL_HEADS[format.name]])
        text = head + "".join(rng.choice(fragments) for _ in range(rng.randint(0, 30)))
    if rng.random() < 0.4:
        text = text[: rng.randint(0, len(text))]
    return GeneratedOutput(format, text, output.in_reasoning)


def _generate_valid(format: OutputFormat, rng: random.Random) -> GeneratedOutput:
    reasoning = _words(rng).strip() if rng.random() < 0.7 else None
    content = _words(rng).strip() if rng.random() < 0.7 else None
    calls = [_generate_call(format, rng) for _ in range(rng.choice([0, 0, 1, 1, 2, 3]))]
    in_reasoning = format is MINIMAX_M2
    if format is MINIMAX_M2:
        text = f"{reasoning or ''}\n</think>\n\n"
    elif reasoning is None:
        text = rng.choice(["", "</mm:think>"])
    else:
        in_reasoning = rng.random() < 0.5
        text = ("" if in_reasoning else "<mm:think>") + reasoning + "</mm:think>"
    num_first = rng.randint(1, len(calls)) if calls else 0
    text += content or ""
    text += write_block(format, calls[:num_first]) + write_block(format, calls[num_first:])
    return GeneratedOutput(format, text, in_reasoning, (reasoning or None, content or None, calls))


def _words(rng: random.Random) -> str:
    return "".join(rng.choice(_WORDS) + rng.choice(["", " "]) for _ in range(rng.randint(0, 12)))


def _generate_call(format: OutputFormat, rng: random.Random) -> tuple[str, dict[str, Any]]:
    tool = rng.choice([*TOOLS, *TOOLS[:2], None])
    if tool is None:
        keys = rng.sample(["a", "b-c", "größe"], rng.randint(0, 3))
        return "other_tool", {key: f"x{_words(rng)}" for key in keys}
    function = tool["function"]
    properties = function["parameters"].get("properties", {})
    keys = [key for key in properties if rng.random() < 0.6]
    rng.shuffle(keys)
    return function["name"], {key: _generate_value(properties[key], format, rng) for key in keys}


def _generate_value(schema: dict[str, Any], format: OutputFormat, rng: random.Random) -> Any:
    # M3's template leaves null arguments out
    null = [None] if format is MINIMAX_M2 else []
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "anyOf" in schema:
        return rng.choice([3, *null])
    if "$ref" in schema:
        schema = _DEFINITIONS["$defs"]["Guest"]
    match schema.get("type"):
        case "string":
            return _words(rng)
        case "integer":
            return rng.choice([0, 7, -12, 12345678901234567890])
        case "number":
            return rng.choice([0.5, 3, -1.25, 1e-7])
        case "boolean":
            return rng.random() < 0.5
        case "array":
            items = schema["items"]
            return [_generate_value(items, format, rng) for _ in range(rng.randint(0, 3))]
        case "object" if "properties" in schema:
            members = schema["properties"].items()
            return {key: _generate_value(part, format, rng) for key, part in members}
        case "object":
            a, b, c, d = (f"x{_words(rng)}" for _ in range(4))
            return {"a": a, "b": [b, c], "c": {"d": d}}
        case _:  # a schema without a type, or with several types that include null
            return rng.choice([f"x{_words(rng)}", *(null if "type" in schema else [])])


def write_block(format: OutputFormat, calls: Sequence[tuple[str, Any]]) -> str:
    if not calls:
        return ""
    if format is MINIMAX_M3:
        blocks = [
            f'{MARKER}<invoke name="{name}">{"".join(_write_elements(arguments))}{MARKER}</invoke>'
            for name, arguments in calls
        ]
        return "\n".join([f"{MARKER}<tool_call>", *blocks, f"{MARKER}</tool_call>"])
    lines = ["\n<minimax:tool_call>"]
    for name, arguments in calls:
        lines.append(f'<invoke name="{name}">')
        for key, value in arguments.items():
            written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines.append(f'<parameter name="{key}">{written}</parameter>')
        lines.append("</invoke>")
    return "\n".join([*lines, "</minimax:tool_call>"])


def _write_elements(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        members = value.items() if isinstance(value, dict) else (("item", one) for one in value)
        for key, member in members:
            yield from (f"{MARKER}<{key}>", *_write_elements(member), f"{MARKER}</{key}>")
    else:
        yield json.dumps(value) if isinstance(value, bool) else str(value)


def _damage(text: str, fragments: list[str], rng: random.Random) -> str:
    """Remove, repeat, insert or replace a stretch or a tag of `text`."""
    start = rng.randint(0, len(text))
    end = min(len(text), start + rng.randint(1, 20))
    tags = [match.span() for match in _TAG.finditer(text)]
    kind = rng.randrange(7)
    if kind == 0:
        return text[:end] + text[start:]
    if kind == 1:
        return text.replace(MARKER, "", 1)
    if kind < 4 and tags:
        start, end = rng.choice(tags)
    elif kind == 4:
        end = start
    return text[:start] + (rng.choice(fragments) if kind % 2 == 0 else "") + text[end:]


# --- checks --------------------------------------------------------------------------------------


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def check_well_formed(events: Sequence[ParserEvent]) -> None:
    """Check that events are well-formed.

    Calls follow each other and begin with a name, and no delta is empty. The arguments of a
    complete call are one JSON object. Truncated arguments need not be complete JSON.
    """
    open_call: int | None = None
    num_calls = 0
    arguments = ""
    for event in events:
        if open_call is not None and not isinstance(event, ToolArgumentsDelta | ToolCallEnd):
            assert arguments.startswith("{") and not is_json(arguments)
            open_call = None
        match event:
            case ReasoningDelta(text) | ContentDelta(text):
                assert text
            case ToolCallStart(index, name):
                assert index == num_calls and name
                open_call, num_calls, arguments = index, num_calls + 1, ""
            case ToolArgumentsDelta(index, text):
                assert open_call == index and text
                arguments += text
            case ToolCallEnd(index):
                assert open_call == index and isinstance(json.loads(arguments), dict)
                open_call = None
    if open_call is not None:
        assert arguments.startswith("{") and not is_json(arguments)


def check_readings(
    source: Case | GeneratedOutput, rng: random.Random, *, tools: Any, places: Iterable[int]
) -> None:
    """Check that every split of a text into pieces is parsed alike, and so are its packets.

    `places` are the positions at which the text is split in two.
    """
    text, format = source.text, source.format
    options: dict[str, Any] = {"tools": tools, "in_reasoning": source.in_reasoning}
    whole = parse(format, text, **options)
    by_text = [text_chunks([text[:place], text[place:]]) for place in places]
    by_text += [text_chunks(text), text_chunks(text[i : i + 4] for i in range(0, len(text), 4))]
    counts = (rng.randint(2, 30) for _ in range(8))
    by_text += [text_chunks(split_at_random(text, rng, count=count)) for count in counts]
    tokens = pieces(text, rng)
    by_token = [[tokens], [[token] for token in tokens]]
    counts = (max(1, len(tokens) // size) for size in (2, 3, 5, 8))
    by_token += [split_at_random(tokens, rng, count=count) for count in counts]
    tag_ids = {tag: TAG_IDS[tag] for tag in format.literals}
    readings = [(chunks, None) for chunks in by_text]
    for chunks, ids in (*readings, *((chunks, tag_ids) for chunks in by_token)):
        steps = stream(format, chunks, tag_ids=ids, **options)
        events = [event for step in steps for event in step]
        check_well_formed(events)
        if chunks is by_token[0] and reads_otherwise_by_token(format, text, whole):
            whole = collect(events)
            assert format.think_close not in (whole.content or ""), text
        assert collect(events) == whole, [[piece.text for piece in chunk] for chunk in chunks]
    packets = Packets()
    events = [event for step in steps for event in packets.push(step)] + packets.flush()
    check_well_formed(events)
    assert collect(events) == whole
    deltas = (event for event in events if not isinstance(event, ToolCallStart | ToolCallEnd))
    assert all(len(event.text) <= MAX_CHARS for event in deltas)


_MARKED_THINK_TAG = re.compile(rf"{re.escape(MARKER)}\s*</?mm:think>")


def reads_otherwise_by_token(format: OutputFormat, text: str, whole: ParsedOutput) -> bool:
    """Return whether token ids may change how the parser reads `text`.

    The text may end with the beginning of a tag, and that beginning may be a token. A think closer
    in the content, or a think tag after M3's marker, is text only if no single token encodes it.
    """
    ends_in_tag = any(
        text.endswith(tag[:length]) for tag in format.literals for length in range(1, len(tag))
    )
    is_marked = _MARKED_THINK_TAG.search(text) is not None
    return ends_in_tag or is_marked or format.think_close in (whole.content or "")


def check_generated(format: OutputFormat, rng: random.Random, *, all_places: bool) -> None:
    """Generate an output, compare it with a known answer if there is one, and split it."""
    output = generate(format, rng)
    length = len(output.text)
    places = range(1, length) if all_places else rng.sample(range(length), min(5, length))
    if output.expected is not None:
        whole = parse(format, output.text, tools=TOOLS, in_reasoning=output.in_reasoning)
        found = json.dumps([whole.reasoning, whole.content, calls_of(whole)], sort_keys=True)
        assert found == json.dumps(output.expected, sort_keys=True), output.text
        check_ended_early(output, whole, places)
    check_readings(output, rng, tools=TOOLS, places=places)


def check_ended_early(output: GeneratedOutput, whole: ParsedOutput, places: Iterable[int]) -> None:
    """Check that an output that ends early has the calls of the whole one, the last truncated."""
    options: dict[str, Any] = {"tools": TOOLS, "in_reasoning": output.in_reasoning}
    for place in places:
        text = output.text[:place]
        found = parse(output.format, text, is_truncated=True, **options).tool_calls
        assert found[:-1] == whole.tool_calls[: max(0, len(found) - 1)], text
        if found:
            made, last = whole.tool_calls[len(found) - 1], found[-1]
            assert made.name == last.name and made.arguments.startswith(last.arguments), text
            assert made == last or not (last.is_whole or is_json(last.arguments)), text
