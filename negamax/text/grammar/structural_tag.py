"""Write grammars as xgrammar's structural tags (`text.grammar.tag_formats`)."""

import json
from typing import Any

from negamax.config.grammar import Grammar, Reasoning, parse_json, refuse_grammar
from negamax.text.grammar.json_schema import Budget, prepared
from negamax.text.grammar.tag_formats import (
    MAX_WHITESPACE,
    Format,
    any_of,
    const,
    json_format,
    marker,
    newlines,
    optional,
    sequence,
)
from negamax.text.grammar.tool_calls import CallStyles, calls_format, read_rules


def structural_tag(grammar: Grammar, reasoning: Reasoning | None, styles: CallStyles) -> str:
    """Return the structural tag of an output, from the point where its grammar begins.

    That point is after the closer of an open reasoning; an optional reasoning is part of the
    grammar. `styles`: the call styles of all families by name. Errors: `InvalidRequestError` for
    errors that `Grammar.check` cannot find.
    """
    content = content_format(grammar, Budget(), styles)
    return json.dumps({"type": "structural_tag", "format": _prepend_reasoning(reasoning, content)})


def content_format(grammar: Grammar, budget: Budget, styles: CallStyles) -> Format:
    """Return the format of the content without reasoning."""
    match grammar.kind:
        case "json_object":
            return json_format({"type": "object"})
        case "json_schema":
            schema = parse_json(grammar.text, what="JSON schema")
            return json_format(prepared(schema, strict=grammar.strict, budget=budget))
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "choice":
            return any_of([const(choice) for choice in parse_json(grammar.text, what="choice")])
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.text}
        case "structural_tag":
            return _read_format(parse_json(grammar.text, what="structural tag"), budget)
        case "tool_calls":
            rules = read_rules(grammar.text)
            inner = rules.content
            content = None if inner is None else content_format(inner, budget, styles)
            return calls_format(rules, styles, content=content, budget=budget)


def _prepend_reasoning(reasoning: Reasoning | None, content: Format) -> Format:
    """Prepend the allowed line breaks and reasoning to `content`."""
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


def _bound_whitespace(part: Any) -> Any:
    """Limit the white space of JSON in a client's format."""
    if isinstance(part, list):
        return [_bound_whitespace(item) for item in part]
    if not isinstance(part, dict):
        return part
    inner = {key: _bound_whitespace(value) for key, value in part.items() if key != "json_schema"}
    made = {**part, **inner}
    if made.get("type") == "json_schema" and made.get("max_whitespace_cnt") is None:
        made["max_whitespace_cnt"] = MAX_WHITESPACE
    return made


def _read_format(value: Any, budget: Budget) -> Format:
    """Read a client's structural tag: `format`, or the older `structures` and `triggers`."""
    if isinstance(value.get("format"), dict):
        given: Format = _bound_whitespace(value["format"])
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
        content = json_format(prepared(given.get("schema", True), strict=False, budget=budget))
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}
