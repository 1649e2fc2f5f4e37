"""Data classes of structured output: the grammar, and the tags around the reasoning."""

import itertools
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

import msgspec

from negamax.base.errors import InvalidRequestError
from negamax.base.pieces import count_nesting, num_chars
from negamax.base.unicode import valid_unicode

GrammarKind = Literal[
    "json_object", "json_schema", "regex", "choice", "ebnf", "structural_tag", "tool_calls"
]

MAX_TEXT_BYTES = 512 * 1024
MAX_NESTING = 100  # Maximum depth of nested objects and arrays in JSON.
MAX_CALLS_NESTING = MAX_NESTING + 5  # Tool call grammars nest schemas 5 levels deeper.
MAX_CHOICES = 2000
MAX_GROUPS = 200  # maximum depth of nested groups in a regex or GBNF text

# escapes and character classes, in which parentheses do not open or close a group
_CLASS = r"\\.|\[(?:\\.|[^\]\\])*\]?"
_NO_GROUPS = {
    "regex": re.compile(_CLASS, re.DOTALL),
    "ebnf": re.compile(_CLASS + r'|"(?:\\.|[^"\\])*"?|#[^\n]*', re.DOTALL),
}
_NOTES = frozenset({"title", "description", "$comment"})  # keywords that do not limit the output
UNWRITABLE = "an infinite number or a lone surrogate"


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """The grammar of an output's content. `kind` determines the content of `text`:

    json_object: empty
    json_schema: the schema as JSON; with `strict`, keywords that cannot be enforced are refused
    regex: a regular expression that matches the whole content
    choice: a JSON array of strings
    ebnf: GBNF rules with `root`
    structural_tag: a structural tag of xgrammar as JSON
    tool_calls: `text.grammar.tool_calls.CallRules` as JSON
    """

    kind: GrammarKind
    text: str = ""
    strict: bool = True
    # whether JSON has no white space between tokens; None: use the server's setting
    compact: bool | None = None

    def check(self) -> None:
        """Refuse text that is malformed or too large. Raises `InvalidRequestError`."""
        limit, text = MAX_TEXT_BYTES, self.text
        if len(text) > limit or len(text.encode("utf-8", "surrogatepass")) > limit:
            refuse_grammar(
                f"the {self.kind} has {len(text)} characters; at most {limit} bytes are allowed"
            )
        try:
            self.text.encode()
        except UnicodeEncodeError:
            refuse_grammar(f"the {self.kind} contains a lone surrogate; send valid Unicode")
        if self.kind in ("regex", "ebnf") and not self.text:
            refuse_grammar(f"the {self.kind} is empty; send an expression")
        if self.kind in _NO_GROUPS:
            brackets = re.sub(r"[^()]", "", _NO_GROUPS[self.kind].sub("", self.text))
            steps = (1 if bracket == "(" else -1 for bracket in brackets)
            depth = max(itertools.accumulate(steps), default=0)
            if depth > MAX_GROUPS:
                refuse_grammar(
                    f"the {self.kind} nests groups {depth} levels deep; "
                    f"at most {MAX_GROUPS} levels are allowed"
                )
        if self.kind in ("json_schema", "choice", "structural_tag", "tool_calls"):
            self._check_json()

    def _check_json(self) -> None:
        nesting = MAX_CALLS_NESTING if self.kind == "tool_calls" else MAX_NESTING
        value = parse_json(self.text, what=self.kind, max_nesting=nesting)
        if (place := find_unwritable(value)) is not None:
            refuse_grammar(f"the {self.kind} contains {UNWRITABLE} at {place!r}")
        if self.kind == "json_schema" and not isinstance(value, dict | bool):
            refuse_grammar(
                f"the JSON schema is a {type(value).__name__}; an object or a boolean is needed"
            )
        if self.kind == "choice":
            is_list = isinstance(value, list) and all(isinstance(each, str) for each in value)
            if not is_list or not value:
                refuse_grammar("the choice is not an array of one or more strings")
            if len(value) > MAX_CHOICES:
                refuse_grammar(
                    f"the choice has {len(value)} strings; at most {MAX_CHOICES} are allowed"
                )
        if self.kind in ("structural_tag", "tool_calls") and not isinstance(value, dict):
            refuse_grammar(f"the {self.kind} is a JSON {type(value).__name__}; an object is needed")


