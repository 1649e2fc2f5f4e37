"""Fields that requests for generated text share."""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from negamax.api.schemas.request_model import RequestModel, describe, refuse, validate_at_most
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
# `common.turn.constrain` sets the three excluded parameters, because they depend on the prompt.
_SAMPLING_NAMES = frozenset(SamplingParams.__struct_fields__) - {
    "grammar", "reasoning", "thinking_token_budget",
}  # fmt: skip


def _convert_bias(value: object) -> object:
    """Convert JSON keys to token ids, for example `{"123": -5}` to `{123: -5}`."""
    if value == []:  # PHP encodes an empty object as [].
        return {}
    if not isinstance(value, dict):
        return value
    bias: dict[int, object] = {}
    for key, weight in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10):
            refuse("logit_bias", f"the key {describe(key)} is not a token id")
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
    validate_at_most("stop", MAX_STOP_STRINGS, "strings"),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    WithJsonSchema(_STOP_SCHEMA),
]
StopTokenIds = Annotated[list[int], validate_at_most("stop_token_ids", MAX_STOP_TOKEN_IDS, "ids")]
Host = Annotated[str, Field(max_length=253)]
Port = Annotated[int, Field(ge=1, le=65535)]
Room = Annotated[int, Field(ge=0, lt=2**63)]
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]
LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_convert_bias),
    validate_at_most("logit_bias", MAX_LOGIT_BIAS, "entries", of=dict),
    WithJsonSchema(_BIAS_SCHEMA),
]


def _check_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Refuse a list of messages that is empty or too long."""
    if not messages:
        refuse("messages", "the list is empty; send at least one message")
    if len(messages) > MAX_MESSAGES:
        refuse("messages", f"the list has {len(messages)} messages; send at most {MAX_MESSAGES}")
    return messages


def _check_template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Refuse names that cannot be template variables, and names of request fields."""
    for name in kwargs:
        field = "chat_template_kwargs"
        if name in RESERVED_KWARGS:
            refuse(field, f"{name!r} is a request field; set it outside chat_template_kwargs")
        if not name.isidentifier():
            refuse(field, f"{describe(name)} is not a variable name")
    return kwargs


Messages = Annotated[list[dict[str, Any]], AfterValidator(_check_messages)]
TemplateKwargs = Annotated[dict[str, Any], AfterValidator(_check_template_kwargs)]


class StreamOptions(RequestModel):
    """The field `stream_options`, which adds token counts to a stream."""

    include_usage: bool = False  # Send token counts in a last chunk without choices.
    continuous_usage_stats: bool = False  # Send the token counts so far in every chunk.
    include_obfuscation: bool = False  # The field has no effect, because streams are never padded.

    @property
    def reports_usage(self) -> bool:
        return self.include_usage or self.continuous_usage_stats


class SamplingFields(RequestModel):
    """Sampling parameters that have the same name in all APIs."""

    stream_interval: int | None = Field(default=None, ge=1)  # Tokens per event of this stream.
    temperature: float | None = None  # Sampling temperature; 0 is greedy.
    top_p: float | None = None  # Sample from the likeliest tokens with this total probability.
    top_k: int | None = None  # Sample from this many of the likeliest tokens; 0 and -1 mean all.
    min_p: float | None = None  # Least ratio of a token's probability to the highest probability.
    repetition_penalty: float | None = None  # Values above 1 make earlier tokens less likely.
    frequency_penalty: float = 0.0  # Subtracted from a token's logit per occurrence in the answer.
    presence_penalty: float = 0.0  # Subtracted from the logits of tokens that the answer contains.
    logit_bias: LogitBias | None = None  # Values to add to logits, by token id.
    stop_token_ids: StopTokenIds = Field(default_factory=list)  # Tokens that end the answer.
    ignore_eos: bool = False  # Continue after the end token.

    def sampling_params(self, **renamed: Any) -> SamplingParams:
        """Build the engine's sampling parameters from request fields with the same names.

        `renamed` contains parameters that have another name or meaning in the client's API.
        """
        given = {"logit_bias": self.logit_bias or None, **renamed}
        values: dict[str, Any] = {}
        for name in _SAMPLING_NAMES:
            if name in given or name in type(self).model_fields:
                value = given[name] if name in given else getattr(self, name)
                values[name] = tuple(value) if isinstance(value, list) else value
        return SamplingParams(**values)


