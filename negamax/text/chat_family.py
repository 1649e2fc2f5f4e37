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
    token_tags: frozenset[str] = frozenset()  # tags that grammars match only as tokens
    always_thinks: bool = False  # whether every prompt ends inside the reasoning
    parser_names: tuple[str, ...]  # names of the family's parsers in vLLM and SGLang
    sees: tuple[str, ...] = ()  # input types of the models besides text ("image", "video")
    append_names: tuple[str, ...] = ()  # vLLM and SGLang parsers that keep reasoning in content
