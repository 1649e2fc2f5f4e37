"""Choose the chat format of the served model: template, tags, output parser and call grammar.

vLLM and SGLang use the same parser names:

| name | tool calls | reasoning |
|---|---|---|
| `minimax_m2`, `minimax-m2`, `minimax` | M2 family | separate from the content |
| `minimax_m2_append_think`, `minimax-append-think` | - | in the content, after `<think>` |
| `minimax_m3`, `minimax-m3` | M3 family | separate from the content |
| `auto` | by the checkpoint | by the checkpoint, separate from the content |
| `none` | stay text | in the content as generated |
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from negamax.base.errors import ConfigError, check_choice
from negamax.config.grammar import Marker, Reasoning
from negamax.models.registry import CHAT_FAMILIES, find_chat_family
from negamax.text.chat_family import ChatFamily
from negamax.text.chat_template import ChatTemplate
from negamax.text.grammar.tool_calls import CallStyle
from negamax.text.parser.output_format import OutputFormat
from negamax.text.parser.output_parser import OutputParser, Thinking
from negamax.text.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"

_ANY = next(iter(CHAT_FAMILIES.values()))  # family used if both parsers are `none`
_TOOL_CALL_FAMILIES = {
    name: family for family in CHAT_FAMILIES.values() for name in family.parser_names
}
_REASONING_FAMILIES = {
    **{name: (family, Thinking.SPLIT) for name, family in _TOOL_CALL_FAMILIES.items()},
    **{
        name: (family, Thinking.APPEND)
        for family in CHAT_FAMILIES.values()
        for name in family.append_names
    },
}
TOOL_CALL_PARSERS = (AUTO, NONE, *_TOOL_CALL_FAMILIES)
REASONING_PARSERS = (AUTO, NONE, *_REASONING_FAMILIES)

_MAX_NEWLINES = 3  # maximum line breaks between reasoning and content in grammars

# open: the answer begins inside reasoning. optional: the answer may begin with reasoning.
ReasoningState = Literal["open", "optional", "none"]


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """A model's template and output parser. Tool calls stay text if `reads_calls` is false."""

    family: ChatFamily
    thinking: Thinking
    reads_calls: bool
    template: ChatTemplate | None = None  # None if prompts are plain text.
    # `tag_ids`: token ids of tags. The parser finds tags without a token id by their text.
    tag_ids: Mapping[str, int] = field(default_factory=dict)
    closing_ids: tuple[int, ...] = ()  # ids of the tokens that end the reasoning

    @classmethod
    def of_model(
        cls,
        model: str,
        *,
        tokenizer: Tokenizer | None = None,
        template: ChatTemplate | None = None,
        tool_call_parser: str | None = AUTO,
        reasoning_parser: str | None = AUTO,
    ) -> Self:
        """Choose the chat format for `model`: the architecture or the model_type in config.json.

        A parser name of None selects the parser `none`. Without a `tokenizer`, the parser finds all
        tags by their text. Raises `ConfigError` for an unknown parser name, for parsers of two
        different families, and for `auto` if the family of the model is unknown.
        """
        family, thinking = _choose(model, tool_call_parser or NONE, reasoning_parser or NONE)
        chosen = cls(family, thinking, tool_call_parser not in (None, NONE), template)
        if tokenizer is None:
            return chosen
        return dataclasses.replace(
            chosen,
            tag_ids=family.output.tag_ids(tokenizer),
            closing_ids=tuple(tokenizer.encode(family.closing_text)),
        )

    @property
    def output(self) -> OutputFormat:
        return self.family.output

    def new_parser(
        self,
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        in_reasoning: bool,
        may_call: bool = True,
        continues: bool = False,
        stop: Sequence[str] = (),
        includes_stop: bool = False,
    ) -> OutputParser:
        """Return a parser for one answer. Tool calls are parsed only if `may_call` is true."""
        output = self.output if self.reads_calls and may_call else self.output.drop_calls()
        return OutputParser(
            output,
            tools=tools,
            in_reasoning=in_reasoning,
            tag_ids=self.tag_ids or None,
            thinking=self.thinking,
            continues=continues,
            stop=stop,
            includes_stop=includes_stop,
        )

    def call_style(self) -> CallStyle:
        ids = {tag: i for tag, i in self.tag_ids.items() if tag in self.family.token_tags}
        return self.family.call_style(ids)

    def reasoning(self, state: ReasoningState) -> Reasoning | None:
        """Return the reasoning tags for the engine, or None if `state` is "none"."""
        if state == "none":
            return None
        output = self.output
        opener, closer, call_opener = (
            Marker(tag, self.tag_ids.get(tag))
            for tag in (output.think_open, output.think_close, output.call_open)
        )
        return Reasoning(
            state=state,
            opener=opener,
            closer=closer,
            call_opener=call_opener,
            closing_ids=self.closing_ids,
            max_newlines=_MAX_NEWLINES,
        )

    def begin_answer(self, prompt: str, *, may_think: bool) -> tuple[str, ReasoningState]:
        """Return the rendered prompt and the reasoning state in which the answer begins.

        If `may_think` is false, append the closing tag to a prompt that opens reasoning.
        """
        if not self.output.opens_reasoning(prompt):
            return prompt, "none" if prompt.endswith(self.output.think_close) else "optional"
        if may_think:
            return prompt, "open"
        return prompt + self.family.closing_text.lstrip("\n"), "none"

    def reasoning_after(self, token_ids: Sequence[int]) -> ReasoningState:
        """Return the reasoning state in which the answer to a plain prompt begins.

        The state is `open` if one of the last two tokens of the prompt opens the reasoning.
        """
        opener = self.tag_ids.get(self.output.think_open)
        return "open" if opener is not None and opener in token_ids[-2:] else "none"


def may_call(tools: Sequence[Mapping[str, Any]] | None, messages: Sequence[Any]) -> bool:
    """Return whether tools are declared or the conversation already contains tool calls."""
    return bool(tools) or any(
        isinstance(message, Mapping) and message.get("tool_calls") for message in messages
    )


def check_parsers(*, tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Raise `ConfigError` for a parser name that no model family has."""
    _choose(_ANY.output.name, tool_call_parser or NONE, reasoning_parser or NONE)


def _choose(
    model: str, tool_call_parser: str, reasoning_parser: str
) -> tuple[ChatFamily, Thinking]:
    """Return the chat family, and whether the parser separates the reasoning from the content."""
    check_choice("--tool-call-parser", tool_call_parser, TOOL_CALL_PARSERS)
    check_choice("--reasoning-parser", reasoning_parser, REASONING_PARSERS)
    of_calls = _TOOL_CALL_FAMILIES.get(tool_call_parser)
    of_reasoning, thinking = _REASONING_FAMILIES.get(reasoning_parser, (None, Thinking.RAW))
    if of_calls and of_reasoning and of_calls is not of_reasoning:
        raise ConfigError(
            f"--tool-call-parser {tool_call_parser} and --reasoning-parser "
            f"{reasoning_parser} belong to different model families",
            hint=f"use {of_calls.output.name} or {of_reasoning.output.name} for both, or auto",
        )
    if reasoning_parser == AUTO:
        thinking = Thinking.SPLIT
    named = of_calls or of_reasoning
    if named is None and AUTO not in (tool_call_parser, reasoning_parser):
        named = _ANY
    return named or find_chat_family(model), thinking
