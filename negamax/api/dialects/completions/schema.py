"""Requests and answers of /v1/completions."""

from typing import Annotated

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
        refuse("prompt", f"the value must be {allowed}; got {describe(value)}")
    if type(value[0]) is int:
        return [check_token_ids(value, "prompt")]
    if len(value) > MAX_PROMPTS:
        refuse("prompt", f"the list has {len(value)} prompts; at most {MAX_PROMPTS} are allowed")
    prompts: list[Prompt] = []
    for index, part in enumerate(value):
        where = f"prompt[{index}]"
        if not isinstance(part, str | list):
            refuse(where, f"send a string or a list of token ids, not {describe(part)}")
        prompts.append(part if isinstance(part, str) else check_token_ids(part, where))
    return prompts


class CompletionRequest(StructuredRequest):
    """Text or token ids to continue, without a chat template."""

    # A prompt is a text or a list of token ids. A list may contain up to 128 prompts.
    prompt: Annotated[
        list[Prompt], PlainValidator(_convert_prompts), WithJsonSchema(_PROMPT_SCHEMA)
    ]
    max_tokens: int | None = Field(default=16, ge=0)  # Limit of generated tokens; 0 requires echo.
    logprobs: int | None = Field(default=None, ge=0)  # Likely tokens to list per position.
    echo: bool = False  # Return the prompt and its logprobs before the generated text.

    @property
    def scores_only(self) -> bool:
        """Whether the answer contains only the prompt with its logprobs."""
        if self.max_tokens != 0:
            return False
        if not self.echo:
            refuse("max_tokens", "the value 0 requires echo=true; send echo=true, or 1 or more")
        return True


class TextChoice(Struct, frozen=True):
    index: int  # Index of the prompt times n, plus index of the choice.
    text: str  # Text of the answer; a stream chunk has only the new text.
    logprobs: TextLogprobs | None  # Log-probabilities of the text's tokens, if requested.
    finish_reason: str | None  # `stop`, `length` or `abort`; null before the last chunk.
    stop_reason: int | str | UnsetType | None = UNSET  # Stop string or token that ended the text.
    token_ids: list[int] | UnsetType = UNSET  # Token ids of the text, if return_token_ids is set.
    # `prompt_logprobs`: one object per token, with token ids as keys, and null for the first token.
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # Prompt token ids, if return_token_ids is set.


class TextAnswer(CompletionAnswer, frozen=True, kw_only=True):
    """A whole answer or a stream chunk of /v1/completions."""

    object: str = "text_completion"
    # `n` choices per prompt, in prompt order. A stream chunk contains one choice or none.
    choices: list[TextChoice]
    # Token counts. With include_usage, some chunks have counts and all other chunks have null.
    usage: Usage | UnsetType | None = UNSET
