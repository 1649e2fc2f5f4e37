"""What every generation request shares: the strict base model, the sampling fields, and readable refusals.

Handling of fields, the same for every endpoint: `null` means "left out"; a field in `ignored_fields` is accepted and has no
effect; one in `unsupported_fields` is refused with its reason; any other unknown field is refused with the nearest known name.
Ranges are checked once, by `SamplingParams.check`, so that the server and the embedded `LLM` refuse alike.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from negamax.base.errors import InvalidRequestError
from negamax.scheduler.request import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams

RequestT = TypeVar("RequestT", bound="RequestModel")

_SHOWN_CHARS = 60  # of an offending value in a message
_PRIORITY_LIMIT = 2**31
_NOT_YET = "it is not implemented yet"


def refuse(param: str, message: str) -> NoReturn:
    """Raise the 400 error about field `param`."""
    raise InvalidRequestError(f"{param}: {message}", param=param, code="invalid_value")


def shown(value: object) -> str:
    """`value` as it may stand in a message: never longer than a line, however large the input was."""
    if isinstance(value, list | tuple | dict):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, str):
        return repr(value) if len(value) <= _SHOWN_CHARS else f"{value[:_SHOWN_CHARS]!r}... ({len(value)} characters)"
    text = str(value) if not isinstance(value, int) or value.bit_length() < 256 else "a very large integer"
    return text[:_SHOWN_CHARS]


def nearest(name: str, known: frozenset[str] | list[str]) -> str:
    """' Did you mean X?' for the known name closest to `name`, or an empty string."""
    matches = difflib.get_close_matches(name[:_SHOWN_CHARS], sorted(known), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


class RequestModel(BaseModel):
    """Base of every request: strict types, no unknown fields, immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())
    ignored_fields: ClassVar[frozenset[str]] = frozenset()
    unsupported_fields: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def parse(cls: type[RequestT], body: object) -> RequestT:
        """The request in `body` (decoded JSON), or `InvalidRequestError` naming the first field at fault."""
        if not isinstance(body, dict):
            raise InvalidRequestError(f"the body must be a JSON object; it is {shown(body)}", code="invalid_body")
        fields: dict[str, Any] = {}
        for name, value in body.items():
            if value is None or name in cls.ignored_fields:
                continue
            if name not in cls.model_fields:
                cls._refuse_field(name)
            fields[name] = value
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise _readable(error) from None

    @classmethod
    def _refuse_field(cls, name: str) -> NoReturn:
        reason = cls.unsupported_fields.get(name)
        if reason is not None:
            raise InvalidRequestError(
                f"{name} is not supported: {reason}", hint="leave the field out", param=name, code="unsupported_parameter"
            )
        hint = nearest(name, frozenset(cls.model_fields))
        label = shown(name)
        raise InvalidRequestError(f"unknown field {label}.{hint}", param=label.strip("'"), code="unknown_parameter")


def _readable(error: ValidationError) -> InvalidRequestError:
    """The first problem pydantic found, as one sentence with the path, the rule and the value."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = ""
    for part in first["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    message = first["msg"]
    if first["type"] == "missing":
        return InvalidRequestError(f"{path} is required and missing", param=path, code="missing_parameter")
    message = message[0].lower() + message[1:]
    return InvalidRequestError(f"{path}: {message}; got {shown(first['input'])}", param=path, code="invalid_value")


def _as_stop_list(value: object) -> object:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and len(texts) > MAX_STOP_STRINGS:
        refuse("stop", f"{len(texts)} strings; allowed: at most {MAX_STOP_STRINGS}")
    return texts


def _bounded_ids(value: object) -> object:
    if isinstance(value, list) and len(value) > MAX_STOP_TOKEN_IDS:
        refuse("stop_token_ids", f"{len(value)} ids; allowed: at most {MAX_STOP_TOKEN_IDS}")
    return value


def _bounded_bias(value: object) -> object:
    """Token ids are JSON object keys, that is strings; `{"123": -5}` becomes `{123: -5}`."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LOGIT_BIAS:
        refuse("logit_bias", f"{len(value)} entries; allowed: at most {MAX_LOGIT_BIAS}")
    bias: dict[int, object] = {}
    for key, weight in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10):
            refuse("logit_bias", f"the key {shown(key)} is not a token id")
        bias[int(key)] = weight
    return bias


_STOP_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOP_STRINGS}]}
_BIAS_SCHEMA = {"type": "object", "additionalProperties": {"type": "number"}, "maxProperties": MAX_LOGIT_BIAS}

StopStrings = Annotated[list[str], BeforeValidator(_as_stop_list), WithJsonSchema(_STOP_SCHEMA)]
StopTokenIds = Annotated[list[int], BeforeValidator(_bounded_ids)]
LogitBias = Annotated[dict[int, float], BeforeValidator(_bounded_bias), WithJsonSchema(_BIAS_SCHEMA)]


class StreamOptions(RequestModel):
    """`stream_options`: what a stream carries besides its deltas."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # accepted; streams are never padded


class GenerationRequest(RequestModel):
    """The fields that chat and plain completions share. Names and defaults follow OpenAI, extensions follow vLLM."""

    ignored_fields: ClassVar[frozenset[str]] = frozenset(
        {
            "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
            "parallel_tool_calls", "prediction", "verbosity", "spaces_between_special_tokens", "add_special_tokens",
        }
    )  # fmt: skip
    unsupported_fields: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            (
                "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema", "regex",
                "ebnf", "structural_tag", "logits_processors", "custom_logit_processor", "bad_words", "allowed_token_ids",
                "truncate_prompt_tokens", "thinking_token_budget", "lora_path", "return_hidden_states",
            ),
            _NOT_YET,
        ),
        "best_of": "choices are not ranked; use n",
        "use_beam_search": "there is no beam search; use n with a temperature",
    }  # fmt: skip

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: LogitBias | None = None
    seed: int | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int = 0
    stop: StopStrings = []
    stop_token_ids: StopTokenIds = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    priority: int = Field(default=0, ge=-_PRIORITY_LIMIT, lt=_PRIORITY_LIMIT)
    cache_salt: str = Field(default="", max_length=256)
    return_token_ids: bool = False

    def sampling_params(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The engine's parameters; the caller says how many tokens and logprobs its dialect asked for."""
        if self.prompt_logprobs is not None and self.stream:
            refuse("prompt_logprobs", "not available in a stream; send stream=false")
        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=self.logit_bias or None,
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )
