"""The fields that requests for generated text share, and those with a conversation."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec.structs import replace
from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from negamax.api.schemas.request_model import RequestModel, at_most, refuse, shown
from negamax.scheduler.request import (
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from negamax.text.chat_template import RESERVED_KWARGS

MAX_MESSAGES = 16_384
MAX_PROMPTS = 128
_PRIORITY_LIMIT = 2**31


def _as_bias(value: object) -> object:
    """Token ids are JSON object keys, that is strings; `{"123": -5}` becomes `{123: -5}`."""
    if value == []:  # an empty object, as PHP writes it
        return {}
    if not isinstance(value, dict):
        return value
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


StopStrings = Annotated[
    list[str],
    at_most("stop", MAX_STOP_STRINGS, "strings"),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    WithJsonSchema(_STOP_SCHEMA),
]


StopTokenIds = Annotated[list[int], at_most("stop_token_ids", MAX_STOP_TOKEN_IDS, "ids")]


RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]


LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_as_bias),
    at_most("logit_bias", MAX_LOGIT_BIAS, "entries", of=dict),
    WithJsonSchema(_BIAS_SCHEMA),
]


def check_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Refuse no messages, and more of them than a conversation has."""
    if not messages:
        refuse("messages", "the list is empty; send at least one message")
    if len(messages) > MAX_MESSAGES:
        refuse("messages", f"{len(messages)} messages; allowed: at most {MAX_MESSAGES}")
    return messages


def check_template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Refuse template variables that are none, or that the request itself sets."""
    for name in kwargs:
        if name in RESERVED_KWARGS:
            refuse(
                "chat_template_kwargs", f"{name!r} is a field of the request itself; set it there"
            )
        if not name.isidentifier():
            refuse("chat_template_kwargs", f"{shown(name)} is not a variable name")
    return kwargs


class StreamOptions(RequestModel):
    """`stream_options`: what a stream carries besides its deltas."""

    include_usage: bool = False  # a last chunk without choices has the counts
    continuous_usage_stats: bool = False  # the same, and every chunk has the counts so far
    include_obfuscation: bool = False  # accepted; streams are never padded

    @property
    def reports_usage(self) -> bool:
        """Whether the stream ends with the counts."""
        return self.include_usage or self.continuous_usage_stats


class SamplingFields(RequestModel):
    """How tokens are drawn, by the names that all dialects have for it."""

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
    stop_token_ids: StopTokenIds = Field(default_factory=list)  # tokens that end the answer
    ignore_eos: bool = False  # the end token does not end the answer

    def shared_sampling(
        self,
        *,
        seed: int | None,
        max_tokens: int | None,
        min_tokens: int,
        stop: Sequence[str],
        logprobs: int | None = None,
    ) -> SamplingParams:
        """The engine's parameters; those given here have other names in some dialect."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=self.logit_bias or None,
            seed=seed,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
        )


class EngineRequest(RequestModel):
    """What every request for generated text says about its way through the engine."""

    stream: bool = False  # answer with events instead of one body
    # lower numbers run earlier
    priority: int = Field(default=0, ge=-_PRIORITY_LIMIT, lt=_PRIORITY_LIMIT)
    timeout: float | None = Field(default=None, gt=0)  # seconds from arrival to the last token
    # cached prefixes are shared only within one salt
    cache_salt: str = Field(default="", max_length=256)
    # the data-parallel rank that answers; the header X-data-parallel-rank counts before it
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None  # SGLang's older name for routed_dp_rank


class SampledRequest(EngineRequest, SamplingFields):
    """The fields of every request for generated text. Names and defaults follow OpenAI, extensions
    follow vLLM and SGLang.
    """

    model: str | None = None  # a name from /v1/models; left out: the first of them
    seed: int | None = None  # the same seed gives the same draws
    min_tokens: int = 0  # before so many, no end token is sampled and no stop counts


class TurnRequest(SampledRequest):
    """One answer to a conversation. What its dialect does not know itself is an extension, named as
    in chat completions.
    """

    # variables of the chat template
    chat_template_kwargs: (
        Annotated[dict[str, Any], AfterValidator(check_template_kwargs)] | None
    ) = None


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
    # texts that end the answer and are left out of it
    stop: StopStrings = Field(default_factory=list)
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
            self.shared_sampling(
                seed=self.seed,
                max_tokens=max_tokens,
                min_tokens=self.min_tokens,
                stop=self.stop,
                logprobs=logprobs,
            ),
            n=self.n,
            allowed_token_ids=None
            if self.allowed_token_ids is None
            else tuple(dict.fromkeys(self.allowed_token_ids)),
            include_stop_str_in_output=self.include_stop_str_in_output or self.no_stop_trim,
            skip_special_tokens=self.skip_special_tokens,
            prompt_logprobs=self.prompt_logprobs,
        )
