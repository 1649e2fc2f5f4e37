"""Parser names, as vLLM and SGLang have them, and what they mean: the format of an answer and where
its reasoning goes.

| name | tool calls | reasoning |
|---|---|---|
| `minimax_m2`, `minimax-m2`, `minimax` | those of the M2 family | apart from the content |
| `minimax_m2_append_think`, `minimax-append-think` | - | stays in the content, after `<think>` |
| `minimax_m3`, `minimax-m3` | those of the M3 family | apart from the content |
| `auto` | by the checkpoint | by the checkpoint, apart from the content |
| `none` | stay text | stays in the content as generated |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from negamax.base.errors import ConfigError
from negamax.text.minimax_m2_format import MINIMAX_M2
from negamax.text.minimax_m3_format import MINIMAX_M3
from negamax.text.output_parser import OutputFormat, OutputParser, Thinking

AUTO, NONE = "auto", "none"

FORMATS: Mapping[str, OutputFormat] = {"m2": MINIMAX_M2, "m3": MINIMAX_M3}

_TOOL_CALL_FORMATS = {
    "minimax_m2": MINIMAX_M2,
    "minimax-m2": MINIMAX_M2,
    "minimax": MINIMAX_M2,
    "minimax_m3": MINIMAX_M3,
    "minimax-m3": MINIMAX_M3,
}
_REASONING_FORMATS = {
    **{name: (format, Thinking.SPLIT) for name, format in _TOOL_CALL_FORMATS.items()},
    "minimax_m2_append_think": (MINIMAX_M2, Thinking.APPEND),
    "minimax-append-think": (MINIMAX_M2, Thinking.APPEND),
}
TOOL_CALL_PARSERS = (AUTO, NONE, *_TOOL_CALL_FORMATS)
REASONING_PARSERS = (AUTO, NONE, *_REASONING_FORMATS)


@dataclass(frozen=True, slots=True)
class OutputStyle:
    """How answers are read. With `reads_calls` False, what looks like a call is content."""

    format: OutputFormat
    thinking: Thinking
    reads_calls: bool

    def new_parser(
        self,
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        in_reasoning: bool,
        tag_ids: Mapping[str, int] | None,
        may_call: bool = True,
        continues: bool = False,
        stop: Sequence[str] = (),
        includes_stop: bool = False,
    ) -> OutputParser:
        """A parser for one answer; with `may_call` False it has no calls either. The rest is as of
        `OutputParser`."""
        format = self.format if self.reads_calls and may_call else self.format.without_calls()
        return OutputParser(
            format,
            tools=tools,
            in_reasoning=in_reasoning,
            tag_ids=tag_ids,
            thinking=self.thinking,
            continues=continues,
            stop=stop,
            includes_stop=includes_stop,
        )


def may_call(tools: Sequence[Mapping[str, Any]] | None, messages: Sequence[Any]) -> bool:
    """Whether an answer to `messages` may have calls: of declared tools, or, where none is
    declared, of those that the conversation has called already. Any other client would not know
    what to do with them.
    """
    return bool(tools) or any(
        isinstance(message, Mapping) and message.get("tool_calls") for message in messages
    )


def output_style(
    model: str, *, tool_call_parser: str | None = AUTO, reasoning_parser: str | None = AUTO
) -> OutputStyle:
    """How answers of `model` (its architecture or model_type in config.json) are read. None is
    `none`.

    Errors: `ConfigError` for an unknown name, for parsers of two families, and for `auto` with a
    model of neither family.
    """
    tool_call_parser = tool_call_parser or NONE
    reasoning_parser = reasoning_parser or NONE
    _check_name("--tool-call-parser", tool_call_parser, TOOL_CALL_PARSERS)
    _check_name("--reasoning-parser", reasoning_parser, REASONING_PARSERS)
    call_format = _TOOL_CALL_FORMATS.get(tool_call_parser)
    think_format, thinking = _REASONING_FORMATS.get(reasoning_parser, (None, Thinking.RAW))
    if call_format and think_format and call_format is not think_format:
        raise ConfigError(
            f"--tool-call-parser is {tool_call_parser}, --reasoning-parser is "
            f"{reasoning_parser}: two model families",
            hint=f"use {call_format.name} or {think_format.name} for both, or auto",
        )
    if reasoning_parser == AUTO:
        thinking = Thinking.SPLIT
    named = call_format or think_format
    if named is None and AUTO not in (tool_call_parser, reasoning_parser):
        named = MINIMAX_M2  # nothing is read
    return OutputStyle(named or format_of(model), thinking, reads_calls=tool_call_parser != NONE)


def format_of(model: str) -> OutputFormat:
    """The format of a model family, by the architecture or model_type in config.json.

    Errors: `ConfigError` for a model of neither family.
    """
    plain = model.lower().replace("_", "").replace("-", "")
    for format in FORMATS.values():
        if format.name.replace("_", "") in plain:
            return format
    raise ConfigError(
        f"no parser is known for {model!r}; known: MiniMax-M2 and MiniMax-M3",
        hint="name one with --tool-call-parser and --reasoning-parser, or none",
    )


def _check_name(flag: str, name: str, allowed: Sequence[str]) -> None:
    if name not in allowed:
        raise ConfigError(f"{flag} is {name!r}; allowed: {', '.join(allowed)}")
