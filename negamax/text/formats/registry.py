"""The table of model families, by their short names."""

from __future__ import annotations

from collections.abc import Mapping

from negamax.base.errors import ConfigError
from negamax.text.formats.family import ChatFamily
from negamax.text.formats.minimax_m2 import MINIMAX_M2_FAMILY
from negamax.text.formats.minimax_m3 import MINIMAX_M3_FAMILY

FAMILIES: Mapping[str, ChatFamily] = {"m2": MINIMAX_M2_FAMILY, "m3": MINIMAX_M3_FAMILY}

CALL_STYLES = {family.call_style.name: family.call_style for family in FAMILIES.values()}
TOKEN_TAGS = frozenset[str]().union(*(family.token_tags for family in FAMILIES.values()))


def family_of(model: str) -> ChatFamily:
    """The family of a model, by the architecture or model_type in config.json.

    Errors: `ConfigError` for a model of no family in the table.
    """
    plain = model.lower().replace("_", "").replace("-", "")
    for family in FAMILIES.values():
        if family.output.name.replace("_", "") in plain:
            return family
    known = " and ".join(family.title for family in FAMILIES.values())
    raise ConfigError(
        f"no parser is known for {model!r}; known: {known}",
        hint="name one with --tool-call-parser and --reasoning-parser, or none",
    )
