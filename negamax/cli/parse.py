"""`negamax parse --format m2 < TEXT`: what the server makes of a generated text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from negamax.base.errors import ConfigError
from negamax.cli.lines import print_json, read_text
from negamax.cli.options import completion
from negamax.cli.tools_file import read_tools
from negamax.models.registry import CHAT_FAMILIES
from negamax.text.detokenizer import TextPiece
from negamax.text.parser.events import ParsedToolCall, ParserEvent, collect
from negamax.text.parser.output_parser import OutputParser

HELP = """Parse a generated text from standard input, as the server would.

Prints one line of JSON: reasoning and content (null where there is none), and tool_calls as a list
of name and arguments. Arguments are an object; those of a call that the text breaks off are text,
as far as they go. Tags count by their text, and calls also without `--tools`. The text is what the
model wrote, without the prompt: M2 answers begin inside thinking, M3 answers only with
`--thinking-mode enabled`.
"""

THINKING_MODES = ("enabled", "disabled", "adaptive")


def command(
    *,
    format: Annotated[
        str,
        typer.Option(
            "--format", help="m2 (M2 to M2.7) or m3.", autocompletion=completion(CHAT_FAMILIES)
        ),
    ],
    tools: Annotated[
        Path | None,
        typer.Option("--tools", help="JSON file with the declared tools, as in a request: a list."),
    ] = None,
    thinking_mode: Annotated[
        str,
        typer.Option(
            "--thinking-mode",
            help="enabled, disabled or adaptive; M2 always thinks.",
            autocompletion=completion(THINKING_MODES),
        ),
    ] = "adaptive",
    stream: Annotated[
        int | None,
        typer.Option(
            "--stream", min=1, help="Feed pieces of so many characters and merge what comes out."
        ),
    ] = None,
) -> None:
    """Print reasoning, content and tool calls."""
    if format not in CHAT_FAMILIES:
        raise ConfigError(f"--format is {format!r}; allowed: {', '.join(CHAT_FAMILIES)}")
    if thinking_mode not in THINKING_MODES:
        raise ConfigError(
            f"--thinking-mode is {thinking_mode!r}; allowed: {', '.join(THINKING_MODES)}"
        )
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
