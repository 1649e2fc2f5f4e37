"""Local references of JSON schemas: JSON pointers into the same document (`#/$defs/Point`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote


def pointer_steps(reference: str) -> list[str] | None:
    """The keys on the way to what `reference` names; None for one into another document."""
    if not reference.startswith("#"):
        return None
    steps = unquote(reference[1:]).split("/")[1:]
    return [step.replace("~1", "/").replace("~0", "~") for step in steps]


def pointer_target(reference: str, *, root: Any) -> Any:
    """The part of `root` that `reference` names, or None."""
    steps = pointer_steps(reference)
    node = None if steps is None else root
    for step in steps or ():
        if isinstance(node, Mapping):
            node = node.get(step)
        elif isinstance(node, list) and step.isdecimal() and int(step) < len(node):
            node = node[int(step)]
        else:
            return None
    return node
