"""What every dialect demands of a declared function: a name that survives in the model's format, and a schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from negamax.api.schemas.common import refuse, shown

MAX_TOOLS = 1024
MAX_TOOL_NAME_CHARS = 256

_NAME_BREAKERS = frozenset('"<>\n\r\t')  # would not survive <invoke name="...">


def check_tool_count(count: int, *, field: str = "tools") -> None:
    """Refuse more tools than any client has."""
    if count > MAX_TOOLS:
        refuse(field, f"{count} tools; allowed: at most {MAX_TOOLS}")


def check_function(function: Mapping[str, Any], *, where: str, schema_field: str = "parameters") -> None:
    """Refuse a function whose name, description or schema (in `schema_field`) the prompt or the parser could not use; `where`
    is its place in the request. The rest of it goes to the template as the client wrote it."""
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_TOOL_NAME_CHARS or not _NAME_BREAKERS.isdisjoint(name):
        allowed = f"1 to {MAX_TOOL_NAME_CHARS} characters without quotes, angle brackets and line breaks"
        refuse(f"{where}.name", f"{shown(name)}; allowed: {allowed}")
    for key, kind in (("description", str), (schema_field, dict)):
        if not isinstance(function.get(key), kind | None):
            refuse(f"{where}.{key}", f"must be a JSON {'string' if kind is str else 'object'}")