class EngineRequest(RequestModel):
    """Fields that control how the engine handles a request."""

    stream: bool = False  # Answer with events instead of one body.
    # `priority`: the scheduler runs requests with lower numbers first.
    priority: int = Field(default=0, ge=-_PRIORITY_LIMIT, lt=_PRIORITY_LIMIT)
    timeout: float | None = Field(default=None, gt=0)  # Time limit of the request in seconds.
    cache_salt: str = Field(default="", max_length=256)  # Only equal salts share a prefix cache.
    # `routed_dp_rank` selects the data-parallel rank; the header X-data-parallel-rank overrides it.
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None  # SGLang's older name for routed_dp_rank.

    # vLLM's object for remote prefill: a server computes a prompt's KV blocks, another reads them.
    kv_transfer_params: dict[str, Any] | None = None
    # SGLang's fields for remote prefill; a list has one value per prompt.
    bootstrap_host: Host | list[Host | None] | None = None
    bootstrap_port: Port | list[Port | None] | None = None
    bootstrap_room: Room | list[Room] | None = None


class SampledRequest(EngineRequest, SamplingFields):
    """Fields of every request for generated text, named as in OpenAI, vLLM and SGLang."""

    model: str | None = None  # Model name from /v1/models; the default is the first name.
    seed: int | None = None  # Equal seeds give equal random draws.
    min_tokens: int = 0  # An answer with fewer tokens ignores end tokens and stop strings.


class TurnRequest(SampledRequest):
    """A request for one answer to a conversation."""

    chat_template_kwargs: TemplateKwargs | None = None  # Variables of the chat template.


class GenerationRequest(SampledRequest):
    """Fields that chat and plain completions share."""

    neutral_values: ClassVar[Mapping[str, object]] = {"best_of": 1}

    stream_options: StreamOptions = StreamOptions()  # Settings for streams.
    n: int = 1  # Number of answers to the prompt.
    # Sample only `allowed_token_ids`; grammars, forced calls and thinking budgets are refused.
    allowed_token_ids: list[int] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    stop: StopStrings = Field(default_factory=list)  # Strings that end the answer.
    include_stop_str_in_output: bool = False  # Keep the stop string or token in the answer.
    no_stop_trim: bool = False  # SGLang's name for include_stop_str_in_output.
    skip_special_tokens: bool = True  # Omit the text of special tokens.
    prompt_logprobs: int | None = None  # Number of likely tokens to list per prompt position.
    thinking_token_budget: int | None = Field(default=None, ge=0)  # Limit of reasoning tokens.
    max_thinking_tokens: int | None = Field(default=None, ge=0)  # SGLang's thinking_token_budget.
    return_tokens_as_token_ids: bool = False  # Write token 123 as "token_id:123" in logprobs.
    return_token_ids: bool = False  # Return the token ids of prompt and answer.
    request_id: RequestId | None = None  # The answer's id contains this id.
    rid: RequestId | None = None  # SGLang's name for request_id.

    @property
    def reasoning_budget(self) -> int | None:
        budget = self.thinking_token_budget
        return self.max_thinking_tokens if budget is None else budget

    def answer_id(self, prefix: str) -> str:
        """Return the answer's id, which is `prefix` followed by the client's id or a random id."""
        return f"{prefix}-{self.request_id or self.rid or secrets.token_hex(16)}"

    def sampling_params(self, **renamed: Any) -> SamplingParams:
        if self.prompt_logprobs is not None and self.stream:
            refuse("prompt_logprobs", "a stream cannot contain prompt_logprobs; send stream=false")
        allowed = self.allowed_token_ids
        return super().sampling_params(
            allowed_token_ids=None if allowed is None else list(dict.fromkeys(allowed)),
            include_stop_str_in_output=self.include_stop_str_in_output or self.no_stop_trim,
            **renamed,
        )
