"""Everything the server answers with, in the shapes of OpenAI plus vLLM's extensions.

msgspec structs, because a chunk is encoded for every token: a field left at UNSET is absent from the JSON, None is `null`.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Struct, UnsetType


class ErrorBody(Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(Struct, frozen=True):
    """The one error shape of every endpoint, and of an error inside a stream."""

    error: ErrorBody


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class Usage(Struct, frozen=True):
    """Token counts of one request, all its choices together; the prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class FunctionCall(Struct, frozen=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCall(Struct, frozen=True):
    """A call in a message, or a piece of one in a delta (then only `index` is always there)."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCall = FunctionCall()


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatLogprob]


class TextLogprobs(Struct, frozen=True):
    """Logprobs of /v1/completions: one entry per token; None where a prompt's first token has no probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # characters from the start of the choice's text


class PromptLogprob(Struct, frozen=True):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # one entry per prompt token, by token id; the first is null


class ReasoningDetail(Struct, frozen=True):
    """A piece of reasoning in MiniMax's own shape; in a stream `text` is what is new."""

    text: str
    type: str = "reasoning.text"
    id: str = "reasoning-text-1"
    format: str = "MiniMax-response-v1"
    index: int = 0


class Message(Struct, frozen=True):
    role: str
    content: str | None
    reasoning_content: str | None
    reasoning: str | None
    reasoning_details: list[ReasoningDetail] | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_details: list[ReasoningDetail] | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class RenderedPrompt(Struct, frozen=True, kw_only=True):
    """What a conversation looks like to the model."""

    request_id: str
    model: str
    prompt: str
    token_ids: list[int]


class TextChoice(Struct, frozen=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextAnswer(Struct, frozen=True, kw_only=True):
    """Whole answer and stream chunk of /v1/completions."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET


class ModelCard(Struct, frozen=True, kw_only=True):
    """A model as OpenAI's and as Anthropic's clients read it."""

    id: str
    object: str = "model"
    type: str = "model"
    display_name: str
    created_at: str  # RFC 3339, the same moment as `created`
    lifecycle: str = "active"
    created: int
    root: str
    max_model_len: int
    owned_by: str = "negamax"
    parent: str | None = None


class ModelList(Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]
    first_id: str
    last_id: str
    has_more: bool = False


class HealthAnswer(Struct, frozen=True):
    status: str


class VersionAnswer(Struct, frozen=True):
    version: str


_encoder = msgspec.json.Encoder()


def encode(answer: Struct) -> bytes:
    """The answer as UTF-8 JSON."""
    return _encoder.encode(answer)


def error_answer(message: str, *, error_type: str, param: str | None = None, code: str | None = None) -> ErrorAnswer:
    """An error in the OpenAI shape."""
    return ErrorAnswer(ErrorBody(message, error_type, param, code))
