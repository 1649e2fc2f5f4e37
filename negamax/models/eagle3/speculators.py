"""Read the config.json of drafts that vLLM's speculators library wrote.

`transformer_layer_config` has the draft's sizes; `speculators_config` describes the draft's use.
The top level contains EAGLE3 fields such as `draft_vocab_size`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from negamax.base.errors import ConfigError
from negamax.config import fields
from negamax.config.fields import refuse

MODEL_TYPE = "speculators_model_type"  # field that only the speculators library writes
_LAYER, _USE = "transformer_layer_config", "speculators_config"
_ARCHITECTURES = ("Eagle3Speculator", "Eagle3DraftModel")
# The speculators library always writes these fields. Engines disagree about defaults, so a file
# without these fields is refused.
_WRITTEN = ("draft_vocab_size", "norm_before_residual")
_IGNORED = {  # fields that only the speculators library or training uses
    MODEL_TYPE, _LAYER, _USE, "architectures", "base_model_ep_plan", "embed_requires_grad",
    "enable_sp_ulysses", "has_no_defaults_at_init", "model_type", "speculators_version",
}  # fmt: skip
_DTYPES = {"dtype", "torch_dtype"}
# fields of transformer_layer_config that describe the verifier
_OF_VERIFIER = {"_name_or_path", "architectures", "auto_map", "transformers_version", *_DTYPES}


@dataclass(frozen=True)
class Use:
    """Recommended use of a draft, from the draft's files."""

    speculative_tokens: int | None = None  # Draft tokens per step.
    verifier: str | None = None  # The target: a folder or a hub id.
    notes: tuple[str, ...] = ()


def flat(config: Mapping[str, Any], *, architecture: str) -> dict[str, Any]:
    """Convert `config` to the flat fields of an EAGLE3 draft. Raises `ConfigError`."""
    if config[MODEL_TYPE] != "eagle3":
        refuse(MODEL_TYPE, config[MODEL_TYPE], "'eagle3'")
    names = config.get("architectures")
    if names is not None and names not in [[name] for name in _ARCHITECTURES]:
        refuse("architectures", names, " or ".join(f"[{name!r}]" for name in _ARCHITECTURES))
    layer = config.get(_LAYER)
    if not isinstance(layer, Mapping):
        refuse(_LAYER, layer, "an object")
    for name in _WRITTEN:
        if config.get(name) is None:
            raise ConfigError(f"config.json has no {name}; it is required and has no default")
    own = {
        name: value for name, value in config.items() if name not in _IGNORED and value is not None
    }
    nested = {name: value for name, value in layer.items() if name not in _OF_VERIFIER}
    flat = fields.merge_fields(own, nested, inner=_LAYER)
    if not _DTYPES & own.keys():
        flat |= {name: layer[name] for name in _DTYPES & layer.keys()}
    return {**flat, "architectures": [architecture]}


def use(config: Mapping[str, Any]) -> Use:
    """Read `speculators_config`. Raises `ConfigError` for an unsupported value."""
    given = config.get(_USE)
    if given is None:
        return Use()
    if not isinstance(given, Mapping):
        refuse(_USE, given, "an object or null")
    if given.get("algorithm") not in (None, "eagle3"):
        refuse(f"{_USE}.algorithm", given["algorithm"], "'eagle3'")
    verifier = given.get("verifier") or {}
    if not isinstance(verifier, Mapping):
        refuse(f"{_USE}.verifier", verifier, "an object or null")
    name = verifier.get("name_or_path")
    if name is not None and not (isinstance(name, str) and name):
        refuse(f"{_USE}.verifier.name_or_path", name, "a folder, a hub id or null")
    method, notes = _choose_method(given), []
    if method.get("verifier_accept_k", 1) != 1:
        notes.append(
            f"verifier_accept_k of the draft is {method['verifier_accept_k']} and has no effect: "
            "a draft token is accepted only if it equals the sampled token"
        )
    return Use(fields.read_size(method, "speculative_tokens"), name, tuple(notes))


def _choose_method(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the default proposal method, else the first one. Only "greedy" is supported."""
    methods, where = given.get("proposal_methods"), f"{_USE}.proposal_methods"
    if (
        not isinstance(methods, list)
        or not methods
        or not all(isinstance(method, Mapping) for method in methods)
    ):
        refuse(where, methods, "a list of at least one object")
    default = given.get("default_proposal_method")
    named = [one for one in methods if default in (None, one.get("proposal_type"))]
    if not named:
        kinds = ", ".join(repr(one.get("proposal_type")) for one in methods)
        refuse(f"{_USE}.default_proposal_method", default, f"one of proposal_methods ({kinds})")
    if named[0].get("proposal_type") != "greedy":
        refuse(f"{where}[].proposal_type", named[0].get("proposal_type"), "'greedy'")
    chosen: Mapping[str, Any] = named[0]
    return chosen
