"""Requests and answers of /tokenize and /detokenize, with the fields of vLLM and SGLang."""

from typing import Annotated

from msgspec import UNSET, Struct, UnsetType
from pydantic import PlainValidator, WithJsonSchema

from negamax.api.schemas.request_model import RequestModel, check_token_ids, describe, refuse
from negamax.api.schemas.sampled_request import Messages, TemplateKwargs
from negamax.api.schemas.tools import Tools

MAX_TEXTS = 1024
_LIST_OF_IDS = {"type": "array", "items": {"type": "integer"}}


def _convert_texts(value: object) -> str | list[str]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        refuse("prompt", f"the value must be a text or a list of texts; got {describe(value)}")
    if len(value) > MAX_TEXTS:
        refuse("prompt", f"the list has {len(value)} texts; at most {MAX_TEXTS} are allowed")
    return value


def _convert_ids(value: object) -> list[int] | list[list[int]]:
    if not isinstance(value, list):
        refuse("tokens", f"send a list of token ids or a list of lists, not {describe(value)}")
    if value and isinstance(value[0], list):
        if len(value) > MAX_TEXTS:
            refuse("tokens", f"the list has {len(value)} lists; at most {MAX_TEXTS} are allowed")
        for index, ids in enumerate(value):
            if not isinstance(ids, list):
                refuse(f"tokens[{index}]", f"send a list of token ids, not {describe(ids)}")
            check_token_ids(ids, f"tokens[{index}]")
    else:
        check_token_ids(value, "tokens")
    return value


class TokenizeRequest(RequestModel):
    """A request to tokenize one or several texts, or a conversation."""

    model: str | None = None  # Model name from /v1/models; the default is the first name.
    prompt: (
        Annotated[
            str | list[str],
            PlainValidator(_convert_texts),
            WithJsonSchema(
                {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
            ),
        ]
        | None
    ) = None  # One text, or up to 1,024 texts. Send either `prompt` or `messages`.
    messages: Messages | None = None  # A conversation. Send either `messages` or `prompt`.
    tools: Tools | None = None  # Tools that the prompt shows with the messages.
    add_generation_prompt: bool = True  # End the prompt with the beginning of an answer.
    continue_final_message: bool = False  # Extend the last message; excludes add_generation_prompt.
    chat_template_kwargs: TemplateKwargs | None = None  # Variables of the chat template.
    return_token_strs: bool = False  # Return the texts of the tokens.


class DetokenizeRequest(RequestModel):
    """A request to convert token ids into text."""

    model: str | None = None  # Model name from /v1/models; the default is the first name.
    tokens: Annotated[
        list[int] | list[list[int]],
        PlainValidator(_convert_ids),
        WithJsonSchema({"anyOf": [_LIST_OF_IDS, {"type": "array", "items": _LIST_OF_IDS}]}),
    ]  # Token ids, or up to 1,024 lists of token ids.
    skip_special_tokens: bool = False  # Omit the text of special tokens.


class TokenizeAnswer(Struct, frozen=True):
    """For several texts, `tokens`, `count` and `token_strs` are lists with one entry per text."""

    count: int | list[int]  # Number of tokens.
    max_model_len: int  # Context length in tokens, including the answer.
    tokens: list[int] | list[list[int]]  # Ids of the tokens.
    token_strs: list[str] | list[list[str]] | UnsetType | None = UNSET  # Texts of the tokens.


class TokenizerInfo(Struct, frozen=True, kw_only=True):
    """Metadata from tokenizer_config.json, for clients that build prompts themselves."""

    tokenizer_class: str  # Name of the tokenizer's class in the library transformers.
    model_max_length: int  # Context length in tokens, including the answer.
    bos_token: str | None  # Text of the token that begins a sequence.
    eos_token: str | None  # Text of the token that ends an answer.
    unk_token: str | None  # Text of the token for unknown text.
    pad_token: str | None  # Text of the padding token.
    additional_special_tokens: list[str]  # Texts of additional special tokens.
    chat_template: str | None  # Jinja source of the template in use.


class DetokenizeAnswer(Struct, frozen=True):
    """The text of the tokens. For several lists of tokens, `prompt` and `text` are lists."""

    prompt: str | list[str]  # The decoded text, in the field that vLLM uses.
    text: str | list[str]  # The decoded text, in the field that SGLang uses.
