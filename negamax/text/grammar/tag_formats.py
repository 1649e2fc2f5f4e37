"""Building blocks of xgrammar's structural tags, as JSON values.

A format is a mapping with a `type`: `const_string`, `regex`, `grammar` (GBNF),
`any_text` (up to the first of `excludes`), `token` (by its id), and `sequence`, `or`, `optional`,
`plus`, `star` of other formats.
"""

from collections.abc import Sequence
from typing import Any

from negamax.config.grammar import Marker

Format = dict[str, Any]

# White space between two parts of a JSON text: four levels of indentation. Without a limit, a model
# may write only white space.
MAX_WHITESPACE = 20


def const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def marker(tag: Marker) -> Format:
    """Return a tag: its token, or its text without one."""
    return const(tag.text) if tag.token_id is None else {"type": "token", "token": tag.token_id}


def sequence(parts: Sequence[Format]) -> Format:
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": list(parts)}


def any_of(branches: Sequence[Format]) -> Format:
    return branches[0] if len(branches) == 1 else {"type": "or", "elements": list(branches)}


def optional(part: Format) -> Format:
    return {"type": "optional", "content": part}


def newlines(most: int) -> Format:
    """Return up to `most` line breaks."""
    return {"type": "regex", "pattern": f"\\n{{0,{most}}}"}
