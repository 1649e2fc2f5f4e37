"""The chat format of a model family."""

from dataclasses import dataclass

from negamax.text.grammar.tool_calls import CallStyle
from negamax.text.parser.output_format import OutputFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFamily:
    """The chat format of a model family: prompts and answers."""

    title: str  # for people
    output: OutputFormat  # tags, and the reader of call blocks
    call_style: type[CallStyle]  # how grammars write calls
    closing_text: str  # text that ends the reasoning, as the models write it
    token_tags: frozenset[str] = frozenset()  # tags that count in grammars only as tokens
    always_thinks: bool = False  # every prompt ends within the reasoning
    parser_names: tuple[str, ...]  # its names in vLLM and SGLang
    # input other than text ("image", "video"), not supported yet
    sees: tuple[str, ...] = ()
    # names of reasoning parsers that leave reasoning in the content
    append_names: tuple[str, ...] = ()
