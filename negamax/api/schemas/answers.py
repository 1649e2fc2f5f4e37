"""Everything the server answers with, in the shapes of OpenAI plus vLLM's extensions.

msgspec structs, because a chunk is encoded for every token: a field left at UNSET is absent from
the JSON, None is `null`.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Struct, UnsetType


class ErrorBody(Struct, frozen=True):
    message: str  # what is wrong, the limit, and what to do
    type: str  # the class of the error, such as invalid_request_error
    param: str | None = None  # the field at fault, as a path into the request
    code: str | None = None  # a word for programs, such as context_length_exceeded


class ErrorAnswer(Struct, frozen=True):
    """The one error shape of every endpoint, and of an error inside a stream."""

    error: ErrorBody  # what went wrong


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int  # found in the prefix cache


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int  # within the reasoning


class Usage(Struct, frozen=True):
    """Token counts of one request, all its choices together; the prompt counts once."""

    prompt_tokens: int  # of the prompt, cached ones included
    completion_tokens: int  # generated, reasoning included
    total_tokens: int  # the sum of both
    prompt_tokens_details: PromptTokensDetails  # what the cache gave
    completion_tokens_details: CompletionTokensDetails  # what was reasoning


class FunctionCall(Struct, frozen=True):
    name: str | UnsetType = UNSET  # of the tool; in a stream only in the first piece
    arguments: str | UnsetType = UNSET  # JSON text of an object; in a stream the next piece of it


class ToolCall(Struct, frozen=True):
    """A call in a message, or a piece of one in a delta (then only `index` is always there)."""

    index: int | UnsetType = UNSET  # of the call in the message; in a stream
    # what the tool message names in tool_call_id; in a stream only in the first piece
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET  # `function`; in a stream only in the first piece
    function: FunctionCall = FunctionCall()  # what is called, and with what


class TopLogprob(Struct, frozen=True):
    token: str  # its text
    logprob: float  # its log-probability
    bytes: list[int]  # its text as UTF-8, which may be part of a character


class ChatLogprob(Struct, frozen=True):
    token: str  # its text
    logprob: float  # its log-probability before sampling parameters
    bytes: list[int]  # its text as UTF-8, which may be part of a character
    top_logprobs: list[TopLogprob]  # the likeliest tokens at its place, as many as were asked for


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatLogprob]  # one entry per generated token, reasoning and tags included


class TextLogprobs(Struct, frozen=True):
    """Logprobs of /v1/completions: one entry per token; None where a prompt's first token has no
    probability.
    """

    tokens: list[str]  # their texts
    token_logprobs: list[float | None]  # of the tokens above
    # the likeliest tokens at each place and the one above, by their texts
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # characters from the start of the choice's text


class PromptLogprob(Struct, frozen=True):
    logprob: float  # its log-probability
    rank: int | None  # 1 is the likeliest
    decoded_token: str  # its text


# one entry per prompt token, by token id; the first is null
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ReasoningDetail(Struct, frozen=True):
    """A piece of reasoning in MiniMax's own shape; in a stream `text` is what is new."""

    text: str  # the reasoning
    type: str = "reasoning.text"  # what kind of detail it is
    id: str = "reasoning-text-1"  # which reasoning of the message it is of
    format: str = "MiniMax-response-v1"  # whose form the text has
    index: int = 0  # which reasoning of the message it is of


class Message(Struct, frozen=True):
    role: str  # `assistant`
    # the text without reasoning and calls; null where there are calls and nothing else
    content: str | None
    reasoning_content: str | None  # the reasoning, apart from the content
    reasoning: str | None  # the same by vLLM's and OpenRouter's name
    # the same in MiniMax's form, with reasoning_split
    reasoning_details: list[ReasoningDetail] | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET  # in the order in which the model wrote them


class ChatChoice(Struct, frozen=True):
    index: int  # 0 to n - 1
    message: Message  # the answer
    logprobs: ChatLogprobs | None  # with logprobs
    finish_reason: str | None  # stop, length, tool_calls or abort
    stop_reason: int | str | None  # the stop string or the id of the stop token that ended it
    token_ids: list[int] | UnsetType = UNSET  # generated tokens, with return_token_ids


