"""Read generation_config.json: sampling defaults and end-of-sequence tokens."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from negamax.base.errors import ConfigError
from negamax.config.fields import read_token_ids
from negamax.config.json_file import read_json_object
from negamax.config.model_spec import ModelSpec

_ABOVE_0 = math.ulp(0.0)
_LIMITS = {  # default, lowest, highest
    "temperature": (1.0, 0.0, 2.0),
    "top_p": (1.0, _ABOVE_0, 1.0),
    "min_p": (0.0, 0.0, 1.0),
    "repetition_penalty": (1.0, _ABOVE_0, 10.0),
}


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Values of fields that a request omits; `top_k` 0 is off, `temperature` 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    sampling: SamplingDefaults
    eos_token_ids: tuple[int, ...]


def read_generation_defaults(
    folder: Path, spec: ModelSpec, *, absent: Mapping[str, Any]
) -> GenerationDefaults:
    """Read `folder`/generation_config.json; without it sampling has the values `absent`.

    Sampling fields that the file omits are off; `do_sample: false` is greedy. End-of-sequence ids
    come from the file, else from the tokenizer, else from config.json: quantizers have left ids of
    other models there (1 and 2 in NVIDIA's M2). Errors: `ConfigError` with the field, the value and
    what is allowed; `CheckpointError` if the file is not a JSON object.
    """
    path = folder / "generation_config.json"
    others = _read_tokenizer_eos(folder, spec) or spec.eos_token_ids
    if not path.exists():
        return GenerationDefaults(sampling=SamplingDefaults(**absent), eos_token_ids=others)
    config = read_json_object(path)
    do_sample = config.get("do_sample")
    if do_sample not in (None, True, False):
        _refuse("do_sample", do_sample, "true or false")
    numbers = {
        name: _read_number(config.get(name), name, *limits) for name, limits in _LIMITS.items()
    }
    if do_sample is False:
        numbers["temperature"] = 0.0
    sampling = SamplingDefaults(**numbers, top_k=_read_top_k(config.get("top_k")))
    eos_token_ids = read_token_ids(
        config.get("eos_token_id"), name="generation_config.json: eos_token_id"
    )
    for token_id in eos_token_ids:
        if token_id >= spec.vocab_size:
            _refuse("eos_token_id", token_id, f"0 to vocab_size - 1 ({spec.vocab_size - 1})")
    return GenerationDefaults(sampling=sampling, eos_token_ids=eos_token_ids or others)


def _read_tokenizer_eos(folder: Path, spec: ModelSpec) -> tuple[int, ...]:
    """Return the id of the tokenizer's eos_token, if tokenizer_config.json has both."""
    path = folder / "tokenizer_config.json"
    config = read_json_object(path) if path.exists() else {}
    named, added = config.get("eos_token"), config.get("added_tokens_decoder")
    text = named.get("content") if isinstance(named, Mapping) else named
    if text is None or not isinstance(added, Mapping):
        return ()
    return tuple(
        int(token_id)
        for token_id, token in added.items()
        if isinstance(token, Mapping) and token.get("content") == text
        if token_id.isdecimal() and int(token_id) < spec.vocab_size
    )


def _read_number(value: object, name: str, default: float, low: float, high: float) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        lowest = "above 0" if low == _ABOVE_0 else f"from {low:g}"
        _refuse(name, value, f"a number {lowest} to {high:g}")
    return float(value)


def _read_top_k(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < 2**31:
        _refuse("top_k", value, "an integer from -1 (off, as 0 is) to 2147483647")
    return max(0, value)


def _refuse(name: str, value: object, allowed: str) -> NoReturn:
    raise ConfigError(
        f"generation_config.json: {name} is {value!r}; allowed: {allowed}",
        hint="correct or delete the file",
    )
