"""`negamax parse --format m2 < TEXT`: parse a generated text as the server does."""

import json
from pathlib import Path
from typing import Any

from negamax.base.errors import check_choice
from negamax.cli.io import print_json, read_text, read_tools
from negamax.cli.options import setting
from negamax.models.registry import CHAT_FAMILIES
from negamax.text.detokenizer import TextPiece
from negamax.text.parser.events import ParsedToolCall, ParserEvent, collect
from negamax.text.parser.output_parser import OutputParser

HELP = """Parse a generated text from standard input, as the server does.

The command prints a line of JSON with `reasoning`, `content` and `tool_calls`; a missing text is
null. `tool_calls` lists names and arguments. Arguments are an object, or a string if the call is
truncated. The parser finds calls with and without `--tools`. Pass the model's text without the
prompt. M2's texts begin inside the thinking; M3's do so only with `--thinking-mode enabled`.
"""

THINKING_MODES = ("enabled", "disabled", "adaptive")


def command(
    *,
    format: str = setting(
        ..., "Choose the model family: m2 (M2 to M2.7) or m3.", choices=CHAT_FAMILIES
    ),
    tools: Path | None = setting(None, "Read the list of declared tools from this JSON file."),
    thinking_mode: str = setting(
        "adaptive",
        "Set the thinking mode: enabled, disabled or adaptive. M2 always thinks.",
        choices=THINKING_MODES,
    ),
    stream: int | None = setting(
        None, "Parse the text in pieces of this many characters, and merge the results.", min=1
    ),
) -> None:
    """Print reasoning, content and tool calls."""
    check_choice("--format", format, CHAT_FAMILIES)
    check_choice("--thinking-mode", thinking_mode, THINKING_MODES)
    parser = OutputParser(
        CHAT_FAMILIES[format].output,
        tools=read_tools(tools) if tools is not None else None,
        in_reasoning=CHAT_FAMILIES[format].always_thinks or thinking_mode == "enabled",
        tag_ids=None,
    )
    text = read_text()
    size = stream or max(1, len(text))
    events: list[ParserEvent] = []
    for start in range(0, len(text), size):
        events += parser.feed([TextPiece(text[start : start + size], None)])
    output = collect([*events, *parser.finish()])
    answer = {
        "reasoning": output.reasoning,
        "content": output.content,
        "tool_calls": [
            {"name": call.name, "arguments": _arguments(call)} for call in output.tool_calls
        ],
    }
    print_json(answer)


def _arguments(call: ParsedToolCall) -> Any:
    return json.loads(call.arguments) if call.is_whole else call.arguments
