"""Define answers of several API endpoints, in OpenAI's formats with vLLM's extensions.

A field with the value UNSET is absent from the JSON. A field with the value None is `null`.
"""

from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType


class ErrorBody(Struct, frozen=True):
    message: str  # The problem, the limit and the remedy.
    type: str  # The class of the error, such as invalid_request_error.
    param: str | None = None  # Path of the invalid field in the request.
    code: str | None = None  # Machine-readable code, such as context_length_exceeded.


class ErrorAnswer(Struct, frozen=True):
    """The error format of all endpoints except Anthropic's, in responses and in streams."""

    error: ErrorBody  # Message and type of the error.


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int  # Prompt tokens found in the prefix cache.


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int  # Tokens within the reasoning.


class Usage(Struct, frozen=True):
    """Token counts of a request, summed over its choices. The prompt is counted only once."""

    prompt_tokens: int  # Prompt tokens, including cached tokens.
    completion_tokens: int  # Generated tokens, including reasoning.
    total_tokens: int  # Sum of prompt tokens and completion tokens.
    prompt_tokens_details: PromptTokensDetails  # Number of cached prompt tokens.
    completion_tokens_details: CompletionTokensDetails  # Number of reasoning tokens.


class TopLogprob(Struct, frozen=True, gc=False):
    token: str  # Text of the token.
    logprob: float  # Log-probability of the token.
    bytes: list[int]  # UTF-8 bytes of the token, which may end within a character.


class ChatLogprob(Struct, frozen=True, gc=False):
    token: str  # Text of the token.
    logprob: float  # Log-probability before sampling parameters change the logits.
    bytes: list[int]  # UTF-8 bytes of the token, which may end within a character.
    top_logprobs: list[TopLogprob]  # The likeliest tokens at this position, as many as requested.


class ChatLogprobs(Struct, frozen=True):
    # One entry per content token, or per generated token if the content includes the reasoning.
    content: list[ChatLogprob | msgspec.Raw]


class TextLogprobs(Struct, frozen=True):
    """Logprobs of /v1/completions, one per token. The logprob of the first prompt token is null."""

    tokens: list[str]  # Texts of the tokens.
    token_logprobs: list[float | None]  # Log-probabilities of the tokens.
    top_logprobs: list[dict[str, float] | None]  # Logprobs of likely tokens, by token text.
    text_offset: list[int]  # Position of each token in the choice's text, in characters.


class PromptLogprob(Struct, frozen=True):
    logprob: float  # Log-probability of the token.
    rank: int | None  # Rank of the token; 1 is the likeliest.
    decoded_token: str  # Text of the token.


class PromptBlocks(Struct, frozen=True):
    """The blocks of a prompt. A router uses the blocks to find servers that cached the prompt."""

    num_tokens: int  # Number of tokens in the prompt.
    block_size: int  # Number of tokens in a block.
    # `block_hashes` as in KV events, for blocks before the first image and the prompt's last token.
    block_hashes: list[int]


# One object per prompt token, with token ids as keys; null for the first prompt token.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class TransferParams(Struct, frozen=True, kw_only=True):
    """vLLM's `kv_transfer_params`. Routers copy this object from answers into later requests."""

    do_remote_prefill: bool = False  # True if another server has computed the prompt.
    do_remote_decode: bool = False  # Keep the prompt's KV cache, because another server decodes.
    remote_block_ids: list[Any] | None = None  # Indices, within the prompt, of the kept KV blocks.
    remote_engine_id: str | None = None  # Id of the remote engine, which has the KV blocks.
    remote_request_id: str | None = None  # Id by which the remote engine finds the kept prompt.
    remote_host: str | None = None  # Host at which the remote engine listens.
    remote_port: int | None = None  # Port at which the remote engine listens.
    tp_size: int | None = None  # Number of tensor-parallel ranks of the remote engine.
    dcp_size: int | None = None  # Decode context parallel ranks of the remote engine, always 1.
    pp_size: int | None = None  # Pipeline stages of the remote engine, always 1.
    remote_num_tokens: int | None = None  # Number of tokens in the kept KV blocks.


