"""The table of model families. A new family needs a folder `models/<family>/` and a line in `_ALL`.

`models/build.py` builds the models, because this module does not import torch.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from negamax.base.errors import ConfigError
from negamax.config.fields import refuse
from negamax.config.model_spec import ModelSpec
from negamax.config.quantization import MODELOPT_FILE, read_quantization
from negamax.models.drafts import DraftFamily, DraftSpec, IsDraft
from negamax.models.dspark import config as dspark
from negamax.models.eagle3 import config as eagle3
from negamax.models.family import Init, ModelFamily, WeightNames
from negamax.models.minimax_m2 import config as minimax_m2
from negamax.models.minimax_m3 import config as minimax_m3
from negamax.text.chat_family import ChatFamily

_ALL = (*minimax_m2.FAMILIES, *minimax_m3.FAMILIES)
FAMILIES = {family.architecture: family for family in _ALL}
DRAFTS = {eagle3.FAMILY.architecture: eagle3.FAMILY, **dspark.FAMILIES}  # Drafts by architecture.
# `CHAT_FAMILIES`: chat formats by their short names ("m2", "m3").
CHAT_FAMILIES: Mapping[str, ChatFamily] = {
    family.chat.call_style.name: family.chat
    for family in FAMILIES.values()
    if family.chat is not None
}
CALL_STYLES = {name: family.call_style for name, family in CHAT_FAMILIES.items()}
TOKEN_TAGS = frozenset[str]().union(*(family.token_tags for family in CHAT_FAMILIES.values()))


def find_family(architecture: str) -> ModelFamily:
    """Return the family of `architecture`. Raises `ConfigError` for an unknown architecture."""
    if architecture in DRAFTS:
        return DRAFTS[architecture]
    if architecture not in FAMILIES:
        raise ConfigError(
            f"architecture {architecture!r} is not supported; supported: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[architecture]


def find_draft_family(config: Mapping[str, Any]) -> DraftFamily | None:
    """Return the draft family of a config.json, or None if the model is not a draft."""
    names = config.get("architectures")
    names = names if isinstance(names, list | tuple) else ()
    found = (family for family in DRAFTS.values() for name in names if name in family.architectures)
    return next(found, None)


def find_bundled_draft(name: str) -> DraftSpec | None:
    """Return the spec of the published draft with the short `name`, or None if unknown."""
    known = {known: spec for family in DRAFTS.values() for known, spec in family.bundled.items()}
    return cast(DraftSpec | None, known.get(name.lower()))


def list_model_types(architecture: str) -> list[str]:
    """List the `model_type` values of all families in the package of `architecture`."""
    package = find_family(architecture).package
    families = (family for family in FAMILIES.values() if family.package == package)
    return list(dict.fromkeys(name for family in families for name in family.model_types))


def read_spec(config: Mapping[str, Any], folder: Path | None = None) -> ModelSpec:
    """Read the spec from config.json, whose `architectures` or `model_type` select the family.

    `folder` may contain other files that describe the quantization. Raises `IsDraft` for a draft,
    and `ConfigError` with the field, its value and the allowed values.
    """
    eagle3.check_no_draft(config)
    if find_draft_family(config) is not None:
        raise IsDraft(config["architectures"][0], None)
    architectures = config.get("architectures") or None
    model_type = config.get("model_type") or None
    if architectures is None and model_type is None:
        raise ConfigError(
            f"config.json has neither architectures nor model_type; supported: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    found = [
        family
        for family in FAMILIES.values()
        if architectures in (None, [family.architecture], (family.architecture,))
    ]
    if not found:
        allowed = " or ".join(f"[{name!r}]" for name in sorted(FAMILIES))
        refuse("architectures", architectures, allowed)
    of_type = [family for family in found if model_type in (None, *family.model_types)]
    if not of_type:
        types = dict.fromkeys(name for family in found for name in family.model_types)
        refuse("model_type", model_type, " or ".join(map(repr, types)))
    spec = of_type[0].read_spec(config)
    # a quantization in config.json or its text_config overrides ModelOpt's hf_quant_config.json
    described = read_quantization(config, folder)
    is_beside = described is None or described.source == MODELOPT_FILE
    quantization = (spec.quantization or described) if is_beside else described
    return replace(spec, quantization=quantization)


def bundled_spec(name: str) -> ModelSpec:
    """Return a published model's spec by its short `name`; no checkpoint is needed.

    Raises `ConfigError`, which lists the known names, if `name` is unknown.
    """
    for family in FAMILIES.values():
        if name.lower() in family.bundled:
            return family.bundled[name.lower()]
    raise ConfigError(
        f"no bundled model spec is called {name!r}; known: {', '.join(bundled_names())}"
    )


def format_hub_id(name: str) -> str:
    """Return the Hugging Face id of the bundled model `name`, such as MiniMaxAI/MiniMax-M2.5."""
    words = name.lower().removeprefix("minimax-").split("-")
    own = (word.upper() if re.search(r"\d", word) else word.capitalize() for word in words)
    return f"MiniMaxAI/MiniMax-{'-'.join(own)}"


def bundled_names() -> tuple[str, ...]:
    """List the names that `bundled_spec` accepts."""
    return tuple(name for family in FAMILIES.values() for name in family.bundled)


def import_names(spec: ModelSpec) -> WeightNames:
    return cast(WeightNames, import_module(f"{find_family(spec.architecture).package}.names"))


def import_init(spec: ModelSpec) -> Init:
    """Import the family's module `init`, which draws synthetic weights for `spec`."""
    return cast(Init, import_module(f"{find_family(spec.architecture).package}.init"))


def find_chat_family(model: str) -> ChatFamily:
    """Return the chat family of `model`, an architecture or a model_type in config.json.

    Raises `ConfigError` if the family is unknown or has no chat format.
    """
    plain = model.lower().replace("_", "").replace("-", "")
    for family in CHAT_FAMILIES.values():
        if family.output.name.replace("_", "") in plain:
            return family
    known = " and ".join(family.title for family in CHAT_FAMILIES.values())
    raise ConfigError(
        f"no parser is known for {model!r}; known: {known}",
        hint="set --tool-call-parser and --reasoning-parser to a known parser, or to none",
    )
