"""Convert messages into prompt tokens for all APIs."""

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Self

from negamax.api.http.request_body import compute_max_chars
from negamax.api.http.request_threads import INLINE_BYTES, run_off_loop
from negamax.api.schemas.thinking import (
    NO_CHOICE,
    ThinkingChoice,
    drop_switches,
    read_template_switch,
)
from negamax.base.errors import ContextLengthError, InvalidRequestError
from negamax.base.pieces import num_chars
from negamax.engine.client.image_loader import ImageLoader
from negamax.models.chat_format import ChatFormat, ReasoningState
from negamax.scheduler.request import ImageInput
from negamax.text.chat_template import require_template
from negamax.text.encoding_cache import EncodingCache
from negamax.text.escaping import unescape
from negamax.text.messages import ImagePart, is_unseen, normalize_messages, plain_text
from negamax.text.tokenizer import Tokenizer, TooManyTokensError

_PROBE_CHARS_PER_TOKEN = 8  # characters per context token that are encoded first in a long prompt
_LEAST_TOKENS = 2**18  # minimum result of `compute_max_tokens`, for models with short contexts


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation to answer. Messages have OpenAI's format and are not checked yet."""

    messages: Sequence[Mapping[str, Any]]
    tools: list[dict[str, Any]] | None = None  # Tools that the prompt shows.
    thinking: ThinkingChoice = NO_CHOICE
    template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def compute_max_tokens(max_model_len: int) -> int:
    """Return the maximum number of tokens that a request may tokenize or detokenize."""
    return max(_LEAST_TOKENS, 2 * max_model_len)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation. The answer continues the text `continued`.

    `reasoning` states whether the answer begins inside reasoning, may begin with it, or has none.
    """

    text: str
    token_ids: list[int]
    reasoning: ReasoningState
    continued: str = ""
    images: Sequence[ImageInput] = ()


class PromptBuilder:
    """Renders conversations and tokenizes text. Threads process long texts."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_format: ChatFormat,
        *,
        max_model_len: int,
        default_template_kwargs: Mapping[str, Any] | None = None,
        allow_special_tokens_in_text: bool = False,
        images: ImageLoader | None = None,
    ) -> None:
        """`default_template_kwargs` contains defaults of template variables. With
        `allow_special_tokens_in_text`, text in a conversation may become control tokens. If
        `images` is None, conversations cannot contain images.
        """
        self._images = images
        self._escaper = None if allow_special_tokens_in_text else tokenizer.escaper
        self._encodings = EncodingCache(tokenizer)
        self._chat_format = chat_format
        self._max_model_len = max_model_len
        # Larger requests run in a thread. A confined tokenizer is a child process, so that even the
        # smallest request (-1) waits for it in a thread.
        self._inline_bytes = -1 if tokenizer.is_confined else INLINE_BYTES
        self._default_variables = drop_switches(default_template_kwargs or {})
        self._default_mode = read_template_switch(default_template_kwargs or {})

    async def chat(
        self,
        conversation: Conversation,
        *,
        num_bytes: int,
        cache_salt: str = "",
        needs_pixels: bool = True,
    ) -> ChatPrompt:
        """Build the prompt of `conversation`. `num_bytes` is about the size of the conversation.

        Without `needs_pixels`, the prompt has image tokens but no pixels. Raises the errors of
        `ImageLoader.load`, and `InvalidRequestError` if messages or the template are unusable.
        """
        if conversation.continue_final_message and conversation.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message continues the last message, but add_generation_prompt "
                "starts a new message",
                hint="send add_generation_prompt=false",
                param="continue_final_message",
                code="invalid_value",
            )

        def build() -> ChatPrompt:
            try:
                shown = (conversation.messages, conversation.tools, conversation.template_kwargs)
                self._check_chars(num_chars(shown, is_left_out=is_unseen))
                text, reasoning, continued = self._render(conversation, images)
            except RecursionError:
                raise InvalidRequestError(
                    "the messages or tools are nested too deeply", param="messages"
                ) from None
            token_ids = self._encode(text, cache_salt, is_escaped=True)
            return ChatPrompt(unescape(text), token_ids, reasoning, continued)

        images: list[ImagePart] | None = None if self._images is None else []
        prompt = await run_off_loop(build, num_bytes=num_bytes, inline_bytes=self._inline_bytes)
        if self._images is None or not images:
            return prompt
        loaded = await self._images.load(images, needs_pixels=needs_pixels)
        token_ids, placed = self._images.expand(prompt.token_ids, loaded)
        return dataclasses.replace(prompt, token_ids=token_ids, images=placed)

    async def plain(
        self, prompts: Sequence[str | list[int]], *, cache_salt: str = ""
    ) -> list[list[int]]:
        """Tokenize text prompts, which may contain special tokens. Return token ids unchanged."""

        def build() -> list[list[int]]:
            return [
                self._encode(prompt, cache_salt) if isinstance(prompt, str) else prompt
                for prompt in prompts
            ]

        num_bytes = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        return await run_off_loop(build, num_bytes=num_bytes, inline_bytes=self._inline_bytes)

    def _render(
        self, conversation: Conversation, images: list[ImagePart] | None
    ) -> tuple[str, ReasoningState, str]:
        """Return the prompt's escaped text, its reasoning state, and the text that the answer
        continues. Append the images of the messages to `images`.
        """
        template = require_template(self._chat_format.template)
        thinking, kwargs = conversation.thinking, conversation.template_kwargs or {}
        if thinking.mode is None:
            thinking = dataclasses.replace(thinking, mode=read_template_switch(kwargs))
        if thinking.mode_for(template) is None:
            thinking = dataclasses.replace(thinking, mode=self._default_mode)
        messages = normalize_messages(
            conversation.messages,
            has_root=template.has_root_role,
            family=self._chat_format.family,
            images=images,
        )
        mark = _Mark.put(messages) if conversation.continue_final_message else None
        variables: dict[str, Any] = {
            **self._default_variables,
            **drop_switches(kwargs),
            **thinking.template_variables(template),
            "tools": conversation.tools,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        text = template.render(messages, self._escaper, **variables)
        if mark is not None:
            return mark.cut(text), "open" if mark.is_in_reasoning else "none", mark.continued
        may_think = thinking.mode_for(template) != "disabled"
        return *self._chat_format.begin_answer(text, may_think=may_think), ""

    def _encode(self, text: str, cache_salt: str, *, is_escaped: bool = False) -> list[int]:
        """Tokenize `text`. Text that is far too long is refused before all of it is tokenized."""
        encode = partial(self._encodings.encode, salt=cache_salt, is_escaped=is_escaped)
        if not is_escaped:
            self._check_chars(len(text))
        try:
            probe_chars = _PROBE_CHARS_PER_TOKEN * self._max_model_len
            if len(text) > probe_chars:
                encode(text[:probe_chars], max_tokens=2 * self._max_model_len)
            return encode(text, max_tokens=compute_max_tokens(self._max_model_len))
        except TooManyTokensError as error:
            self._refuse_length(error.count)

    def _check_chars(self, count: int) -> None:
        """Refuse too long text before the text is copied, because copying holds the GIL."""
        if count > compute_max_chars(self._max_model_len):
            self._refuse_length(count // _PROBE_CHARS_PER_TOKEN)

    def _refuse_length(self, num_tokens: int) -> NoReturn:
        raise ContextLengthError.of_prompt(
            num_tokens, context_length=self._max_model_len, param="messages", is_counted=False
        ) from None


@dataclass(frozen=True, slots=True)
class _Mark:
    """A random text that marks the end of the last assistant message."""

    text: str
    is_in_reasoning: bool
    continued: str  # Text of the last message without the mark that `put` added.

    @classmethod
    def put(cls, messages: list[dict[str, Any]]) -> Self:
        """Append a mark to the last message's text. `cut` removes the mark and later text."""
        last = messages[-1]
        if last["role"] != "assistant" or "tool_calls" in last:
            raise InvalidRequestError(
                "the last message must be the assistant's, without tool calls",
                param="continue_final_message",
            )
        mark = f"[{secrets.token_hex(16)}]"
        content, reasoning = plain_text(last["content"]), last.get("reasoning_content")
        if content:
            messages[-1] = {**last, "content": content + mark}
        elif reasoning:
            messages[-1] = {**last, "reasoning_content": reasoning + mark}
        else:
            raise InvalidRequestError(
                "the last message is empty; there is nothing to continue",
                param="continue_final_message",
            )
        return cls(mark, not content, content)

    def cut(self, prompt: str) -> str:
        before, found, _ = prompt.rpartition(self.text)
        if not found:
            raise InvalidRequestError(
                "the chat template omits the last message", param="continue_final_message"
            )
        return before
