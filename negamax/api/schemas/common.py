"""What every generation request shares: the strict base model, the sampling fields, and readable
refusals.

Handling of fields, the same for every endpoint and every object inside a request: `null` means
"left out"; a field in `ignored_fields` is accepted and has no effect; one in `unsupported_fields`
is refused with its reason, unless its value asks for nothing (false, 0, "", []). Of the fields that
nobody here knows, one that is nearly a known name is refused as a slip of the pen, unless that name
is there too, and others are ignored, as vLLM and SGLang do: clients send fields of other servers.
An integer may be written as 5.0. Of a list with many wrong elements the first one is told, and the
others are not looked at; objects whose values have one type are bounded before their values are
looked at. Ranges are checked once, by `SamplingParams.check`, so that the server and the embedded
`LLM` refuse alike.
"""

from __future__ import annotations

import difflib
import functools
import re
import secrets
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

from msgspec.structs import replace
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from negamax.base.errors import InvalidRequestError
from negamax.scheduler.request import (
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

RequestT = TypeVar("RequestT", bound="RequestModel")

# Names of other systems (OpenRouter, llama.cpp, TensorRT-LLM, TGI, Anthropic and others) that
# resemble names here and mean something else.
FOREIGN_FIELDS = frozenset(
    {
        "auto_max_new_tokens", "ctx_request_id", "inputs", "mode", "models",
        "presence_penalty_range", "prompt_id",
        "reasoning_format", "return_tokens", "speed",
    }
)  # fmt: skip
# unknown ones of one object that are compared with the known names, which takes time
_MAX_CHECKED_FIELDS = 32

_UNION_BRANCH = re.compile(r"(str|int|float|bool|list\[.*|dict\[.*|constrained-.*|function-.*)$")
_SHOWN_CHARS = 60  # of an offending value in a message
# of two names, 1.0 being the same: from here on a field was probably misspelt
_SLIP_LIKENESS = 0.85
_PRIORITY_LIMIT = 2**31


def refuse(param: str, message: str) -> NoReturn:
    """Raise the 400 error about field `param`."""
    raise InvalidRequestError(f"{param}: {message}", param=param, code="invalid_value")


def shown(value: object) -> str:
    """`value` as it may stand in a message: never longer than a line, however large the input
    was.
    """
    if isinstance(value, list | tuple | dict):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, str):
        return (
            repr(value)
            if len(value) <= _SHOWN_CHARS
            else f"{value[:_SHOWN_CHARS]!r}... ({len(value)} characters)"
        )
    text = (
        str(value)
        if not isinstance(value, int) or value.bit_length() < 256
        else "a very large integer"
    )
    return text[:_SHOWN_CHARS]


def nearest(name: str, known: frozenset[str] | list[str]) -> str:
    """' Did you mean X?' for the known name closest to `name`, or an empty string."""
    matches = difflib.get_close_matches(name[:_SHOWN_CHARS], sorted(known), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def _fail_fast(schema: Any) -> None:
    """Let every list in a core schema end at its first wrong element: pydantic would note an error
    for each."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple"):
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


class RequestModel(BaseModel):
    """Base of every request and of the objects inside it: strict types, immutable."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, protected_namespaces=())
    ignored_fields: ClassVar[frozenset[str]] = frozenset()
    unsupported_fields: ClassVar[Mapping[str, str]] = {}
    # of unsupported fields: what asks for nothing, beside those
    neutral_values: ClassVar[Mapping[str, object]] = {}
    # fields that mean the same as another one
    synonyms: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @classmethod
    def parse(cls: type[RequestT], body: object) -> RequestT:
        """The request in `body` (decoded JSON), or `InvalidRequestError` naming the first field at
        fault.
        """
        if not isinstance(body, dict):
            raise InvalidRequestError(
                f"the body must be a JSON object; it is {shown(body)}", code="invalid_body"
            )
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise _readable(error) from None

    @classmethod
    def reads(cls, name: str) -> bool:
        """Whether the value of a field of this name matters."""
        is_known = name in cls.model_fields or name in cls.unsupported_fields
        return is_known and name not in cls.ignored_fields

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, fields: Any) -> Any:
        """Drop what has no meaning here, refuse what would be misunderstood."""
        if not isinstance(fields, dict):
            return fields
        kept: dict[str, Any] = {}
        unknown: list[str] = []
        for name, value in fields.items():
            if value is None or name in cls.ignored_fields:
                continue
            if name in cls.model_fields:
                is_whole = (
                    isinstance(value, float) and name in _integer_fields(cls) and value.is_integer()
                )
                kept[name] = int(value) if is_whole else value
            elif name in cls.unsupported_fields:
                if value not in (False, "", [], cls.neutral_values.get(name)):
                    reason = {"name": name, "reason": cls.unsupported_fields[name]}
                    raise PydanticCustomError(
                        "unsupported_parameter", "is not supported: {reason}", reason
                    )
            elif name not in FOREIGN_FIELDS:
                unknown.append(name)
        cls._check_unknown(unknown, given=kept)
        return kept

    @classmethod
    def _check_unknown(cls, names: list[str], *, given: Mapping[str, Any]) -> None:
        """Refuse a slip of the pen: a name that is nearly that of a field which was not given."""
        known = {_squashed(name): name for name in cls.model_fields}
        for name in names[:_MAX_CHECKED_FIELDS]:
            near = difflib.get_close_matches(_squashed(name), known, n=1, cutoff=_SLIP_LIKENESS)
            if near and given.keys().isdisjoint(
                (known[near[0]], *cls.synonyms.get(known[near[0]], ()))
            ):
                meant = {"name": name, "meant": known[near[0]]}
                raise PydanticCustomError(
                    "unknown_parameter", "is not a known field. Did you mean '{meant}'?", meant
                )


