"""Read calls and arguments that a model wrote in the syntax of another model.

A call with an unreadable argument is dropped, because a tool must not run with missing arguments.
"""

import re
from collections.abc import Iterable
from typing import Any

from negamax.text.parser.schema_values import (
    CONTAINERS,
    ToolSchemas,
    ValueSchema,
    parse_json,
    write_json,
    write_object,
)
from negamax.text.parser.tag_names import quoted_name

_MAX_DEPTH = 16  # maximum levels of nested elements
WRAPPERS = ("arguments", "parameters", "args", "input")  # keys whose value has all arguments
_FENCED = re.compile(r"```\w*\n(.*?)\n?```", re.DOTALL)
_ELEMENT = re.compile(r"\s*<([^<>/\s=]+)(\s[^<>]*)?>")
_OPEN_TAG = re.compile(r"\s*<?parameter\s+name\s*=\s*[\"']([^\"'<>\n]+)[\"']")
_NAMED = re.compile(r"(?<![\w.-])[\w.-]++(?=[\"']?\s*[:=>])")


def read_json_calls(text: str, schemas: ToolSchemas) -> list[tuple[str, dict[str, str]]]:
    """Return the calls in `text`, each as the tool's name and the JSON of each named argument.

    A call is a JSON object with the name of a declared tool and with arguments. The calls are in a
    list, or each line contains one call. If `text` contains anything but calls, return [].
    """
    text = _strip_fence(text)
    if not text.startswith(("{", "[")):
        return []
    whole = _parse(text)
    values = whole if isinstance(whole, list) else [whole]
    if whole is None:
        values = [_parse(line) for line in text.splitlines() if line.strip()]
    calls = []
    for value in values:
        call = value.get("function", value) if isinstance(value, dict) else {}
        call = call if isinstance(call, dict) else {}
        name = call.get("name")
        tool = schemas.declared_name(name) if isinstance(name, str) else None
        given = next((call[key] for key in WRAPPERS if key in call), None) if tool else None
        arguments = _parse(given) if isinstance(given, str) else given
        members = _write_members(arguments) if isinstance(arguments, dict) else None
        if tool is None or members is None:
            return []
        calls.append((tool, members))
    return calls


def read_members(text: str, schema: ValueSchema) -> dict[str, str] | None:
    """Return the JSON of each member if `text` is an object in JSON or XML, else None."""
    text = _strip_fence(text)
    if not text.startswith("{"):
        return _read_elements(text, schema, depth=0)
    value = _parse(text)
    if not isinstance(value, dict):
        return None
    for key in WRAPPERS:
        others = value.keys() - {key, "name", "id", "type"}
        if isinstance(value.get(key), dict) and not others and not any(map(schema.lists, value)):
            value = value[key]
            break
    return _write_members(value)


def read_value(text: str, schema: ValueSchema) -> str:
    """Convert `text` to JSON. The text of an object or array may be XML elements."""
    return _read_value(text, schema, depth=0) or schema.convert(text)


def may_hold_argument(text: str, schema: ValueSchema) -> bool:
    """Return whether `text` looks like an argument and not like prose."""
    if text.lstrip().startswith(("{", "[", "<")):
        return True
    return any(name == "name" or schema.lists(name) for name in _NAMED.findall(text))


def find_key(text: str, schema: ValueSchema, taken: Iterable[str]) -> tuple[str, str]:
    """Find the key and the value in the text between a damaged opening tag and a closing tag.

    The rest of the opening tag contains the key, as in `parameter name="path">a.txt`. The key is ""
    if the schema does not list the key.
    """
    head, found, value = text.partition(">")
    words = re.findall(r"[^\s\"'<>=]+", head[:600]) if found else []
    for word in reversed(words):
        if schema.lists(word) and word not in taken:
            return word, value
    named = _OPEN_TAG.match(text)  # `_OPEN_TAG` matches a tag without its closing angle bracket
    if named and schema.lists(named[1]) and named[1] not in taken:
        return named[1], text[named.end() :]
    return "", value if words == ["parameter"] else text


def _strip_fence(text: str) -> str:
    text = text.strip()
    fenced = _FENCED.fullmatch(text)
    return fenced[1].strip() if fenced else text


def _parse(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None


def _write_members(members: dict[str, Any]) -> dict[str, str]:
    return {key: write_json(member) for key, member in members.items()}


def _read_elements(text: str, schema: ValueSchema, *, depth: int) -> dict[str, str] | None:
    elements = _split_elements(text)
    if elements is None or depth > _MAX_DEPTH:
        return None
    if len(elements) == 1 and elements[0][0] in WRAPPERS and not schema.lists(elements[0][0]):
        inner = elements[0][1].strip()
        return read_members(inner, schema) if inner[:1] in ("{", "<") else None
    members: dict[str, str] = {}
    for key, inner in elements:
        if key in members or (schema.names and not schema.lists(key)):
            return None
        value = _read_value(inner, schema.member(key), depth=depth + 1)
        if value is None:
            return None
        members[key] = value
    return members


def _read_value(text: str, schema: ValueSchema, *, depth: int) -> str | None:
    if "string" in schema.types or not schema.types & CONTAINERS or text.lstrip()[:1] != "<":
        return schema.convert(text)
    if "object" in schema.types:
        members = _read_elements(text, schema, depth=depth)
        return None if members is None else write_object(members.items())
    elements = None if depth > _MAX_DEPTH else _split_elements(text)
    if elements is None:
        return None
    parts = [
        _read_value(inner, schema.item(place), depth=depth + 1)
        for place, (_, inner) in enumerate(elements)
    ]
    items = [part for part in parts if part is not None]
    return f"[{', '.join(items)}]" if len(items) == len(parts) else None


def _split_elements(text: str) -> list[tuple[str, str]] | None:
    """Return the name and text of each element, or None if `text` contains anything else."""
    elements = []
    place = 0
    while match := _ELEMENT.match(text, place):
        closer = f"</{match[1]}>"
        end = text.find(closer, match.end())
        if end < 0:
            return None
        elements.append((quoted_name(match[0]) or match[1], text[match.end() : end]))
        place = end + len(closer)
    return elements if elements and not text[place:].strip() else None
