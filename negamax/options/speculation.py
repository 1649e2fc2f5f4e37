"""Settings for draft tokens, with the keys of vLLM's `--speculative-config`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from negamax.base.errors import ConfigError
from negamax.options.flags import check_keys, refuse_key

EAGLE3, DSPARK, DFLASH, NGRAM = "eagle3", "dspark", "dflash", "ngram"
METHODS = (EAGLE3, DSPARK, DFLASH, NGRAM)
DEFAULT_DRAFT_TOKENS = 3
# k draft tokens need k + 1 queries, and block-sparse attention supports at most 16 queries.
MAX_DRAFT_TOKENS = 15
MAX_LOOKUP = 32

_FLAG = "--speculative-config"
_refuse = partial(refuse_key, _FLAG)
_METHOD_NAMES = {"[ngram]": NGRAM, "ngram_gpu": NGRAM}
_DRAFT_KEYS = {
    "model", "revision", "eagle_aux_hidden_state_layer_ids", "draft_lm_head_quantization",
    "draft_sample_method",
}  # fmt: skip
_NGRAM_KEYS = {"prompt_lookup_min", "prompt_lookup_max"}
_SYNTHETIC_KEYS = {"synthetic_acceptance_length", "synthetic_acceptance_rates"}
_LENGTH_KEYS = {"num_speculative_tokens", "num_draft_tokens"}
_KEYS = {
    "method", "adaptive", "rejection_sample_method", "draft_tensor_parallel_size", *_LENGTH_KEYS,
    *_DRAFT_KEYS, *_NGRAM_KEYS, *_SYNTHETIC_KEYS,
}  # fmt: skip
_DRAFT_RUNS = "a draft model runs like its target model, in the same steps and graphs"
# keys of vLLM that never change an answer, with the reason why Negamax ignores each key
_WITHOUT_EFFECT = {
    **dict.fromkeys(("enforce_eager", "disable_padded_drafter_batch"), _DRAFT_RUNS),
    **dict.fromkeys(("attention_backend", "moe_backend", "kv_cache_dtype"), _DRAFT_RUNS),
    "disable_eagle_block_drop": "drafts never cause blocks of the prefix cache to be dropped",
    "use_local_argmax_reduction": "each rank sends its best token instead of its logits",
    "quantization": "the files of a draft model state its quantization",
    "code_revision": "code in a checkpoint is never run",
    "draft_load_config": "a draft model is loaded like its target model",
    "num_speculative_tokens_per_batch_size": "the draft length is chosen from measured times",
    "max_model_len": "a draft model has the context length of its target model",
    "enable_adaptive_verification": "all sequences of a batch have the same draft length",
    "dspark_draft_topk": "the Markov matrices of DSpark apply to all tokens of the vocabulary",
}
_REJECTION_METHODS = {
    "standard": "standard", "strict": "standard", "probabilistic": "standard",
    "block": "standard", "synthetic": "synthetic",
}  # fmt: skip


@dataclass(frozen=True)
class SpeculationConfig:
    """Settings for proposing draft tokens. `read` parses `--speculative-config`."""

    method: str  # One of METHODS.
    is_default_method: bool = field(default=False, kw_only=True)  # Whether no method was given.
    num_speculative_tokens: int = DEFAULT_DRAFT_TOKENS  # maximum per sequence and step
    is_default_length: bool = False  # Whether the draft's files may set the draft length.
    adaptive: bool = True  # Whether to use fewer draft tokens when that is faster.
    model: str | None = None  # Name of the draft model; after the download, its folder.
    revision: str | None = None  # Branch, tag or commit of the draft on the hub.
    draft_lm_head_quantization: str | None = None  # "fp8": store the draft's head in FP8.
    # "probabilistic": the draft model samples draft tokens for requests with a temperature.
    draft_sample_method: str = "greedy"
    # layers whose inputs the draft model reads; None: the layers in the config of the draft model
    aux_layer_ids: tuple[int, ...] | None = None
    # least and largest number of last tokens for which n-gram lookup searches the sequence
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
        """Use the length in the draft's files if the option has no length. Raises `ConfigError`."""
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
        method = _method(given)
        notes = tuple(f"{_FLAG}: {key} has no effect: {_WITHOUT_EFFECT[key]}"
                      for key in given if key in _WITHOUT_EFFECT)  # fmt: skip
        _check_keys(given, method)
        # SGLang's num_draft_tokens also counts the token before the draft
        rows = _integer(given, "num_draft_tokens", DEFAULT_DRAFT_TOKENS + 1, None)
        count = _integer(given, "num_speculative_tokens", max(1, rows - 1), MAX_DRAFT_TOKENS)
        ranks = _integer(given, "draft_tensor_parallel_size", tensor_parallel_size, None)
        if ranks not in (1, tensor_parallel_size):
            _refuse("draft_tensor_parallel_size", ranks, f"1, or {tensor_parallel_size}, the "
                    "size of the target model")  # fmt: skip
        adaptive = given.get("adaptive", True)
        if not isinstance(adaptive, bool):
            _refuse("adaptive", adaptive, "true or false")
        head = given.get("draft_lm_head_quantization")
        if head not in (None, "fp8"):
            _refuse("draft_lm_head_quantization", head, "fp8")
        sampling = given.get("draft_sample_method", "greedy")
        if sampling not in ("greedy", "probabilistic"):
            _refuse("draft_sample_method", sampling, "greedy, probabilistic")
        low, high = _lookup(given)
        rates = _synthetic_rates(given, count)
        return SpeculationConfig(
            method,
            count,
            is_default_method="method" not in given,
            is_default_length=not _LENGTH_KEYS & given.keys() and rates is None,
            adaptive=adaptive,
            model=_text(given, "model") if method != NGRAM else None,
            revision=_text(given, "revision"),
            draft_lm_head_quantization=head,
            draft_sample_method=sampling,
            aux_layer_ids=_layer_ids(given),
            prompt_lookup_min=low,
            prompt_lookup_max=high,
            synthetic_acceptance_rates=rates,
            notes=notes,
        )


