"""Read the fields of a checkpoint's config.json that all model families have.

Fields that change the computation must have a supported value. The error for an unsupported value
lists the field, the value found and the allowed values.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any, NoReturn

from negamax.base.errors import ConfigError
from negamax.base.tables import read_table
from negamax.config.quantization import PROVENANCE, read_quantization

MAX_TOKEN_IDS = 1024  # Largest number of ids in a list of end tokens.
_TABLES = read_table(__file__)
_KNOWN = {*_TABLES["sizes"], *_TABLES["read"].split(), *_TABLES["ignored"].split(), PROVENANCE}
_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_SWITCHES = {"sliding_window": "use_sliding_window"}  # field -> switch that enables it
DTYPES = ("bfloat16", "float16", "float32")
MAX_SIZE = 2**31 - 1


def read_common(
    config: Mapping[str, Any],
    *,
    default_theta: float,
    rotates_fully: bool = False,
    notes: list[str],
) -> dict[str, Any]:
    """Read the fields that every config.json has, as fields of `ModelSpec`. Raises `ConfigError`.

    If config.json states no rotary dimension, the whole head is assumed to rotate. Unless
    `rotates_fully` is set, the assumption is added to `notes`.
    """
    sizes = {name: read_size(config, key) for key, name in _TABLES["sizes"].items()}
    rope_notes: list[str] = [] if rotates_fully else notes
    return {
        **sizes,
        "dtype": _read_dtype(config, notes=notes),
        "bos_token_id": _read_first_token(config),
        "eos_token_ids": read_token_ids(config.get("eos_token_id"), name="eos_token_id"),
        "quantization": read_quantization(config),
        "rms_norm_eps": read_number(config.get("rms_norm_eps", 1e-6), name="rms_norm_eps"),
        **_read_rope(config, sizes["head_dim"], default_theta=default_theta, notes=rope_notes),
    }


def check_fixed(config: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a field of `config` differs from the field in `fixed`.

    Null, an empty list, an empty object, and a field that is off by `_SWITCHES` are accepted.
    """
    for name, only in fixed.items():
        value = config.get(name)
        is_off = name in _SWITCHES and config.get(_SWITCHES[name]) is False
        if value in (None, [], {}) or is_off:
            continue
        if value != only or isinstance(value, bool) != isinstance(only, bool):
            refuse(name, value, "null" if only is None else repr(only))


def check_per_layer(
    config: Mapping[str, Any], per_layer: Mapping[str, Any], *, num_layers: int
) -> None:
    """Refuse a field that differs from `per_layer` for at least one layer."""
    for name, only in per_layer.items():
        value = config.get(name)
        if value in (None, [], {}):
            continue
        entries = value if isinstance(value, list | tuple) else [value] * num_layers
        if len(entries) != num_layers:
            refuse(name, value, f"{num_layers} entries, one per layer")
        for layer, entry in enumerate(entries):
            if entry != only:
                refuse(f"{name}[{layer}]", entry, repr(only))


def note_unknown(config: Mapping[str, Any], known: Set[str], *, notes: list[str]) -> None:
    """Add a line to `notes` that lists the unknown fields of `config`, if `config` has any."""
    if unknown := list_unknown(config, known):
        notes.append(f"these fields of config.json are unknown and ignored: {', '.join(unknown)}")


def list_unknown(config: Mapping[str, Any], known: Set[str]) -> list[str]:
    """List the fields of `config` that this module does not read and `known` does not contain."""
    return sorted(str(key) for key in config if key not in known | _KNOWN)


def merge_fields(
    config: Mapping[str, Any], nested: Mapping[str, Any], *, inner: str
) -> dict[str, Any]:
    """Return `config` with the fields of `nested` that are not null.

    `inner` is the name of the object `nested` in config.json. Raises `ConfigError` if a field has
    different values in the two objects.
    """
    given = {name: value for name, value in nested.items() if value is not None}
    for name, value in given.items():
        if config.get(name) not in (None, value):
            refuse(name, config[name], f"the value in {inner} ({value})")
    return {**config, **given}


def read_size(config: Mapping[str, Any], name: str, *, least: int = 1) -> int:
    """Read a required integer of `least` or more. Raises `ConfigError`."""
    value = _require(config, name)
    if type(value) is not int or not least <= value <= MAX_SIZE:
        refuse(name, value, f"an integer from {least} to {MAX_SIZE}")
    return int(value)