def written(value: object, *, kind: GrammarKind) -> str:
    """Return `value` as the JSON text of a grammar. Infinite numbers become `Infinity`.

    Raises `InvalidRequestError` if the text is too large.
    """
    count = num_chars(value)
    if count > MAX_TEXT_BYTES:
        refuse_grammar(
            f"the {kind} has {count} characters or more; at most {MAX_TEXT_BYTES} bytes are allowed"
        )
    return json.dumps(value, ensure_ascii=False)


def find_unwritable(value: object, *, mended: str = "") -> str | None:
    """Return the path of the first value in a schema that UTF-8 JSON cannot encode, or None.

    Titles, descriptions and comments are not checked. If lone surrogates were replaced, `mended` is
    the new character. Texts that contain `mended` are also reported.
    """
    if isinstance(value, float):
        return None if math.isfinite(value) else ""
    if isinstance(value, str):
        return None if valid_unicode(value) == value and not (mended and mended in value) else ""
    parts = value.items() if isinstance(value, Mapping) else ()
    for name, inner in enumerate(value) if isinstance(value, list | tuple) else parts:
        if isinstance(name, str) and find_unwritable(name, mended=mended) is not None:
            return f".{valid_unicode(name)}"
        if name in _NOTES and isinstance(inner, str):
            continue
        if (place := find_unwritable(inner, mended=mended)) is not None:
            return f"[{name}]{place}" if isinstance(name, int) else f".{name}{place}"
    return None


class Marker(msgspec.Struct, frozen=True):
    """A tag in an output: the token `token_id`, or without an id any tokens that spell `text`."""

    text: str
    token_id: int | None = None


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """The tags around the reasoning of an output. The grammar applies after the reasoning."""

    # "open": the output starts within reasoning; "optional": the output may start with `opener`
    state: Literal["open", "optional"]
    opener: Marker
    closer: Marker
    call_opener: Marker  # Tag that begins a block of tool calls, and also ends reasoning.
    closing_ids: tuple[int, ...]  # Tokens that end the reasoning when the thinking budget is spent.
    max_newlines: int  # Limit of newlines between `closer` and the content.

    def check(self, *, vocab_size: int) -> None:
        """Refuse token ids outside the vocabulary. Raises `InvalidRequestError`."""
        markers = (self.opener, self.closer, self.call_opener)
        found = (marker.token_id for marker in markers if marker.token_id is not None)
        ids = [*self.closing_ids, *found]
        if not self.closing_ids or not all(0 <= token_id < vocab_size for token_id in ids):
            raise InvalidRequestError(
                f"reasoning has the token ids {ids}; allowed: ids from 0 to {vocab_size - 1}, and "
                f"at least one id in closing_ids",
                param="reasoning",
                code="invalid_value",
            )


def parse_json(text: str, *, what: str, max_nesting: int = MAX_NESTING) -> Any:
    """Parse JSON whose nesting depth is at most `max_nesting`. Raises `InvalidRequestError`."""
    try:
        value = json.loads(text)
    except RecursionError:
        refuse_grammar(f"the {what} is nested too deeply; at most {max_nesting} levels are allowed")
    except ValueError as error:
        refuse_grammar(f"the {what} is not valid JSON: {error}")
    depth = count_nesting(value)
    if depth > max_nesting:
        refuse_grammar(
            f"the {what} is nested {depth} levels deep; at most {max_nesting} are allowed"
        )
    return value


def refuse_grammar(message: str) -> NoReturn:
    raise InvalidRequestError(message, param="grammar", code="invalid_grammar")
