"""The chat format of a model family."""

from dataclasses import dataclass

from negamax.text.grammar.tool_calls import CallStyle
from negamax.text.parser.output_format import OutputFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFamily:
    title: str  # name of the model family in error messages
    output: OutputFormat  # tags in answers, and the class that parses call blocks
    call_style: type[CallStyle]  # class that writes the grammar of tool calls
    closing_text: str  # text that the models write to end their reasoning
    # Grammars match these tags only as tokens, and all other tags as tokens or as text.
    token_tags: frozenset[str] = frozenset()
    always_thinks: bool = False  # whether every prompt ends inside the reasoning
    parser_names: tuple[str, ...]  # names of the family's parsers in vLLM and SGLang
    # types of input besides text that models of the family support ("image", "video")
    sees: tuple[str, ...] = ()
    # vLLM's and SGLang's names of reasoning parsers that leave the reasoning in the content
    append_names: tuple[str, ...] = ()
