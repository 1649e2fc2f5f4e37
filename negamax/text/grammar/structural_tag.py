"""Write the structural tags of xgrammar (`text.grammar.tag_formats`) for all kinds of grammars."""

import json
import re
from typing import Any

from negamax.config.grammar import Grammar, Reasoning, parse_json, refuse_grammar
from negamax.text.grammar.budget import RISKY_BYTES, RISKY_CHOICES, RISKY_LITERAL, Budget
from negamax.text.grammar.json_rules import json_format
from negamax.text.grammar.json_schema import Schemas
from negamax.text.grammar.schema_keywords import read_count
from negamax.text.grammar.shapes import ANY_MEMBERS
from negamax.text.grammar.tag_formats import (
    MAX_WHITESPACE,
    Format,
    any_of,
    const,
    marker,
    newlines,
    optional,
    sequence,
)
from negamax.text.grammar.tool_calls import CallStyles, calls_format, read_rules

# formats of a client's structural tag that compile in linear time, because they repeat nothing
_HARMLESS = (
    "const_string", "sequence", "or", "optional", "tag", "token", "exclude_token",
    "triggered_tags", "tags_with_separator",
)  # fmt: skip
_QUANTIFIER = re.compile(r"[*+?]|\{(\d+)(?:,(\d*))?\}")
# Literals of `json_rules` contain no "|" and no line break, because `json_rules` escapes them.
_LONG_LITERAL = re.compile(rf'"[^"|\n]{{{RISKY_LITERAL}}}')


def structural_tag(
    grammar: Grammar, reasoning: Reasoning | None, styles: CallStyles, budget: Budget | None = None
) -> str:
    """Return the structural tag of an output, from the point where the output's grammar begins.

    If the prompt opens the reasoning, the grammar begins after the closing tag of the reasoning. If
    the reasoning is optional, the grammar contains the reasoning. `styles` are the call styles of
    all families by name. After the call, `budget.is_risky` is True if compiling may take long or
    crash. Raises `InvalidRequestError` for errors that `Grammar.check` does not find.
    """
    budget = budget or Budget()
    try:
        content = content_format(grammar, budget, styles)
    except RecursionError:
        refuse_grammar("a pattern or schema of the grammar is nested too deeply; simplify it")
    tag = json.dumps({"type": "structural_tag", "format": _prepend_reasoning(reasoning, content)})
    is_large = len(tag) > (RISKY_CHOICES if grammar.kind == "choice" else RISKY_BYTES)
    budget.is_risky |= is_large or _has_long_literal(content)
    return tag


def _has_long_literal(part: Any) -> bool:
    """Return whether a format has a long literal. Compiling a literal takes quadratic time."""
    if isinstance(part, list):
        return any(map(_has_long_literal, part))
    if not isinstance(part, dict):
        return isinstance(part, str) and len(part) > RISKY_LITERAL
    if part.get("type") == "grammar":
        return _LONG_LITERAL.search(part["grammar"]) is not None
    return any(map(_has_long_literal, part.values()))


def is_simple(pattern: str) -> bool:
    """Return True if matching a regular expression certainly needs few states at a time."""
    if len(pattern) > 1000 or "){" in pattern:
        return False
    found = list(_QUANTIFIER.finditer(pattern))
    counts = [int(one[2] or one[1] or 1) for one in found]
    return len(counts) <= 1 or (len(counts) <= 10 and sum(counts) <= 200)


def content_format(grammar: Grammar, budget: Budget, styles: CallStyles) -> Format:
    """Return the format of the content, without the reasoning."""
    whitespace = 0 if grammar.compact else MAX_WHITESPACE
    match grammar.kind:
        case "json_object":
            return json_format(
                Schemas(True, strict=True, budget=budget), [ANY_MEMBERS], whitespace=whitespace
            )
        case "json_schema":
            schema = parse_json(grammar.text, what="JSON schema")
            schemas = Schemas(schema, strict=grammar.strict, budget=budget)
            return json_format(schemas, schemas.shapes((schema,)), whitespace=whitespace)
        case "regex":
            budget.is_risky |= not is_simple(grammar.text)
            return {"type": "regex", "pattern": grammar.text}
        case "choice":
            return any_of([const(choice) for choice in parse_json(grammar.text, what="choice")])
        case "ebnf":
            budget.is_risky = True
            return {"type": "grammar", "grammar": grammar.text}
        case "structural_tag":
            return _read_format(parse_json(grammar.text, what="structural tag"), budget)
        case "tool_calls":
            rules = read_rules(grammar.text)
            inner = rules.content
            content = None if inner is None else content_format(inner, budget, styles)
            return calls_format(rules, styles, content=content, budget=budget)


def _prepend_reasoning(reasoning: Reasoning | None, content: Format) -> Format:
    """Prepend formats of optional reasoning and of line breaks to the format `content`."""
    if reasoning is None:
        return content
    if reasoning.max_newlines:
        content = sequence([newlines(reasoning.max_newlines), content])
    if reasoning.state == "open":
        return content
    closer = marker(reasoning.closer)
    inside: Format = {"type": "any_text", "excludes": [reasoning.closer.text]}
    if reasoning.closer.token_id is not None:
        tags = (reasoning.opener, reasoning.closer, reasoning.call_opener)
        excluded = [tag.token_id for tag in tags if tag.token_id is not None]
        inside = {"type": "any_tokens", "exclude_tokens": excluded}
    block = sequence([marker(reasoning.opener), inside, closer])
    return sequence([optional(any_of([block, closer])), content])


def _read_schemas(part: Any, budget: Budget) -> Any:
    """Replace the JSON schemas in a client's format by grammars."""
    if isinstance(part, list):
        return [_read_schemas(item, budget) for item in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "json_schema" and part.get("style", "json") == "json":
        limit = read_count(part.get("max_whitespace_cnt"))
        schemas = Schemas(part.get("json_schema"), strict=False, budget=budget)
        whitespace = MAX_WHITESPACE if limit is None else limit
        return json_format(schemas, schemas.shapes((schemas.root,)), whitespace=whitespace)
    if "type" in part:
        budget.note_format(is_harmless=part["type"] in _HARMLESS)
    return {key: _read_schemas(value, budget) for key, value in part.items()}


def _read_format(value: Any, budget: Budget) -> Format:
    """Read a client's structural tag: field `format`, or fields `structures` and `triggers`."""
    if isinstance(value.get("format"), dict):
        given: Format = _read_schemas(value["format"], budget)
        return given
    structures, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        refuse_grammar("the structural tag has neither a 'format' nor 'structures' and 'triggers'")
    tags = []
    for structure in structures:
        given = structure if isinstance(structure, dict) else {}
        begin, end = given.get("begin"), given.get("end")
        if not isinstance(begin, str) or not isinstance(end, str):
            refuse_grammar("a structure of the structural tag lacks 'begin' or 'end'")
        schemas = Schemas(given.get("schema", True), strict=False, budget=budget)
        content = json_format(schemas, schemas.shapes((schemas.root,)))
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}