class ChatAnswer(Struct, frozen=True, kw_only=True):
    id: str  # the request's own id, or a random one, after a prefix
    object: str = "chat.completion"  # the kind of answer
    created: int  # seconds since 1970
    model: str  # the name that the request used
    choices: list[ChatChoice]  # n of them, in their order
    usage: Usage  # token counts
    system_fingerprint: str  # the server's version
    # an object by token id for each prompt token, null for the first; with prompt_logprobs
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # with return_token_ids


class Delta(Struct, frozen=True):
    role: str | UnsetType = UNSET  # `assistant`, in the first delta
    content: str | UnsetType = UNSET  # the next text without reasoning and calls
    reasoning_content: str | UnsetType = UNSET  # the next reasoning, never beside content
    reasoning: str | UnsetType = UNSET  # the same by vLLM's and OpenRouter's name
    # the same in MiniMax's form, with reasoning_split
    reasoning_details: list[ReasoningDetail] | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET  # the next pieces of calls


class ChatChunkChoice(Struct, frozen=True):
    index: int  # 0 to n - 1
    delta: Delta  # what is new
    logprobs: ChatLogprobs | None = None  # of the tokens since the last chunk, with logprobs
    finish_reason: str | None = None  # stop, length, tool_calls or abort, in its last chunk
    # the stop string or the id of the stop token that ended it, in its last chunk
    stop_reason: int | str | UnsetType | None = UNSET
    # generated since the last chunk, with return_token_ids
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    id: str  # the request's own id, or a random one, after a prefix
    object: str = "chat.completion.chunk"  # the kind of answer
    created: int  # seconds since 1970
    model: str  # the name that the request used
    choices: list[ChatChunkChoice]  # one, or none in the chunk with the counts
    system_fingerprint: str  # the server's version
    # token counts, with include_usage; null where they are not due
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # in the first chunk, with return_token_ids


class RenderedPrompt(Struct, frozen=True, kw_only=True):
    """What a conversation looks like to the model."""

    request_id: str  # the id that an answer would have
    model: str  # the name that the request used
    prompt: str  # the text
    token_ids: list[int]  # its tokens


class TextChoice(Struct, frozen=True):
    index: int  # the prompt's number times n, and the choice's
    text: str  # the answer, or what is new of it
    logprobs: TextLogprobs | None  # with logprobs
    # stop, length or abort; null in a stream before the last chunk of the choice
    finish_reason: str | None
    # the stop string or the id of the stop token that ended it
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET  # of the text, with return_token_ids
    # an object by token id for each prompt token, null for the first; with prompt_logprobs
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # with return_token_ids


class TextAnswer(Struct, frozen=True, kw_only=True):
    """Whole answer and stream chunk of /v1/completions."""

    id: str  # the request's own id, or a random one, after a prefix
    object: str = "text_completion"  # the kind of answer
    created: int  # seconds since 1970
    model: str  # the name that the request used
    # n for each prompt, prompt by prompt; in a stream one, or none in the chunk with the counts
    choices: list[TextChoice]
    system_fingerprint: str  # the server's version
    # token counts; in a stream with include_usage, null where they are not due
    usage: Usage | UnsetType | None = UNSET


class ModelCard(Struct, frozen=True, kw_only=True):
    """A model as OpenAI's and as Anthropic's clients read it."""

    id: str  # the name to ask for
    object: str = "model"  # what it is, for OpenAI's clients
    type: str = "model"  # what it is, for Anthropic's clients
    display_name: str  # the same as id
    created_at: str  # RFC 3339, the same moment as `created`
    lifecycle: str = "active"  # every model that is listed is served
    created: int  # when the server started, in seconds since 1970
    root: str  # what the model was loaded from
    max_model_len: int  # tokens of the window, answer included
    owned_by: str = "negamax"  # who serves it
    parent: str | None = None  # of an adapter, which this server has none of


class ModelList(Struct, frozen=True, kw_only=True):
    object: str = "list"  # what it is
    data: list[ModelCard]  # one for each name that the server answers to
    first_id: str  # the id of the first
    last_id: str  # the id of the last
    has_more: bool = False  # the list is always whole


class HealthAnswer(Struct, frozen=True):
    status: str  # `ok`


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


_encoder = msgspec.json.Encoder()


def encode(answer: Struct) -> bytes:
    """The answer as UTF-8 JSON."""
    return _encoder.encode(answer)


def error_answer(
    message: str, *, error_type: str, param: str | None = None, code: str | None = None
) -> ErrorAnswer:
    """An error in the OpenAI shape."""
    return ErrorAnswer(ErrorBody(message, error_type, param, code))
