"""Answers that several dialects share, in OpenAI's shapes with vLLM's extensions.

A field at UNSET is absent from the JSON, None is `null`.
"""

from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType


class ErrorBody(Struct, frozen=True):
    message: str  # what is wrong, the limit, and what to do
    type: str  # the class of the error, such as invalid_request_error
    param: str | None = None  # the field at fault, as a path into the request
    code: str | None = None  # machine-readable code, such as context_length_exceeded


class ErrorAnswer(Struct, frozen=True):
    """The error of all endpoints but Anthropic's, and of an error inside a stream."""

    error: ErrorBody  # details of the error


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int  # found in the prefix cache


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int  # within the reasoning


class Usage(Struct, frozen=True):
    """Token counts of one request, all its choices together; the prompt counts once."""

    prompt_tokens: int  # of the prompt, cached ones included
    completion_tokens: int  # generated, reasoning included
    total_tokens: int  # prompt and completion
    prompt_tokens_details: PromptTokensDetails  # details of the prompt
    completion_tokens_details: CompletionTokensDetails  # details of the completion


class TopLogprob(Struct, frozen=True, gc=False):
    token: str  # text of the token
    logprob: float  # its log-probability
    bytes: list[int]  # its text as UTF-8, which may be part of a character


class ChatLogprob(Struct, frozen=True, gc=False):
    token: str  # text of the token
    logprob: float  # its log-probability before sampling parameters
    bytes: list[int]  # its text as UTF-8, which may be part of a character
    top_logprobs: list[TopLogprob]  # the likeliest tokens at its place, as many as requested


class ChatLogprobs(Struct, frozen=True):
    # one entry per token of the content; of all tokens where reasoning stays in the content
    content: list[ChatLogprob | msgspec.Raw]


class TextLogprobs(Struct, frozen=True):
    """Logprobs of /v1/completions, one entry per token; null for the first token of a prompt."""

    tokens: list[str]  # their texts
    token_logprobs: list[float | None]  # of the tokens above
    top_logprobs: list[dict[str, float] | None]  # of alternatives and the token itself
    text_offset: list[int]  # characters from the start of the choice's text


class PromptLogprob(Struct, frozen=True):
    logprob: float  # its log-probability
    rank: int | None  # 1 is the likeliest
    decoded_token: str  # text of the token


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; the first is null


class TransferParams(Struct, frozen=True, kw_only=True):
    """vLLM's `kv_transfer_params`. Routers pass those of an answer on unchanged."""

    do_remote_prefill: bool = False  # another server has computed the prompt
    do_remote_decode: bool = False  # keep the prompt: another server will decode
    remote_block_ids: list[Any] | None = None  # positions of the kept blocks in the prompt
    remote_engine_id: str | None = None  # the engine that has them; new at each start
    remote_request_id: str | None = None  # the name of the kept prompt there
    remote_host: str | None = None  # where that engine listens
    remote_port: int | None = None  # where that engine listens
    tp_size: int | None = None  # its tensor-parallel ranks
    dcp_size: int | None = None  # its decode context parallel ranks: 1
    pp_size: int | None = None  # its pipeline stages: 1
    remote_num_tokens: int | None = None  # in these blocks


class CompletionAnswer(Struct, frozen=True, kw_only=True):
    """The common fields of chat and plain completions."""

    # for the server that will decode, if the request has do_remote_decode
    kv_transfer_params: TransferParams | UnsetType = UNSET

    id: str  # the request's own id, or a random one, after a prefix
    object: str  # the kind of answer
    created: int  # seconds since 1970
    model: str  # the name that the request used
    system_fingerprint: str  # the server's version


class ModelCard(Struct, frozen=True, kw_only=True):
    """A model for the clients of OpenAI and Anthropic."""

    id: str  # the name to ask for
    object: str = "model"  # type of the object for OpenAI's clients
    type: str = "model"  # type of the object for Anthropic's clients
    display_name: str  # the same as id
    created_at: str  # RFC 3339, the same moment as `created`
    lifecycle: str = "active"  # always `active`
    created: int  # when the server started, in seconds since 1970
    root: str  # what the model was loaded from
    max_model_len: int  # tokens of the context, answer included
    max_input_tokens: int  # the same, for Anthropic's clients
    owned_by: str = "negamax"  # always `negamax`
    parent: str | None = None  # always null: there are no adapters


class ModelList(Struct, frozen=True, kw_only=True):
    object: str = "list"  # type of the object
    data: list[ModelCard]  # one for each name that the server answers to
    first_id: str  # the id of the first
    last_id: str  # the id of the last
    has_more: bool = False  # always false: the list is complete
    models: list[dict[str, Any]] | UnsetType = UNSET  # the same as Codex reads them, for Codex


class ReplicaHealth(Struct, frozen=True):
    replica: int  # its number, from 0
    status: str  # `ok`, `silent`, `restarting`, or `failed`: it is not started again


class HealthAnswer(Struct, frozen=True):
    status: str  # `ok`, or `degraded`: some replica does not answer
    replicas: list[ReplicaHealth] | UnsetType = UNSET  # of a server that has several


class VersionAnswer(Struct, frozen=True):
    version: str  # of this server


class ServerAnswer(Struct, frozen=True):
    name: str  # `negamax`
    version: str  # of this server
    models: list[str]  # the names that requests may use
    max_model_len: int  # tokens, prompt and output together
    endpoints: list[str]  # method and path
    chat_page: str = "/"  # path of the chat page
    openapi: str = "/openapi.json"  # path of the OpenAPI document


encode = msgspec.json.Encoder().encode  # an answer, or several, as UTF-8 JSON


def build_error(
    message: str, *, error_type: str, param: str | None = None, code: str | None = None
) -> ErrorAnswer:
    return ErrorAnswer(ErrorBody(message, error_type, param, code))


class MessageErrorDetails(Struct, frozen=True):
    error_code: str  # machine-readable code, such as context_length_exceeded


class MessageErrorBody(Struct, frozen=True):
    type: str  # the class of the error by Anthropic's names, such as overloaded_error
    message: str  # what is wrong, the limit, and what to do
    details: MessageErrorDetails | UnsetType = UNSET  # for programs


class MessageError(Struct, frozen=True, tag="error", tag_field="type"):
    """Anthropic's error, also an event."""

    error: MessageErrorBody  # details of the error
    request_id: str  # the same as in the header x-request-id


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
