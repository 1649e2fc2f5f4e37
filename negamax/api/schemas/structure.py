"""Build one `Grammar` from the many fields by which clients constrain an answer."""

import functools
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from negamax.api.schemas.request_model import (
    check_choice,
    check_type,
    describe,
    refuse,
    suggest_nearest,
)
from negamax.api.schemas.sampled_request import GenerationRequest
from negamax.base.errors import InvalidRequestError
from negamax.config.grammar import Grammar, GrammarKind, written

RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")

# Request fields (and, in `_STRUCTURED_KINDS`, keys of `structured_outputs`) -> grammar kind.
_FIELD_KINDS: dict[str, GrammarKind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "structural_tag": "structural_tag",
}
_STRUCTURED_KINDS: dict[str, GrammarKind] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}
_MAX_KEY_CHARS = 60  # An error message quotes at most this many characters of an unknown key.
_COMPACT = "disable_any_whitespace"  # Key of `structured_outputs` for JSON without white space.
_UNSUPPORTED_OPTIONS = ("whitespace_pattern", "disable_additional_properties")
_IGNORED_OPTIONS = ("disable_fallback", "_backend", "_backend_was_auto")  # vLLM's internal keys.


class StructuredRequest(GenerationRequest):
    """A request that may constrain its answer with fields of OpenAI, vLLM or SGLang.

    JSON schemas and structural tags may be objects or JSON text.
    """

    # OpenAI's object, whose `type` is text, json_object, json_schema or structural_tag.
    response_format: dict[str, Any] | None = None
    # vLLM's object, with one of the keys `json`, `json_object`, `regex`, `choice`, `grammar` and
    # `structural_tag`. The key `disable_any_whitespace` requests JSON without white space.
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None  # JSON schema of the content.
    guided_regex: str | None = None  # Regular expression that the whole content matches.
    guided_choice: list[str] | None = None  # The content must be one of the listed texts.
    guided_grammar: str | None = None  # An EBNF grammar with the start rule `root`.
    json_schema: dict[str, Any] | str | bool | None = None  # SGLang's name for guided_json.
    regex: str | None = None  # SGLang's name for guided_regex.
    ebnf: str | None = None  # SGLang's name for guided_grammar.
    structural_tag: dict[str, Any] | str | None = None  # Grammars for text between tags.

    @functools.cached_property
    def grammar(self) -> Grammar | None:
        """The grammar of the content, or None without a grammar. Raises `InvalidRequestError`."""
        found: dict[str, Grammar] = {}
        if self.response_format is not None:
            form = build_format_grammar(
                self.response_format, RESPONSE_FORMATS, "response_format", is_nested=True
            )
            if form is not None:
                found["response_format"] = form
        structured = self.structured_outputs or {}
        is_compact = _read_options(structured)
        for name, kind in _STRUCTURED_KINDS.items():
            if structured.get(name) not in (None, False):
                where = f"structured_outputs.{name}"
                found[where] = build_grammar(kind, structured[name], param=where)
        for name, kind in _FIELD_KINDS.items():
            value = getattr(self, name)
            if value is not None:
                found[name] = build_grammar(kind, value, param=name)
        if len(found) > 1:
            asked = " and ".join(found)
            refuse(list(found)[1], f"one answer cannot have two grammars; the request sets {asked}")
        form = next(iter(found.values()), None)
        return None if form is None else replace(form, compact=is_compact)


def _read_options(structured: Mapping[str, Any]) -> bool | None:
    """Refuse unknown keys of `structured_outputs`. Return the value of `disable_any_whitespace`."""
    known = [*_STRUCTURED_KINDS, _COMPACT, *_IGNORED_OPTIONS]
    for name, value in structured.items():
        if value is None or name in known or (name in _UNSUPPORTED_OPTIONS and value is False):
            continue
        hint = suggest_nearest(name, known) or f" Known keys: {', '.join(_STRUCTURED_KINDS)}."
        is_known = name in _UNSUPPORTED_OPTIONS
        problem = "is not supported; leave it out" if is_known else f"is not a known key.{hint}"
        refuse(f"structured_outputs.{name[:_MAX_KEY_CHARS]}", problem)
    value = structured.get(_COMPACT)
    if value is None:
        return None
    return check_type(value, bool, f"structured_outputs.{_COMPACT}", "a boolean")


def build_format_grammar(
    form: Mapping[str, Any], allowed: tuple[str, ...], param: str, *, is_nested: bool = False
) -> Grammar | None:
    """Return the grammar of the format `form` in field `param`. `allowed` lists format types.

    With `is_nested`, the schema of the format is inside the object `json_schema`.
    """
    match check_choice(form.get("type"), allowed, param, what="type "):
        case "text":
            return None
        case "json_object" if form.get("schema") is None:
            return Grammar(kind="json_object")
        case "json_object":
            is_nested = False  # Here `schema` is beside `type`, as llama.cpp's clients send it.
        case "structural_tag":
            return build_grammar("structural_tag", dict(form), param=param)
    described: Any = form
    if is_nested:
        described, param = form.get("json_schema"), f"{param}.json_schema"
        if not isinstance(described, Mapping) or described.get("schema") is None:
            refuse(param, "the value must be an object with a schema")
    is_strict, schema = described.get("strict") is True, described.get("schema")
    return build_grammar("json_schema", schema, param=f"{param}.schema", strict=is_strict)


def build_grammar(kind: GrammarKind, value: Any, *, param: str, strict: bool = False) -> Grammar:
    """Build and check a grammar. `value` is the value of the request field `param`.

    Schemas and structural tags may be JSON text. Schemas keep the client's key order.
    """
    if kind == "json_object":
        return Grammar(kind="json_object")
    allowed = {"json_schema": dict | bool | str, "structural_tag": dict | str, "choice": list}
    if not isinstance(value, allowed.get(kind, str)):
        what = "a list of strings" if kind == "choice" else "text"
        refuse(param, f"the value must be {what}; got {describe(value)}")
    try:
        text = value if isinstance(value, str) else written(value, kind=kind)
        grammar = Grammar(kind=kind, text=text, strict=strict)
        grammar.check()
    except InvalidRequestError as error:
        raise InvalidRequestError(
            f"{param}: {error.message}", hint=error.hint, param=param, code=error.code
        ) from None
    return grammar