class CompletionAnswer(Struct, frozen=True, kw_only=True):
    """The common fields of chat and plain completions."""

    # Object to send to the decoding server; only in answers to requests with do_remote_decode.
    kv_transfer_params: TransferParams | UnsetType = UNSET

    id: str  # A prefix, followed by the request's id or a random id.
    object: str  # Type of the object, such as chat.completion.
    created: int  # Unix time of the answer's start, in seconds.
    model: str  # Model name that the request used.
    system_fingerprint: str  # The server's version.


class ModelCard(Struct, frozen=True, kw_only=True):
    """The description of a model, with the fields of OpenAI and of Anthropic."""

    id: str  # Model name to send in requests.
    object: str = "model"  # Type of the object for OpenAI's clients.
    type: str = "model"  # Type of the object for Anthropic's clients.
    display_name: str  # Same value as id.
    created_at: str  # The time `created` in RFC 3339.
    lifecycle: str = "active"  # Always `active`.
    created: int  # Unix time of the server's start, in seconds.
    root: str  # Folder or hub id of the model.
    max_model_len: int  # Context length in tokens, including the answer.
    max_input_tokens: int  # Same value as max_model_len.
    owned_by: str = "negamax"  # Always `negamax`.
    parent: str | None = None  # Always null, because there are no adapters.


class ModelList(Struct, frozen=True, kw_only=True):
    object: str = "list"  # Type of the object.
    data: list[ModelCard]  # One card per model name of the server.
    first_id: str  # Id of the first model card.
    last_id: str  # Id of the last model card.
    has_more: bool = False  # Always false: the list is complete.
    models: list[dict[str, Any]] | UnsetType = UNSET  # The models in the format of Codex.


class ReplicaHealth(Struct, frozen=True):
    replica: int  # Number of the replica, from 0.
    status: str  # `ok`, `silent`, `restarting` or `failed`. A failed replica stays stopped.


class HealthAnswer(Struct, frozen=True):
    status: str  # `ok`, or `degraded` if a replica does not answer.
    replicas: list[ReplicaHealth] | UnsetType = UNSET  # State of each replica, if several exist.


class VersionAnswer(Struct, frozen=True):
    version: str  # Version of this server.


class ServerAnswer(Struct, frozen=True):
    name: str  # Always `negamax`.
    version: str  # Version of this server.
    models: list[str]  # Model names that requests may use.
    max_model_len: int  # Context length in tokens, including the answer.
    endpoints: list[str]  # Method and path of each route.
    chat_page: str = "/"  # Path of the chat page.
    openapi: str = "/openapi.json"  # Path of the OpenAPI document.


encode = msgspec.json.Encoder().encode  # Encodes one or several answers as UTF-8 JSON.


def build_error(
    message: str, *, error_type: str, param: str | None = None, code: str | None = None
) -> ErrorAnswer:
    return ErrorAnswer(ErrorBody(message, error_type, param, code))


class MessageErrorDetails(Struct, frozen=True):
    error_code: str  # Machine-readable code, such as context_length_exceeded.


class MessageErrorBody(Struct, frozen=True):
    type: str  # Anthropic's name of the error class, such as overloaded_error.
    message: str  # The problem, the limit and the remedy.
    details: MessageErrorDetails | UnsetType = UNSET  # Machine-readable error code.


class MessageError(Struct, frozen=True, tag="error", tag_field="type"):
    """Anthropic's error format, which is also used for stream events."""

    error: MessageErrorBody  # Message and type of the error.
    request_id: str  # Value of the header x-request-id.


_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def build_message_error(status: int, answer: ErrorAnswer, *, request_id: str) -> MessageError:
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    code = answer.error.code
    details = UNSET if code is None else MessageErrorDetails(code)
    return MessageError(MessageErrorBody(kind, answer.error.message, details), request_id)
