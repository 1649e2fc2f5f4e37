"""Requests and answers of /v1/completions."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import UNSET, Struct, UnsetType
from pydantic import Field, PlainValidator, WithJsonSchema

from negamax.api.schemas.answers import CompletionAnswer, PromptLogprobs, TextLogprobs, Usage
from negamax.api.schemas.request_model import check_token_ids, describe, refuse
from negamax.api.schemas.sampled_request import MAX_PROMPTS
from negamax.api.schemas.structure import StructuredRequest

Prompt = str | list[int]

_IDS_SCHEMA = {"type": "array", "items": {"type": "integer"}}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        _IDS_SCHEMA,
        {"type": "array", "items": _IDS_SCHEMA},
    ]
}


def _convert_prompts(value: object) -> list[Prompt]:
    """Convert a string, a list of strings, token ids or lists of token ids to a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        allowed = "a string, strings, token ids or lists of token ids"
        refuse("prompt", f"must be {allowed}; got {describe(value)}")
    if type(value[0]) is int:
        return [check_token_ids(value, "prompt")]
    if len(value) > MAX_PROMPTS:
        refuse("prompt", f"{len(value)} prompts; allowed: at most {MAX_PROMPTS} in one request")
    prompts: list[Prompt] = []
    for index, part in enumerate(value):
        where = f"prompt[{index}]"
        if not isinstance(part, str | list):
            refuse(where, f"must be a string or a list of token ids; got {describe(part)}")
        prompts.append(part if isinstance(part, str) else check_token_ids(part, where))
    return prompts


class CompletionRequest(StructuredRequest):
    """Text or token ids to continue, without a chat template."""

    ignored_fields: ClassVar[frozenset[str]] = StructuredRequest.ignored_fields | {
        "parallel_tool_calls",
        "reasoning_effort",
    }
    unsupported_fields: ClassVar[Mapping[str, str]] = {
        **StructuredRequest.unsupported_fields,
        "suffix": "filling in the middle is not implemented yet",
        "messages": "this endpoint takes a prompt; use /v1/chat/completions",
    }

    # A text, a list of token ids, or a list of up to 128 prompts that are answered separately.
    prompt: Annotated[
        list[Prompt], PlainValidator(_convert_prompts), WithJsonSchema(_PROMPT_SCHEMA)
    ]
    max_tokens: int | None = Field(default=16, ge=0)  # Token limit; with echo, 0 scores the prompt.
    logprobs: int | None = Field(default=None, ge=0)  # Number of alternatives per token.
    echo: bool = False  # Put the prompt, with its logprobs, before the text.

    @property
    def scores_only(self) -> bool:
        """Whether the answer contains only the prompt with its logprobs."""
        if self.max_tokens != 0:
            return False
        if not self.echo:
            refuse("max_tokens", "0 is allowed only with echo=true; allowed: 1 or more")
        return True


class TextChoice(Struct, frozen=True):
    index: int  # Index of the prompt times n, plus index of the choice.
    text: str  # The answer; in a stream only the new part.
    logprobs: TextLogprobs | None  # Log-probabilities, if requested.
    finish_reason: str | None  # `stop`, `length` or `abort`; null before the last chunk.
    stop_reason: int | str | UnsetType | None = UNSET  # Stop string or token that ended the text.
    token_ids: list[int] | UnsetType = UNSET  # Ids of the text's tokens, with return_token_ids.
    # Only with prompt_logprobs: null, then one object per prompt token with token ids as keys.
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # Prompt token ids, with return_token_ids.


class TextAnswer(CompletionAnswer, frozen=True, kw_only=True):
    """A whole answer or a stream chunk of /v1/completions."""

    object: str = "text_completion"
    # `n` choices per prompt, in prompt order. A stream chunk has one; the usage chunk has none.
    choices: list[TextChoice]
    # Token counts; in a stream only with include_usage, and null except in chunks with counts.
    usage: Usage | UnsetType | None = UNSET
