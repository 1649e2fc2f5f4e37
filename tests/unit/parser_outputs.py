"""Generated texts for the output parser: valid, malformed and truncated ones, from a seed."""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from negamax.models.minimax_m2.chat import MINIMAX_M2
from negamax.models.minimax_m3.chat import MARKER, MINIMAX_M3
from negamax.text.detokenizer import TextPiece
from negamax.text.parser.events import ParsedOutput, collect
from negamax.text.parser.output_format import OutputFormat
from negamax.text.parser.output_parser import OutputParser, Thinking

TAG_IDS = {
    "<think>": 200050,
    "</think>": 200051,
    "<minimax:tool_call>": 200052,
    "</minimax:tool_call>": 200053,
    MARKER: 200058,
    "<mm:think>": 200059,
    "</mm:think>": 200060,
}


def _tool(name: str, properties: dict[str, Any] | None = None, **keywords: Any) -> dict[str, Any]:
    parameters = (
        {"type": "object", "properties": properties, **keywords} if properties is not None else {}
    )
    return {
        "type": "function",
        "function": {"name": name, "description": name, "parameters": parameters},
    }


_GUEST = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "vip": {"type": "boolean"},
    },
}
TOOLS = [
    _tool(
        "write_file",
        {
            "path": {"type": "string"},
            "content": {"type": "string"},
            "mode": {"type": "integer"},
            "note": {"type": ["string", "null"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
    ),
    _tool(
        "create_event",
        {
            "title": {"type": "string"},
            "location": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "zip": {"type": "integer"}},
            },
            "guests": {"type": "array", "items": {"$ref": "#/$defs/Guest"}},
            "matrix": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            "price": {"type": "number"},
            "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "meta": {"type": "object"},
            "kind": {"enum": ["none", "low", "high"]},
            "any": {"description": "anything"},
        },
        **{"$defs": {"Guest": _GUEST}},
    ),
    _tool("ping"),
]
_PROPERTIES = {
    tool["function"]["name"]: tool["function"]["parameters"].get("properties", {}) for tool in TOOLS
}

_WORDS = [
    "the", "Plan", "x", "if a < b:", "return", "naïve", "日本語", "🙂", "👩\u200d🚀", "العربية",
    "\n", "\n\n  ", "\t", " ",
    "[x]", "]", "[1, 2]", "]<]", "<b>", "</div>", "<", ">", "&amp;", '"quoted"',
    "\\", "\\n", "null", "true", "none", "007",
    "[SILENCE]", "{", "}", "\u2028", "\x00", "</param>", "<para", "minimax", "=",
]  # fmt: skip


@dataclass(frozen=True)
class GeneratedOutput:
    """A text and, if known, its correct reading (reasoning, content, calls)."""

    format: OutputFormat
    text: str
    in_reasoning: bool
    expected: tuple[str | None, str | None, list[tuple[str, Any]]] | None = None


def generate(format: OutputFormat, rng: random.Random) -> GeneratedOutput:
    kind = rng.random()
    output = _valid(format, rng)
    if kind < 0.35:
        return output
    text = output.text
    if kind < 0.7:
        for _ in range(rng.randint(1, 4)):
            text = _damaged(format, text, rng)
    else:
        head = rng.choice(["", text[: rng.randint(0, len(text))], _call_head(format)])
        text = head + "".join(rng.choice(_fragments(format)) for _ in range(rng.randint(0, 30)))
    if rng.random() < 0.4:
        text = text[: rng.randint(0, len(text))]
    return GeneratedOutput(format, text, output.in_reasoning)


def pieces(text: str, rng: random.Random | None = None) -> list[TextPiece]:
    """Split `text` into tokens: tags whole with ids, the rest in words.

    With `rng`, a marker may be several tokens.
    """
    found: list[TextPiece] = []
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token == MARKER and rng is not None and rng.random() < 0.3:
            cut = rng.randint(1, len(token) - 1)
            found += [TextPiece(token[:cut], None), TextPiece(token[cut:], None)]
        else:
            found.append(TextPiece(token, TAG_IDS.get(token)))
    return found


def cut_at_random(items: Any, rng: random.Random, *, num_cuts: int) -> list[Any]:
    borders = (
        sorted(rng.sample(range(1, len(items)), min(num_cuts, len(items) - 1)))
        if len(items) > 1
        else []
    )
    return [
        items[start:end] for start, end in zip([0, *borders], [*borders, len(items)], strict=True)
    ]


_TOKEN = re.compile("|".join([*map(re.escape, TAG_IDS), r" ?\w{1,6}", r"\s", "."]), re.DOTALL)


def _valid(format: OutputFormat, rng: random.Random) -> GeneratedOutput:
    reasoning = _words(rng).strip() if rng.random() < 0.7 else None
    content = _words(rng).strip() if rng.random() < 0.7 else None
    calls = [_call(format, rng) for _ in range(rng.choice([0, 0, 1, 1, 2, 3]))]
    text, in_reasoning = _thinking(format, reasoning, rng)
    text += content or ""
    if calls:
        write = m2_block if format is MINIMAX_M2 else m3_block
        num_first = rng.randint(1, len(calls))
        for block in (calls[:num_first], calls[num_first:]):
            text += write(block) if block else ""
    return GeneratedOutput(format, text, in_reasoning, (reasoning or None, content or None, calls))


def _thinking(format: OutputFormat, reasoning: str | None, rng: random.Random) -> tuple[str, bool]:
    if format is MINIMAX_M2:
        return f"{reasoning or ''}\n</think>\n\n", True
    if reasoning is not None:
        is_open = rng.random() < 0.5
        return ("" if is_open else "<mm:think>") + reasoning + "</mm:think>", is_open
    return rng.choice(["", "</mm:think>"]), False


def _words(rng: random.Random) -> str:
    return "".join(rng.choice(_WORDS) + rng.choice(["", " "]) for _ in range(rng.randint(0, 12)))


def _call(format: OutputFormat, rng: random.Random) -> tuple[str, dict[str, Any]]:
    name = rng.choice(
        ["write_file", "write_file", "create_event", "create_event", "ping", "other_tool"]
    )
    if name == "other_tool":
        return name, {
            key: _plain(rng) for key in rng.sample(["a", "b-c", "größe"], rng.randint(0, 3))
        }
    keys = [key for key in _PROPERTIES[name] if rng.random() < 0.6]
    rng.shuffle(keys)
    return name, {key: _value(key, rng, is_m3=format is MINIMAX_M3) for key in keys}


def _value(key: str, rng: random.Random, *, is_m3: bool) -> Any:
    match key:
        case "mode":
            return rng.choice([0, 7, -12, 12345678901234567890])
        case "price":
            return rng.choice([0.5, 3, -1.25, 1e-7])
        case "limit":
            # the M3 template leaves null arguments out
            return rng.choice([3] if is_m3 else [3, None])
        case "note":
            return _plain(rng) if is_m3 or rng.random() < 0.7 else None
        case "tags":
            return [_words(rng) for _ in range(rng.randint(0, 4))]
        case "location":
            return {"city": _words(rng), "zip": rng.randint(0, 99999)}
        case "guests":
            return [
                {"name": _words(rng), "age": rng.randint(0, 99), "vip": rng.random() < 0.5}
                for _ in range(rng.randint(0, 3))
            ]
        case "matrix":
            return [
                [rng.randint(0, 9) for _ in range(rng.randint(0, 3))]
                for _ in range(rng.randint(0, 3))
            ]
        case "meta":
            return {"a": _plain(rng), "b": [_plain(rng), _plain(rng)], "c": {"d": _plain(rng)}}
        case "kind":
            return rng.choice(["none", "low", "high"])
        case "any":
            return _plain(rng)
        case _:
            return _words(rng)


def _plain(rng: random.Random) -> str:
    return "x" + _words(rng)


def m2_block(calls: list[tuple[str, Any]]) -> str:
    lines = ["\n<minimax:tool_call>\n"]
    for name, arguments in calls:
        lines.append(f'<invoke name="{name}">\n')
        for key, value in arguments.items():
            written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines.append(f'<parameter name="{key}">{written}</parameter>\n')
        lines.append("</invoke>\n")
    return "".join(lines) + "</minimax:tool_call>"


def m3_block(calls: list[tuple[str, Any]]) -> str:
    parts = [f"{MARKER}<tool_call>\n"]
    for name, arguments in calls:
        parts.append(
            f'{MARKER}<invoke name="{name}">{"".join(_m3_elements(arguments))}{MARKER}</invoke>\n'
        )
    return "".join(parts) + f"{MARKER}</tool_call>"


def _m3_elements(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, member in value.items():
            yield from (f"{MARKER}<{key}>", *_m3_elements(member), f"{MARKER}</{key}>")
    elif isinstance(value, list):
        for item in value:
            yield from (f"{MARKER}<item>", *_m3_elements(item), f"{MARKER}</item>")
    else:
        yield json.dumps(value) if isinstance(value, bool) else str(value)


def _call_head(format: OutputFormat) -> str:
    if format is MINIMAX_M2:
        return 'ok\n</think>\n\n<minimax:tool_call>\n<invoke name="write_file">\n'
    return f'{MARKER}<tool_call>\n{MARKER}<invoke name="create_event">'


def _damaged(format: OutputFormat, text: str, rng: random.Random) -> str:
    start = rng.randint(0, len(text))
    end = min(len(text), start + rng.randint(1, 20))
    tags = [match.span() for match in _TAG.finditer(text)]
    match rng.randrange(6):
        case 0:
            return text[:start] + text[end:]
        case 1:
            return text[:end] + text[start:]
        case 2:
            return text[:start] + rng.choice(_fragments(format)) + text[start:]
        case 3 if tags:
            start, end = rng.choice(tags)
            return text[:start] + text[end:]
        case 4 if tags:
            start, end = rng.choice(tags)
            return text[:start] + rng.choice(_fragments(format)) + text[end:]
        case _:
            return (
                text.replace(MARKER, "", 1)
                if rng.random() < 0.5
                else text[:start] + rng.choice(_WORDS) + text[end:]
            )


_TAG = re.compile(rf"(?:{re.escape(MARKER)})?</?[^<>]+>")


def _fragments(format: OutputFormat) -> list[str]:
    return [*_WORDS, *(_M2_FRAGMENTS if format is MINIMAX_M2 else _M3_FRAGMENTS)]


_M2_FRAGMENTS = [
    "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>", "</invoke>",
    "</parameter>", "<parameter>",
    '<invoke name="write_file">', '<invoke name="create_event">', '<invoke '
                                                                  'name="other">', '<invoke name '
                                                                                   'write_file">',
    '<invoke nameping">', '<invoke name="">', "<invoke name='ping' />", '<invoke '
                                                                        'name="Write_File">',
    '<parameter name="path">', '<parameter name="content">', "<parameter name='mode'>",
    '<parameter name="note">',
    '<parameter name="tags">', '<parameter name="meta">', '<parameter name="free">', '<parameter '
                                                                                     'name = '
                                                                                     '"any" '
                                                                                     'type="x">',
    "<parameter name=path>", "<invoke ", "</param", "<minimax:tool", "nul", "5", "[1, 2]",
    '{"a": 1}', "True",
]  # fmt: skip
_M3_FRAGMENTS = [
    "<mm:think>", "</mm:think>", "<mm:thin", "<tool_call>", "</tool_call>", "</invoke>",
    '<invoke name="ping">',
    MARKER, MARKER[:5], MARKER[5:], f"{MARKER} ", f"{MARKER}<", f"{MARKER}</",
    f"{MARKER}<tool_call>", f"{MARKER}</tool_call>",
    f"{MARKER}\n<tool_call>", f"{MARKER}</invoke>", f'{MARKER}<invoke '
                                                    f'name="write_file">', f"{MARKER}<item>",
    f'{MARKER}<invoke name="create_event">',
    f'{MARKER}<invoke name="other">', f'{MARKER}<invoke nameping">', f'{MARKER}<invoke '
                                                                     f'name{MARKER}<write_file">',
    f'{MARKER}<invoke{MARKER} name="ping">', f'{MARKER}<invoke name name="ping">',
    f"{MARKER}<invoke>",
    *(f"{MARKER}<{name}>" for name in ("path", "content", "mode", "note", "tags", "title",
        "location", "city", "zip")),
    *(f"{MARKER}<{name}>" for name in ("guests", "matrix", "meta", "any", "limit", "item", "item",
        "free", "a", "name", "age")),
    *(f"{MARKER}</{name}>" for name in ("path", "content", "mode", "tags", "location", "city",
        "guests", "meta", "any", "zip")),
    *(f"{MARKER}</{name}>" for name in ("matrix", "item", "item", "item", "free", "a", "name",
        "strange")),
    f"{MARKER}<tags/>", f"{MARKER}<city a=\"b\">", "</city>", "nul", "5", "[1, 2]", '{"a": 1}',
    "True", " \n ",
]  # fmt: skip


def parse(
    format: OutputFormat,
    text: str,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    in_reasoning: bool,
    thinking: Thinking = Thinking.SPLIT,
) -> ParsedOutput:
    parser = OutputParser(
        format, tools=tools, in_reasoning=in_reasoning, tag_ids=None, thinking=thinking
    )
    return collect([*parser.feed([TextPiece(text, None)]), *parser.finish()])
