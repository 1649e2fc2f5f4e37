"""Read names in the tags of a call, including malformed tags."""

import re
from collections.abc import Iterator

from negamax.text.parser.schema_values import ToolSchemas, ValueSchema

_QUOTED_NAME = re.compile(r"""\sname\s*=\s*(?:"([^"]*)"|'([^']*)')""")
_LOOSE_EDGES = " \t\r\n=:\"'“”"
# a tag as templates write it; the name may contain any character
_EXACT_NAME = re.compile(r'\S*\sname="(.*)">', re.DOTALL)
_NEXT_ATTRIBUTE = re.compile(r'"\s+[\w-]+\s*=')
_QUOTED_TEXT = re.compile(r"""=\s*(?:"([^"]+)"|'([^']+)')""")
_WORD = re.compile(r"\S*?<(?:invoke|parameter)")


def quoted_name(tag: str) -> str:
    """Return the name attribute of a tag, or "" if the attribute is malformed."""
    match = _QUOTED_NAME.search(tag)
    return (match[1] or match[2] or "") if match else ""


def tag_name(tag: str) -> str:
    """Return the name in a tag, even if a quote or equals sign is missing (`<invoke name f">`)."""
    exact = _EXACT_NAME.fullmatch(tag)
    if exact and not _NEXT_ATTRIBUTE.search(exact[1]):
        return exact[1]
    quoted = quoted_name(tag) or next(_list_quoted(tag), "")
    return quoted or _read_attributes(tag).removeprefix("name").strip(_LOOSE_EDGES)


def argument_name(tag: str, schema: ValueSchema) -> str:
    """Return the name in a parameter tag. In a malformed tag, prefer a name that `schema` lists."""
    exact = _EXACT_NAME.fullmatch(tag)
    if exact and '"' not in exact[1]:
        return exact[1]
    return next(filter(schema.lists, _list_candidates([tag])), None) or tag_name(tag)


def tool_name(readings: list[str], schemas: ToolSchemas) -> str:
    """Return the name of the tool in an invoke tag, or "" if there is no name.

    `readings` lists the possible texts of the tag, most likely first. The result is the first name
    that equals the name of a declared tool, ignoring letter case. If no reading names a declared
    tool, the result is the name in the first reading.
    """
    for candidate in _list_candidates(readings):
        declared = schemas.declared_name(candidate)
        if declared is not None:
            return declared
    return tag_name(readings[0])


def _list_candidates(readings: list[str]) -> Iterator[str]:
    for tag in readings:
        exact = _EXACT_NAME.fullmatch(tag)
        if exact:
            yield exact[1]
        yield quoted_name(tag)
        yield from _list_quoted(tag)
        name = _read_attributes(tag)
        yield name
        while name.startswith("name"):  # the tag repeats `name`: `<invoke name name=f>`
            name = name.removeprefix("name").strip(_LOOSE_EDGES)
            yield name


def _list_quoted(tag: str) -> Iterator[str]:
    """Yield the values of all attributes of a tag such as `<parameter rname="f">`."""
    return (match[1] or match[2] for match in _QUOTED_TEXT.finditer(tag))


def _read_attributes(tag: str) -> str:
    """Return the text after the first word of a tag, stripped of quotes and equals signs."""
    return _WORD.sub("", tag.removesuffix(">"), count=1).strip(_LOOSE_EDGES)
