"""What sets one model family apart from the others in text."""

from __future__ import annotations

from dataclasses import dataclass

from negamax.text.grammar.tool_calls import CallStyle
from negamax.text.parser.output_format import OutputFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFamily:
    """How the models of a family read prompts and write answers."""

    title: str  # as people know it
    output: OutputFormat  # tags, and the reader of call blocks
    call_style: type[CallStyle]  # how grammars write calls
    closing_text: str  # what ends its reasoning, as the models write it
    token_tags: frozenset[str] = frozenset()  # that count in grammars as their own token only
    always_thinks: bool = False  # every prompt ends within the reasoning
    parser_names: tuple[str, ...]  # its names in vLLM and SGLang
    sees: tuple[str, ...] = ()  # beside text: "image", "video"; not shown to it yet
    append_names: tuple[str, ...] = ()  # of reasoning parsers that leave it in the content
