from collections.abc import Sequence
from typing import Any

import parser_outputs as outputs
import parser_proof as proof
from parser_outputs import parse

from negamax.models.minimax_m2.chat import MINIMAX_M2
from negamax.models.minimax_m3.chat import MARKER, MINIMAX_M3
from negamax.text.detokenizer import TextPiece
from negamax.text.parser.events import ParsedOutput, ParserEvent
from negamax.text.parser.output_format import OutputFormat
from negamax.text.parser.output_parser import OutputParser

__all__ = [
    "MARKER",
    "MINIMAX_M2",
    "MINIMAX_M3",
    "feed_text",
    "new_parser",
    "one_shot",
    "outputs",
    "parse",
    "proof",
]


def new_parser(
    format: OutputFormat = MINIMAX_M2,
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    in_reasoning: bool | None = None,
) -> OutputParser:
    """Return a parser that finds tags by their text; M2 begins in reasoning by default."""
    begins = format is MINIMAX_M2 if in_reasoning is None else in_reasoning
    return OutputParser(format, tools=tools, in_reasoning=begins, tag_ids=None)


def feed_text(parser: OutputParser, text: str) -> list[ParserEvent]:
    return parser.feed([TextPiece(text, None)])


def one_shot(
    text: str, tools: Sequence[dict[str, Any]] | None = None, *, format: OutputFormat = MINIMAX_M2
) -> ParsedOutput:
    return parse(format, text, tools=tools, in_reasoning=format is MINIMAX_M2)
