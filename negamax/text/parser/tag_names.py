"""Reads names in the tags of a call, also in garbled tags."""

import re
from collections.abc import Iterator

from negamax.text.parser.schema_values import ToolSchemas

_QUOTED_NAME = re.compile(r"""\sname\s*=\s*(?:"([^"]*)"|'([^']*)')""")
_LOOSE_EDGES = " \t\r\n=:\"'"


def quoted_name(tag: str) -> str:
    """Return the name attribute of a tag, or "" if it is malformed."""
    match = _QUOTED_NAME.search(tag)
    return (match[1] or match[2] or "") if match else ""


def tag_name(tag: str) -> str:
    """Return the name in a tag that may lack a quote or the equals sign: `<invoke name f">`."""
    return quoted_name(tag) or _read_attributes(tag).removeprefix("name").strip(_LOOSE_EDGES)


def tool_name(readings: list[str], schemas: ToolSchemas) -> str:
    """Return the tool that an invoke tag names, or "".

    `readings` are the possible texts of the tag, the likeliest first. The first declared name in
    one of them counts, in any unambiguous letter case; else the name in the first reading.
    """
    for candidate in _list_candidates(readings):
        declared = schemas.declared_name(candidate)
        if declared is not None:
            return declared
    return tag_name(readings[0])


def _list_candidates(readings: list[str]) -> Iterator[str]:
    for tag in readings:
        yield quoted_name(tag)
        name = _read_attributes(tag)
        yield name
        while name.startswith("name"):  # `<invoke name name=f>`
            name = name.removeprefix("name").strip(_LOOSE_EDGES)
            yield name


def _read_attributes(tag: str) -> str:
    """Return the text after a tag's first word, without quotes and equals signs at the edges."""
    return "".join(tag.removesuffix(">").split(None, 1)[1:]).strip(_LOOSE_EDGES)
