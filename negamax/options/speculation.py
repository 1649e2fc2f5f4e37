"""Settings for draft tokens, with the keys of vLLM's `--speculative-config`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from negamax.base.errors import ConfigError
from negamax.options.json_options import check_json, refuse_key, rules_of

EAGLE3, DSPARK, DFLASH, NGRAM = "eagle3", "dspark", "dflash", "ngram"
METHODS = (EAGLE3, DSPARK, DFLASH, NGRAM)
DEFAULT_DRAFT_TOKENS = 3

_FLAG = "--speculative-config"
_refuse = partial(refuse_key, _FLAG)
_METHOD_NAMES = {"[ngram]": NGRAM, "ngram_gpu": NGRAM}
_RULES = rules_of(_FLAG)
MAX_DRAFT_TOKENS: int = _RULES["num_speculative_tokens"]["most"]
_SYNTHETIC_KEYS = {"synthetic_acceptance_length", "synthetic_acceptance_rates"}
_LENGTH_KEYS = {"num_speculative_tokens", "num_draft_tokens"}
_REJECTION_METHODS = {
    "standard": "standard", "strict": "standard", "probabilistic": "standard",
    "block": "standard", "synthetic": "synthetic",
}  # fmt: skip


@dataclass(frozen=True)
class SpeculationConfig:
    """Settings for proposing draft tokens. `read` parses `--speculative-config`."""

    method: str  # One of METHODS.
    is_default_method: bool = field(default=False, kw_only=True)  # Whether no method was given.
    num_speculative_tokens: int = DEFAULT_DRAFT_TOKENS  # maximum draft tokens per sequence and step
    is_default_length: bool = False  # Whether the draft's files may set the draft length.
    adaptive: bool = True  # Whether to use fewer draft tokens when that is faster.
    model: str | None = None  # Name of the draft model; after the download, its folder.
    revision: str | None = None  # Branch, tag or commit of the draft on the hub.
    draft_lm_head_quantization: str | None = None  # "fp8": store the draft's head in FP8.
    # `draft_sample_method`: "probabilistic" samples draft tokens for requests with a temperature.
    draft_sample_method: str = "greedy"
    # layers whose inputs the draft model reads; None: the layers in the config of the draft model
    aux_layer_ids: tuple[int, ...] | None = None
    # minimum and maximum number of last tokens that n-gram lookup searches for in the sequence
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5
    # acceptance rate of each draft position in benchmarks; with None, draft tokens are verified
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    notes: tuple[str, ...] = ()  # log lines about keys that have no effect

    @property
    def synthetic_acceptance_length(self) -> float | None:
        """Return the mean tokens per sequence and step, or None if draft tokens are verified."""
        rates = self.synthetic_acceptance_rates
        return None if rates is None else 1.0 + sum(rates)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the possible draft lengths, ascending. Each length has its own CUDA graphs."""
        most = self.num_speculative_tokens
        few = {number for number in (1, 2, 3, -(-most // 2)) if number < most}
        return (*sorted(few), most) if self.adaptive else (most,)

    def as_long_as(self, num_tokens: int | None) -> "SpeculationConfig":
        """Use the draft length `num_tokens` of config.json if none is set. Raises `ConfigError`."""
        if num_tokens is None or not self.is_default_length:
            return self
        if num_tokens > MAX_DRAFT_TOKENS:
            raise ConfigError(
                f"config.json sets speculative_tokens to {num_tokens}; allowed: 1 to "
                f"{MAX_DRAFT_TOKENS}",
                hint=f'override it: {_FLAG} {{"num_speculative_tokens": {MAX_DRAFT_TOKENS}}}',
            )
        return replace(self, num_speculative_tokens=num_tokens)

    @staticmethod
    def read(fields: Mapping[str, Any], *, tensor_parallel_size: int = 1) -> "SpeculationConfig":
        """Read `--speculative-config`. A null value means a missing key. Raises `ConfigError`."""
        given = {key: value for key, value in fields.items() if value is not None}
        notes = check_json(_FLAG, given)
        method = _method(given)
        _check_owners(given, method)
        # SGLang's num_draft_tokens also counts the token before the draft
        rows = given.get("num_draft_tokens", DEFAULT_DRAFT_TOKENS + 1)
        count = given.get("num_speculative_tokens", max(1, rows - 1))
        if count > MAX_DRAFT_TOKENS:
            _refuse("num_draft_tokens", rows, f"at most {MAX_DRAFT_TOKENS + 1}")
        ranks = given.get("draft_tensor_parallel_size", tensor_parallel_size)
        if ranks not in (1, tensor_parallel_size):
            _refuse("draft_tensor_parallel_size", ranks, f"1, or {tensor_parallel_size}, the "
                    "size of the target model")  # fmt: skip
        low, high = _lookup(given)
        rates = _synthetic_rates(given, count)
        return SpeculationConfig(
            method,
            count,
            is_default_method="method" not in given,
            is_default_length=not _LENGTH_KEYS & given.keys() and rates is None,
            adaptive=given.get("adaptive", True),
            model=given.get("model") if method != NGRAM else None,
            revision=given.get("revision"),
            draft_lm_head_quantization=given.get("draft_lm_head_quantization"),
            draft_sample_method=given.get("draft_sample_method", "greedy"),
            aux_layer_ids=_layer_ids(given),
            prompt_lookup_min=low,
            prompt_lookup_max=high,
            synthetic_acceptance_rates=rates,
            notes=notes,
        )


def _method(given: Mapping[str, Any]) -> str:
    """Return the method; if its key is missing, derive it from the draft model, as vLLM does."""
    method, model = given.get("method"), given.get("model")
    if method is None:
        if model is None:
            hint = f'give "method": one of {", ".join(METHODS)}'
            raise ConfigError(f"{_FLAG} has no method", hint=hint)
        method = NGRAM if model in (NGRAM, "[ngram]") else EAGLE3
    method = _METHOD_NAMES.get(method.lower(), method.lower())
    if method not in METHODS:
        _refuse("method", given["method"], ", ".join(METHODS), "leave the option out, or choose "
                "an allowed method; no method changes answers")  # fmt: skip
    if method in (EAGLE3, DFLASH) and model is None:
        refusal = f"{_FLAG} has method {method} and no model"
        raise ConfigError(refusal, hint='give "model": the folder or hub id of the draft model')
    return method


def _check_owners(given: Mapping[str, Any], method: str) -> None:
    other = "draft models" if method == NGRAM else f"method {NGRAM}"
    for key in given:
        if _RULES.get(key, {}).get("owner") == other:
            refusal = f"{_FLAG} has {key}, which is for {other}; the method is {method}"
            raise ConfigError(refusal, hint=f"leave {key} out")


def _lookup(given: Mapping[str, Any]) -> tuple[int, int]:
    """Return the minimum and maximum n-gram length of lookup; a missing length equals the other."""
    either = given.get("prompt_lookup_max", given.get("prompt_lookup_min", 5))
    low, high = given.get("prompt_lookup_min", either), given.get("prompt_lookup_max", either)
    if low > high:
        _refuse("prompt_lookup_min", low, f"at most prompt_lookup_max, which is {high}")
    return low, high


def _layer_ids(given: Mapping[str, Any]) -> tuple[int, ...] | None:
    ids = given.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        return None
    is_list = isinstance(ids, list) and ids and all(type(one) is int and one >= 0 for one in ids)
    if not is_list or list(ids) != sorted(set(ids)):
        _refuse("eagle_aux_hidden_state_layer_ids", ids, "a list of layers, in ascending order")
    return tuple(ids)


def _synthetic_rates(given: Mapping[str, Any], count: int) -> tuple[float, ...] | None:
    """Return the given synthetic rates, or rates of least variance for the given mean length."""
    method = str(given.get("rejection_sample_method", "standard")).lower()
    if method not in _REJECTION_METHODS:
        _refuse("rejection_sample_method", method, ", ".join(_REJECTION_METHODS))
    named = sorted(_SYNTHETIC_KEYS & given.keys())
    if _REJECTION_METHODS[method] == "standard":
        if named:
            raise ConfigError(
                f"{_FLAG}: {named[0]} has no effect with rejection_sample_method {method}",
                hint='for a benchmark, add "rejection_sample_method": "synthetic"',
            )
        return None
    if len(named) != 1:
        raise ConfigError(
            f"{_FLAG}: rejection_sample_method synthetic needs exactly one of the keys "
            f"{' and '.join(sorted(_SYNTHETIC_KEYS))}; {len(named)} are given",
            hint="give one of the two keys",
        )
    value = given[named[0]]
    if named[0] == "synthetic_acceptance_length":
        if not _is_number(value) or not 1 <= value <= count + 1:
            _refuse(named[0], value, f"1 to {count + 1}, which is num_speculative_tokens + 1")
        return tuple(min(1.0, max(0.0, value - 1.0 - place)) for place in range(count))
    is_list = isinstance(value, list) and len(value) == count and all(map(_is_number, value))
    if not is_list or not value[0] <= 1 or not value[-1] >= 0 or value != sorted(value)[::-1]:
        _refuse(named[0], value, f"{count} numbers from 1 to 0, in descending order")
    return tuple(map(float, value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
