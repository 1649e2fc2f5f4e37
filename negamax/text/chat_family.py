"""The chat format of a model family."""

from dataclasses import dataclass

from negamax.text.grammar.tool_calls import CallStyle
from negamax.text.parser.output_format import OutputFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFamily:
    title: str  # name of the family in messages
    output: OutputFormat  # tags of the family, and the reader of call blocks
    call_style: type[CallStyle]  # writes the grammar of tool calls
    closing_text: str  # text that ends the reasoning, as the models write it
    # Grammars recognize these tags only as tokens, and every other tag also as text.
    token_tags: frozenset[str] = frozenset()
    always_thinks: bool = False  # every prompt ends within the reasoning
    parser_names: tuple[str, ...]  # names of the family's parsers in vLLM and SGLang
    # kinds of input other than text that models of the family can read ("image", "video")
    sees: tuple[str, ...] = ()
    # vLLM's and SGLang's names of reasoning parsers that leave the reasoning in the content
    append_names: tuple[str, ...] = ()
