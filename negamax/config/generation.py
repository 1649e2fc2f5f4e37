"""Read generation_config.json: sampling defaults and end-of-sequence tokens."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from negamax.base.errors import ConfigError
from negamax.config.fields import read_token_ids
from negamax.config.json_file import read_json_object
from negamax.config.model_spec import ModelSpec

GENERATION_FILE, OVERRIDE = "generation_config.json", "--override-generation-config"
_CLASS_DEFAULTS = (1, 2)  # default end token ids in transformers' config classes
_ABOVE_0 = math.ulp(0.0)
_LIMITS = {  # sampling field -> (lowest value, highest value)
    "temperature": (0.0, 2.0),
    "top_p": (_ABOVE_0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (_ABOVE_0, 10.0),
}


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Values of the sampling fields that a request omits."""

    temperature: float = 1.0  # 0 selects greedy sampling
    top_p: float = 1.0
    top_k: int = 0  # 0 turns top-k off
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    sampling: SamplingDefaults
    eos_token_ids: tuple[int, ...]  # Ids from tokenizer, generation_config.json and config.json.
    warning: str | None = None  # Log line; None: the files agree about end tokens.


def read_generation_defaults(
    folder: Path | None,
    spec: ModelSpec,
    *,
    absent: Mapping[str, Any],
    override: Mapping[str, Any] | None = None,
    turn_end: str | None = None,
) -> GenerationDefaults:
    """Read generation_config.json in `folder`. Fields of `override` replace fields of the file.

    If the file is missing, `absent` replaces it. A sampling field that the file omits is turned
    off. `do_sample: false` means greedy sampling. An `eos_token_id` in `override` replaces all end
    tokens. By default, the end tokens of the tokenizer (its eos_token and `turn_end`), of the file
    and of config.json are all used. Raises `ConfigError` if a value is not allowed, and
    `CheckpointError` if the file is not a JSON object.
    """
    path = None if folder is None else folder / GENERATION_FILE
    config = read_json_object(path) if path is not None and path.exists() else dict(absent)
    sampling = _read_sampling(config, where=GENERATION_FILE)
    ids = _read_ends(config, spec, where=GENERATION_FILE)
    if override:
        greedy = {} if override.get("temperature") is None else {"do_sample": None}
        sampling = _read_sampling({**config, **greedy, **override}, where=OVERRIDE)
        if chosen := _read_ends(override, spec, where=OVERRIDE):
            return GenerationDefaults(sampling=sampling, eos_token_ids=chosen)
    own = () if folder is None else _read_tokenizer_ends(folder, spec, turn_end)
    found = {"the tokenizer": own, GENERATION_FILE: ids, "config.json": spec.eos_token_ids}
    return _join_ends(sampling, {name: these for name, these in found.items() if these})


def check_override(override: Mapping[str, Any]) -> None:
    _read_sampling(override, where=OVERRIDE)
    read_token_ids(override.get("eos_token_id"), name=f"{OVERRIDE}: eos_token_id")


def _join_ends(
    sampling: SamplingDefaults, found: Mapping[str, tuple[int, ...]]
) -> GenerationDefaults:
    """Merge the end tokens in `found` (source -> ids). Add a warning if the sources differ."""
    own = found.get("the tokenizer", ())
    every = tuple(dict.fromkeys(token_id for ids in found.values() for token_id in ids))
    # skip default ids of config classes: some exporters write them instead of the real end token
    joined = tuple(i for i in every if i in own or not own or i not in _CLASS_DEFAULTS)
    if len(set(map(frozenset, found.values()))) < 2:
        return GenerationDefaults(sampling=sampling, eos_token_ids=joined)
    named = ", ".join(f"{name} {_list_ids(ids)}" for name, ids in found.items())
    left = [token_id for token_id in every if token_id not in joined]
    ignored = f"; {_list_ids(left)} is ignored as a default of exporters" if left else ""
    warning = (
        f"the checkpoint has different end tokens: {named}; answers end at {_list_ids(joined)}"
        f'{ignored} ({OVERRIDE} {{"eos_token_id": ...}} replaces them)'
    )
    return GenerationDefaults(sampling=sampling, eos_token_ids=joined, warning=warning)


def _list_ids(ids: Sequence[int]) -> str:
    return " and ".join(map(str, ids))


def _read_tokenizer_ends(folder: Path, spec: ModelSpec, turn_end: str | None) -> tuple[int, ...]:
    """Read the ids of the tokenizer's eos_token and of `turn_end` from the tokenizer's files.

    If transformers 5 wrote the files, only tokenizer.json contains the ids.
    """
    listed: list[tuple[str | None, object]] = []  # (text, id) of added tokens
    texts = {turn_end}
    for name in ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"):
        path = folder / name
        if name == "tokenizer.json" and (listed or texts == {None}):
            continue
        config = read_json_object(path) if path.exists() else {}
        texts.add(token_text(config.get("eos_token")))
        decoder, added = config.get("added_tokens_decoder"), config.get("added_tokens")
        tokens = dict(decoder) if isinstance(decoder, Mapping) else {}
        tokens |= dict(enumerate(added)) if isinstance(added, list) else {}
        for key, token in tokens.items():
            if isinstance(token, Mapping):
                token_id = token.get("id", int(key) if str(key).isdecimal() else None)
                listed.append((token_text(token), token_id))
    return tuple(
        token_id
        for text, token_id in listed
        if text is not None and text in texts
        if type(token_id) is int and 0 <= token_id < spec.vocab_size
    )


def token_text(value: Any) -> str | None:
    """Return the text of a token in tokenizer_config.json: a string, or the field "content"."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _read_ends(config: Mapping[str, Any], spec: ModelSpec, *, where: str) -> tuple[int, ...]:
    ids = read_token_ids(config.get("eos_token_id"), name=f"{where}: eos_token_id")
    for token_id in ids:
        if token_id >= spec.vocab_size:
            _refuse("eos_token_id", token_id, f"0 to vocab_size - 1 ({spec.vocab_size - 1})", where)
    return ids


def _read_sampling(config: Mapping[str, Any], *, where: str) -> SamplingDefaults:
    do_sample = config.get("do_sample")
    if do_sample not in (None, True, False):
        _refuse("do_sample", do_sample, "true or false", where)
    found: dict[str, Any] = {name: config[name] for name in _LIMITS if config.get(name) is not None}
    for name, value in found.items():
        low, high = _LIMITS[name]
        if type(value) not in (int, float) or not low <= value <= high:
            lowest = "above 0" if low == _ABOVE_0 else f"from {low:g}"
            _refuse(name, value, f"a number {lowest} to {high:g}", where)
        found[name] = float(value)
    if do_sample is False:
        found["temperature"] = 0.0
    if (top_k := config.get("top_k")) is not None:
        if type(top_k) is not int or not -1 <= top_k < 2**31:
            _refuse("top_k", top_k, "an integer from -1 to 2147483647 (-1 and 0: off)", where)
        found["top_k"] = max(0, top_k)
    return SamplingDefaults(**found)


def _refuse(name: str, value: object, allowed: str, where: str) -> NoReturn:
    raise ConfigError(
        f"{where}: {name} is {value!r}; allowed: {allowed}",
        hint=f"correct or delete the file, or use {OVERRIDE}" if where == GENERATION_FILE else None,
    )
