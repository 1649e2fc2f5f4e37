"""Reading a checkpoint's config.json field by field: the parts that model families share.

Nothing is guessed: a field whose value changes the computation is either supported, or refused by
name with the value found and the values allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NoReturn

from negamax.base.errors import ConfigError
from negamax.config.quantization import PROVENANCE, read_quantization

# Sizes that every model has, by their names in `ModelSpec`: always present in a real config, so a
# missing one is an error and not a default.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
}
_COMMON = {
    *_SIZES, "architectures", "bos_token_id", "dtype", "eos_token_id", "quantization_config",
    "torch_dtype", PROVENANCE,
}  # fmt: skip
DTYPES = ("bfloat16", "float16", "float32")
MAX_SIZE = 2**31 - 1


def common(config: Mapping[str, Any], *, notes: list[str]) -> dict[str, Any]:
    """What every config.json says of a model, as fields of `ModelSpec`. Errors: `ConfigError`."""
    return {
        **{name: integer(config, key) for key, name in _SIZES.items()},
        "dtype": dtype(config, notes=notes),
        "bos_token_id": optional_token(config.get("bos_token_id"), name="bos_token_id"),
        "eos_token_ids": token_ids(config.get("eos_token_id"), name="eos_token_id"),
        "quantization": read_quantization(config),
    }


def check_fixed(config: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Errors: `ConfigError` for a field of `config` that is there with another value than the one
    in `fixed`.
    """
    for name, only in fixed.items():
        value = config.get(name)
        if value is not None and (
            value != only or isinstance(value, bool) != isinstance(only, bool)
        ):
            refuse(name, value, "null" if only is None else repr(only))


def check_per_layer(
    config: Mapping[str, Any], per_layer: Mapping[str, Any], *, num_layers: int
) -> None:
    """The same of lists with one entry per layer (or one value for all)."""
    for name, only in per_layer.items():
        value = config.get(name)
        if value is None:
            continue
        entries = value if isinstance(value, list | tuple) else [value] * num_layers
        if len(entries) != num_layers:
            refuse(name, value, f"{num_layers} entries, one per layer")
        for layer, entry in enumerate(entries):
            if entry != only:
                refuse(f"{name}[{layer}]", entry, repr(only))


def note_unknown(config: Mapping[str, Any], known: Set[str], *, notes: list[str]) -> None:
    """Note the fields of `config` that are neither `known` to the family nor common."""
    unknown = sorted(str(key) for key in config if key not in known and key not in _COMMON)
    if unknown:
        notes.append(
            f"config.json fields that this version does not know and ignores: {', '.join(unknown)}"
        )


def integer(config: Mapping[str, Any], name: str) -> int:
    """Field `name`, which has no default. Errors: `ConfigError`."""
    if config.get(name) is None:
        raise ConfigError(f"config.json has no {name}; it is needed and has no default")
    value = config[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SIZE:
        refuse(name, value, f"an integer from 1 to {MAX_SIZE}")
    return value


def number(value: object, *, name: str) -> float:
    """`value` of field `name`. Errors: `ConfigError` where it is no number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        refuse(name, value, "a number")
    try:
        return float(value)
    except OverflowError:
        refuse(name, value, "a number that a float holds")


def optional_token(value: object, *, name: str) -> int | None:
    """`value` of field `name`, one id or null. Errors: `ConfigError`."""
    ids = token_ids(value, name=name)
    if len(ids) > 1:
        refuse(name, value, "one token id or null")
    return ids[0] if ids else None


def refuse(name: str, value: object, allowed: str) -> NoReturn:
    """Errors: `ConfigError`, always, with the field, the value found and the values allowed."""
    shown = repr(
        list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
    )
    shown = shown if len(shown) <= 200 else shown[:200] + "..."
    raise ConfigError(f"model config: {name} is {shown}; supported: {allowed}")


def token_ids(value: object, *, name: str) -> tuple[int, ...]:
    """`value` of field `name` (null, one id or a list of ids) as a tuple. Errors: `ConfigError`."""
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    if not all(
        isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0
        for token_id in ids
    ):
        refuse(name, value, "a token id, a list of token ids or null")
    return tuple(dict.fromkeys(ids))


def dtype(config: Mapping[str, Any], *, notes: list[str]) -> str:
    """The dtype of the unquantised weights. Errors: `ConfigError`."""
    value = config.get("dtype")
    value = config.get("torch_dtype") if value is None else value
    if value is None:
        notes.append("config.json names no dtype: float32 is assumed")
        return "float32"
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        refuse("dtype", value, ", ".join(DTYPES))
    return name


def rope(
    config: Mapping[str, Any], *, head_dim: int, default_theta: float, notes: list[str]
) -> tuple[float, int]:
    """theta and rotary_dim, from MiniMax's own fields or from transformers' `rope_parameters`."""
    parameters: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = config.get(name)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            refuse(name, given, "an object or null")
        for key in ("rope_type", "type"):
            if given.get(key) not in (None, "default"):
                refuse(f"{name}.{key}", given[key], "'default' (no scaling)")
        surplus = sorted(set(given) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
        if surplus:
            refuse(
                f"{name}.{surplus[0]}",
                given[surplus[0]],
                "rope_type, rope_theta and partial_rotary_factor only",
            )
        for key in ("rope_theta", "partial_rotary_factor"):
            found = _agree(parameters, given, name=key, inner=name)
            parameters |= {} if found is None else {key: found}

    theta = _agree(config, parameters, name="rope_theta")
    rope_theta = number(default_theta if theta is None else theta, name="rope_theta")
    given_factor = _agree(config, parameters, name="partial_rotary_factor")
    factor = None if given_factor is None else number(given_factor, name="partial_rotary_factor")
    if factor is not None and not 0.0 < factor <= 1.0:
        refuse("partial_rotary_factor", factor, "above 0, at most 1")
    if config.get("rotary_dim") is not None:
        rotary_dim = integer(config, "rotary_dim")
        if factor is not None and round(head_dim * factor) != rotary_dim:
            refuse(
                "rotary_dim",
                rotary_dim,
                f"head_dim * partial_rotary_factor = {head_dim} * {factor}",
            )
        return rope_theta, rotary_dim
    if factor is not None:
        return rope_theta, int(head_dim * factor)
    notes.append(
        f"config.json has neither rotary_dim nor partial_rotary_factor: all {head_dim} head "
        f"dimensions rotate"
    )
    return rope_theta, head_dim


def _agree(
    config: Mapping[str, Any],
    parameters: Mapping[str, Any],
    *,
    name: str,
    inner: str = "rope_parameters",
) -> object:
    """Field `name` from `config` or from `parameters`, which field `inner` holds; refused where
    both have it and differ.
    """
    outer, own = config.get(name), parameters.get(name)
    if outer is not None and own is not None and outer != own:
        refuse(name, outer, f"the value in {inner} ({own})")
    return own if outer is None else outer