def read_optional_size(config: Mapping[str, Any], name: str, default: Any) -> Any:
    """Read an integer of 1 or more, or return `default` if the field is missing or null."""
    return default if config.get(name) is None else read_size(config, name)


def read_switch(config: Mapping[str, Any], name: str) -> bool:
    """Return the boolean field `name`, or False if it is missing. Raises `ConfigError`."""
    value = config.get(name)
    if value not in (None, True, False):
        refuse(name, value, "true or false")
    return bool(value)


def read_required_number(config: Mapping[str, Any], name: str) -> float:
    """Read a required number. Raises `ConfigError`."""
    return read_number(_require(config, name), name=name)


def read_number(value: object, *, name: str) -> float:
    """Return `value` of field `name` as a float. Raises `ConfigError`."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        refuse(name, value, "a number")
    try:
        return float(value)
    except OverflowError:
        refuse(name, value, "a number in the range of a float")


def read_token_ids(value: object, *, name: str) -> tuple[int, ...]:
    """Return the token ids in `value`: null, one id, or a list of ids. Raises `ConfigError`."""
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        refuse(name, value, "a token id, a list of token ids or null")
    if len(ids) > MAX_TOKEN_IDS:
        refuse(name, value, f"at most {MAX_TOKEN_IDS} token ids")
    return tuple(dict.fromkeys(ids))


def refuse(name: str, value: object, allowed: str) -> NoReturn:
    """Raise `ConfigError` with the field, the value found and the allowed values."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = list(value)
    shown = repr(value)
    shown = shown if len(shown) <= 200 else shown[:200] + "..."
    raise ConfigError(f"model config: {name} is {shown}; supported: {allowed}")


def _require(config: Mapping[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise ConfigError(f"config.json has no {name}; this field is required")
    return config[name]


def _read_first_token(config: Mapping[str, Any]) -> int | None:
    ids = read_token_ids(config.get("bos_token_id"), name="bos_token_id")
    if len(ids) > 1:
        refuse("bos_token_id", config["bos_token_id"], "one token id or null")
    return ids[0] if ids else None


def _read_dtype(config: Mapping[str, Any], *, notes: list[str]) -> str:
    value = config.get("dtype")
    value = config.get("torch_dtype") if value is None else value
    if value is None:
        notes.append("config.json states no dtype; float32 is assumed")
        return "float32"
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        refuse("dtype", value, ", ".join(DTYPES))
    return name


def _read_rope(
    config: Mapping[str, Any], head_dim: int, *, default_theta: float, notes: list[str]
) -> dict[str, Any]:
    """Read rope_theta and rotary_dim, from MiniMax's fields or from `rope_parameters`."""
    parameters: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = config.get(name)
        if given in (None, [], {}, False):
            continue
        if not isinstance(given, Mapping):
            refuse(name, given, "an object or null")
        for key in ("rope_type", "type"):
            if given.get(key) not in (None, "default"):
                refuse(f"{name}.{key}", given[key], "'default' (no scaling)")
        if surplus := sorted(set(given) - _ROPE):
            allowed = "rope_type, rope_theta and partial_rotary_factor only"
            refuse(f"{name}.{surplus[0]}", given[surplus[0]], allowed)
        found = {key: given.get(key) for key in ("rope_theta", "partial_rotary_factor")}
        parameters = merge_fields(parameters, found, inner=name)

    merged = merge_fields(config, parameters, inner="rope_parameters")
    theta, factor = merged.get("rope_theta"), merged.get("partial_rotary_factor")
    rope_theta = read_number(default_theta if theta is None else theta, name="rope_theta")
    if factor is not None:
        factor = read_number(factor, name="partial_rotary_factor")
        if not 0.0 < factor <= 1.0:
            refuse("partial_rotary_factor", factor, "above 0, at most 1")
    rotary_dim = head_dim if factor is None else int(head_dim * factor)
    if config.get("rotary_dim") is not None:
        rotary_dim = read_size(config, "rotary_dim")
        if factor is not None and round(head_dim * factor) != rotary_dim:
            allowed = f"head_dim * partial_rotary_factor = {head_dim} * {factor}"
            refuse("rotary_dim", rotary_dim, allowed)
    elif factor is None:
        notes.append(
            f"config.json has neither rotary_dim nor partial_rotary_factor, so all {head_dim} head "
            f"dimensions rotate"
        )
    return {"rope_theta": rope_theta, "rotary_dim": rotary_dim}