@functools.cache
def _integer_fields(model: type[RequestModel]) -> frozenset[str]:
    """The fields that hold an integer and no other number."""
    return frozenset(
        name
        for name, field in model.model_fields.items()
        if _number_types(field.annotation) == {int}
    )


def _number_types(annotation: Any) -> set[type]:
    if annotation in (int, float):
        return {annotation}
    if typing.get_origin(annotation) in (list, dict):
        return set()
    return set().union(*map(_number_types, typing.get_args(annotation)))


def _squashed(name: str) -> str:
    return name[:_SHOWN_CHARS].replace("_", "").replace("-", "").lower()


def _readable(error: ValidationError) -> InvalidRequestError:
    """The first problem pydantic found, as one sentence with the path, the rule and the value."""
    first = error.errors(include_url=False)[0]
    path = ""
    for part in first["loc"]:
        if isinstance(part, str) and _UNION_BRANCH.match(part):
            continue  # which of several types was tried
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    kind, message = first["type"], first["msg"]
    if kind in ("unknown_parameter", "unsupported_parameter"):
        name = shown(first["ctx"]["name"]).strip("'")
        path = f"{path}.{name}" if path else name
        hint = "leave the field out" if kind == "unsupported_parameter" else None
        return InvalidRequestError(f"{path} {message}", hint=hint, param=path, code=kind)
    if kind == "missing":
        return InvalidRequestError(
            f"{path} is required and missing", param=path, code="missing_parameter"
        )
    message = message[0].lower() + message[1:]
    return InvalidRequestError(
        f"{path}: {message}; got {shown(first['input'])}", param=path, code="invalid_value"
    )


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
    if value == []:  # an empty object, as PHP writes it
        return {}
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


_STOP_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOP_STRINGS},
    ]
}
_BIAS_SCHEMA = {
    "type": "object",
    "additionalProperties": {"type": "number"},
    "maxProperties": MAX_LOGIT_BIAS,
}

StopStrings = Annotated[list[str], BeforeValidator(_as_stop_list), WithJsonSchema(_STOP_SCHEMA)]
StopTokenIds = Annotated[list[int], BeforeValidator(_bounded_ids)]
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]
LogitBias = Annotated[
    dict[int, float], BeforeValidator(_bounded_bias), WithJsonSchema(_BIAS_SCHEMA)
]


class StreamOptions(RequestModel):
    """`stream_options`: what a stream carries besides its deltas."""

    include_usage: bool = False  # a last chunk without choices has the counts
    continuous_usage_stats: bool = False  # the same, and every chunk has the counts so far
    include_obfuscation: bool = False  # accepted; streams are never padded

    @property
    def reports_usage(self) -> bool:
        """Whether the stream ends with the counts."""
        return self.include_usage or self.continuous_usage_stats