def _method(given: Mapping[str, Any]) -> str:
    """Return the method; if its key is missing, derive it from the draft model, as vLLM does."""
    method, model = _text(given, "method"), _text(given, "model")
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


def _check_keys(given: Mapping[str, Any], method: str) -> None:
    other = _DRAFT_KEYS - {"model"} if method == NGRAM else _NGRAM_KEYS
    for key in given:
        if key in other:
            owner = f"method {NGRAM}" if key in _NGRAM_KEYS else "draft models"
            refusal = f"{_FLAG} has {key}, which is for {owner}; the method is {method}"
            raise ConfigError(refusal, hint=f"leave {key} out")
    check_keys(_FLAG, given, _KEYS, also=_WITHOUT_EFFECT.keys())


def _lookup(given: Mapping[str, Any]) -> tuple[int, int]:
    """Return the fewest and most tokens of n-gram lookup. A single given limit sets both limits."""
    either = given.get("prompt_lookup_max", given.get("prompt_lookup_min", 5))
    low, high = (
        _integer({key: either, **given}, key, 5, MAX_LOOKUP)
        for key in ("prompt_lookup_min", "prompt_lookup_max")
    )
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
    """Return synthetic acceptance rates. A mean length selects the rates of least variance."""
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


def _integer(given: Mapping[str, Any], key: str, default: int, most: int | None) -> int:
    if key not in given and (most is None or default <= most):
        return default
    value = given.get(key, default)
    if type(value) is not int or value < 1 or (most is not None and value > most):
        _refuse(key, value, "1 or more" if most is None else f"1 to {most}")
    return int(value)


def _text(given: Mapping[str, Any], key: str) -> str | None:
    value = given.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        _refuse(key, value, "a non-empty string")
    return str(value)
