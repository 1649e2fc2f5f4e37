"""Building blocks of xgrammar's structural tags, as JSON values.

A format is a mapping with a `type`. The types are `const_string`, `regex`, `grammar` (GBNF),
`any_text` (text without the strings in `excludes`), `token` (a token id), and combinations of
formats: `sequence`, `or`, `optional`, `plus` and `star`.
"""

from collections.abc import Sequence
from typing import Any

from negamax.config.grammar import Marker

Format = dict[str, Any]

# Maximum white space between two parts of JSON, enough for four levels of indentation. Without this
# limit, a model may write white space endlessly.
MAX_WHITESPACE = 20


def const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def marker(tag: Marker) -> Format:
    """Return the format of a tag: its token, or its text if it has no token."""
    return const(tag.text) if tag.token_id is None else {"type": "token", "token": tag.token_id}


def sequence(parts: Sequence[Format]) -> Format:
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": list(parts)}


def any_of(branches: Sequence[Format]) -> Format:
    return branches[0] if len(branches) == 1 else {"type": "or", "elements": list(branches)}


def optional(part: Format) -> Format:
    return {"type": "optional", "content": part}


def newlines(most: int) -> Format:
    return {"type": "regex", "pattern": f"\\n{{0,{most}}}"}
