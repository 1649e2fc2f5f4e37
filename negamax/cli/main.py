"""The entry point of `negamax`, which prints an error as one line and returns an exit code."""

from __future__ import annotations

import contextlib
import io
import re
import signal
import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import typer

from negamax import __version__
from negamax.base.errors import NegamaxError, ResourceError
from negamax.base.standard_streams import drop_unwritable
from negamax.cli import (
    bench,
    chat,
    check,
    convert,
    doctor,
    generate,
    parse,
    plan,
    route,
    serve,
    verify,
)
from negamax.cli.options import add_command
from negamax.cli.resolve import Resolved, find_command, resolve
from negamax.cli.words import nearest

if TYPE_CHECKING:
    from rich.text import Text

app = typer.Typer(
    name="negamax",
    help="Serve MiniMax models: `negamax serve nano` starts a built-in model.",
    rich_markup_mode="markdown",
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
for _module in (serve, chat, generate, convert, doctor, plan, parse, check, verify, route):
    _name = _module.__name__.rpartition(".")[2]
    add_command(app, _name, _module)
app.add_typer(bench.app, name="bench")

_BAD_VALUE = re.compile(r"Invalid value for ((?:'[^']+'(?: / )?)+): (.*)")
_UNKNOWN_COMMAND = re.compile(r"No such command '(.*?)'\.")
_MISSING = re.compile(r"Missing (?:argument|option) '(.*)'\.")
_SURPLUS = re.compile(r"Got unexpected extra argument\(s\) \((.*)\)")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"negamax {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Define the options that precede the command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code, for example 2 (refusal) or 141 (closed pipe)."""
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as end:
        if not isinstance(end, OSError) and not isinstance(end.__context__, OSError):
            raise
        code = 128 + signal.SIGPIPE  # the code that shells report for SIGPIPE
    except OSError as error:
        code = _fail(ResourceError.of_system(error))
    drop_unwritable()
    return code


def _run(given: list[str]) -> int:
    # Characters that the locale cannot encode must not end a command.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    commands = _commands()
    resolved = Resolved(given)
    try:
        resolved = resolve(commands, given)
        for note in resolved.notes:
            print(f"note: {note}", file=sys.stderr)
        words = resolved.words
        if not words or isinstance(commands.commands.get(words[-1]), typer.core.TyperGroup):
            words = [*words, "--help"]
        if {"-h", "--help"} & set(words):
            _show_whole_names()
        result = commands.main(words, "negamax", standalone_mode=False, obj=resolved)
    except NegamaxError as error:
        return _fail(error)
    except typer.TyperException as error:
        message = _one_line(error.format_message(), resolved, commands)
        return _say(message, error.exit_code)
    except typer.Abort:
        return 130
    return result if isinstance(result, int) else 0


@cache
def _commands() -> typer.core.TyperGroup:
    """Build all commands at the first call."""
    return typer.main.get_command(app)  # type: ignore[return-value]


def _show_whole_names() -> None:
    """Let help wrap long option names, which Typer truncates in narrow terminals."""
    from typer import rich_utils  # this import is slow, and only help needs it

    class Wrapping(rich_utils.OptionHighlighter):
        def __call__(self, text: str | Text) -> Text:
            highlighted = super().__call__(text)
            highlighted.overflow = "fold"
            return highlighted

    rich_utils.highlighter = Wrapping()


def _fail(error: NegamaxError) -> int:
    return _say(" ".join(str(error).split()), error.exit_code)


def _say(message: str, code: int) -> int:
    with contextlib.suppress(OSError):
        print(f"negamax: error: {message}", file=sys.stderr)
    return code


def _one_line(message: str, resolved: Resolved, commands: typer.core.TyperGroup) -> str:
    """Reword Typer's error on one line. Add an invalid value's source, or a similar command."""
    text = " ".join(message.split())
    bad = _BAD_VALUE.match(text)
    if bad is not None:
        given = _given(re.findall(r"'([^']+)'", bad[1]), resolved)
        return f"{given}: {bad[2][0].lower()}{bad[2][1:]}"
    if missing := _MISSING.match(text):
        return f"{missing[1]} is missing (see --help)"
    if surplus := _SURPLUS.match(text):
        return f"too many arguments: {surplus[1]} (see --help)"
    unknown = _UNKNOWN_COMMAND.search(text)
    if unknown is None:
        return text
    command = find_command(commands, resolved.words)[0]
    names = list(command.commands) if isinstance(command, typer.core.TyperGroup) else []
    known = f"known: {', '.join(names)}"
    return f"no such command: {unknown[1]} ({nearest(unknown[1], names) or known})"


def _given(flags: list[str], resolved: Resolved) -> str:
    """Describe the value of the option with one of `flags`, and the value's source."""
    for choice in resolved.choices.values():
        for word in choice.words:
            flag, _, value = word.partition("=")
            if flag in flags:
                return f"{choice.source} is {value[:60]!r}"
    return f"{flags[0]} is invalid"


if __name__ == "__main__":
    sys.exit(main())