class SampledRequest(RequestModel):
    """The fields of every request for generated text. Names and defaults follow OpenAI, extensions
    follow vLLM and SGLang.
    """

    model: str | None = None  # a name from /v1/models; left out: the first of them
    stream: bool = False  # answer with events instead of one body
    # tokens of a stream that are sent together; default: the server's
    stream_interval: int | None = Field(default=None, ge=1)
    temperature: float | None = None  # 0 is greedy
    top_p: float | None = None  # the likeliest tokens that have this probability together
    top_k: int | None = None  # only so many of the likeliest tokens; 0 and -1: all
    # tokens with less than this share of the likeliest one's probability are left out
    min_p: float | None = None
    # above 1: tokens of prompt and answer become less likely
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0  # taken from a token's logit for each time the answer has it
    presence_penalty: float = 0.0  # taken from a token's logit once the answer has it
    logit_bias: LogitBias | None = None  # added to logits, by token id
    seed: int | None = None  # the same seed gives the same draws
    min_tokens: int = 0  # before so many, no end token is sampled and no stop counts
    stop_token_ids: StopTokenIds = Field(default_factory=list)  # tokens that end the answer
    ignore_eos: bool = False  # the end token does not end the answer
    # lower numbers run earlier
    priority: int = Field(default=0, ge=-_PRIORITY_LIMIT, lt=_PRIORITY_LIMIT)
    timeout: float | None = Field(default=None, gt=0)  # seconds from arrival to the last token
    # cached prefixes are shared only within one salt
    cache_salt: str = Field(default="", max_length=256)

    def shared_sampling(
        self, *, max_tokens: int | None, stop: Sequence[str], logprobs: int | None = None
    ) -> SamplingParams:
        """The engine's parameters; the limit, the stop strings and the logprobs have other names in
        each dialect.
        """
        return SamplingParams(
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
            stop=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
        )


class GenerationRequest(SampledRequest):
    """The fields that chat and plain completions share."""

    ignored_fields: ClassVar[frozenset[str]] = frozenset(
        {
            "user", "metadata", "store", "service_tier", "prompt_cache_key",
            "prompt_cache_retention", "safety_identifier",
            "prediction", "verbosity", "spaces_between_special_tokens", "add_special_tokens",
            "vllm_xargs",
        }
    )  # fmt: skip
    unsupported_fields: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("stop_regex", "repetition_detection"), "it is not implemented yet"
        ),
        "bad_words": "a word can be written in other tokens than those that would be forbidden; "
                     "use logit_bias for tokens",
        "logits_processors": "the server runs no code of clients",
        "custom_logit_processor": "the server runs no code of clients",
        "truncate_prompt_tokens": "a prompt without its beginning is another prompt; shorten it "
                                  "where it is made",
        "lora_path": "the server has no adapters",
        "session_params": "send the whole conversation; its prefix is cached",
        "return_hidden_states": "hidden states do not leave the engine",
        "best_of": "choices are not ranked; use n",
        "use_beam_search": "there is no beam search; use n with a temperature",
    }  # fmt: skip

    neutral_values: ClassVar[Mapping[str, object]] = {"best_of": 1}

    stream_options: StreamOptions = StreamOptions()  # what a stream carries besides its deltas
    n: int = 1  # answers to the same prompt
    # no other token is sampled; not together with a form, enforced calls or a thinking budget
    allowed_token_ids: list[int] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    stop: StopStrings = []  # texts that end the answer and are left out of it
    include_stop_str_in_output: bool = False  # the stop string or token stays in the answer
    no_stop_trim: bool = False  # SGLang's name for include_stop_str_in_output
    skip_special_tokens: bool = True  # special tokens have no text in the answer
    # of each prompt token after the first, with so many of the likeliest; not in streams
    prompt_logprobs: int | None = None
    # tokens of reasoning after which it is closed
    thinking_token_budget: int | None = Field(default=None, ge=0)
    # SGLang's name for thinking_token_budget
    max_thinking_tokens: int | None = Field(default=None, ge=0)
    return_tokens_as_token_ids: bool = False  # token texts in logprobs read "token_id:123"
    return_token_ids: bool = False  # the answer has the token ids of prompt and answer
    request_id: RequestId | None = None  # becomes part of the answer's id
    rid: RequestId | None = None  # SGLang's name for request_id

    @property
    def reasoning_budget(self) -> int | None:
        """Tokens that the reasoning may have."""
        return (
            self.max_thinking_tokens
            if self.thinking_token_budget is None
            else self.thinking_token_budget
        )

    def answer_id(self, prefix: str) -> str:
        """The id of the answer: the client's own, if it named one, after `prefix`."""
        return f"{prefix}-{self.request_id or self.rid or secrets.token_hex(16)}"

    def sampling_params(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The engine's parameters; the caller says how many tokens and logprobs its dialect asked
        for.
        """
        if self.prompt_logprobs is not None and self.stream:
            refuse("prompt_logprobs", "not available in a stream; send stream=false")
        return replace(
            self.shared_sampling(max_tokens=max_tokens, stop=self.stop, logprobs=logprobs),
            n=self.n,
            allowed_token_ids=None
            if self.allowed_token_ids is None
            else tuple(dict.fromkeys(self.allowed_token_ids)),
            include_stop_str_in_output=self.include_stop_str_in_output or self.no_stop_trim,
            skip_special_tokens=self.skip_special_tokens,
            prompt_logprobs=self.prompt_logprobs,
        )
