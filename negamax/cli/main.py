"""The entry point: sub-commands, --version, and every refusal as one line with the right exit code."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence

import typer

from negamax import __version__
from negamax.base.errors import NegamaxError
from negamax.cli import bench, chat, doctor, generate, parse, serve

app = typer.Typer(
    name="negamax",
    help="Serve MiniMax models: `negamax serve nano` starts the embedded one.",
    rich_markup_mode="markdown",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
app.command("serve", help=serve.HELP)(serve.command)
app.command("chat", help=chat.HELP)(chat.command)
app.command("generate", help=generate.HELP)(generate.command)
app.command("doctor", help=doctor.HELP)(doctor.command)
app.command("parse", help=parse.HELP)(parse.command)
app.add_typer(bench.app, name="bench")

_BAD_VALUE = re.compile(r"Invalid value for ((?:'[^']+'(?: / )?)+): (.*)")
_UNKNOWN_OPTION = re.compile(r"No such option: (\S+)")
_UNKNOWN_COMMAND = re.compile(r"No such command '(.*?)'\.")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"negamax {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
    """The options before the sub-command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the process's exit code. 2: the command was refused, in one line on standard error."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result = app(args=given or ["--help"], prog_name="negamax", standalone_mode=False)
    except NegamaxError as error:
        return _fail(" ".join(str(error).split()), error.exit_code)
    except typer.TyperException as error:
        return _fail(_one_line(error.format_message(), given), error.exit_code)
    except typer.Abort:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output is gone; nothing is left to say
        return 1
    return result if isinstance(result, int) else 0


def _fail(message: str, code: int) -> int:
    print(f"negamax: error: {message}", file=sys.stderr)
    return code


def _one_line(message: str, given: list[str]) -> str:
    """`message` on one line; a bad value is shown, an unknown option or command gets the nearest known one."""
    text = " ".join(message.split())
    bad = _BAD_VALUE.match(text)
    if bad is not None:
        flags = re.findall(r"'([^']+)'", bad[1])
        return f"{flags[0]} is {_given_value(flags, given)}: {bad[2][0].lower()}{bad[2][1:]}"
    command = _command(given)
    unknown = _UNKNOWN_COMMAND.search(text)
    if unknown is not None:
        names = list(command.commands) if isinstance(command, typer.core.TyperGroup) else []
        known = f"known: {', '.join(names)}"
        return f"no such command: {unknown[1]} ({_nearest(unknown[1], names) or known})"
    unknown = _UNKNOWN_OPTION.search(text)
    if unknown is None:
        return text
    return f"no such option: {unknown[1]} ({_nearest(unknown[1].split('=')[0], _options(command)) or 'see --help'})"


def _nearest(word: str, known: list[str]) -> str | None:
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {matches[0]}?" if matches else None


def _given_value(flags: list[str], given: list[str]) -> str:
    """What was written after one of `flags`."""
    for word, following in zip(given, [*given[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag in flags:
            return repr((value if equals else following)[:60])
    return "wrong"


def _command(given: list[str]) -> typer.core.TyperCommand | typer.core.TyperGroup:
    """The innermost command that `given` names, a group of commands where none of them follows."""
    command: typer.core.TyperCommand | typer.core.TyperGroup = typer.main.get_command(app)  # type: ignore[assignment]
    for word in given:
        if not isinstance(command, typer.core.TyperGroup):
            break
        if word in command.commands:
            command = command.commands[word]  # type: ignore[assignment]
        elif not word.startswith("-"):
            break
    return command


def _options(command: typer.core.TyperCommand | typer.core.TyperGroup) -> list[str]:
    """All flags of a command."""
    return [flag for option in command.params for flag in (*option.opts, *option.secondary_opts) if flag.startswith("-")]


if __name__ == "__main__":
    sys.exit(main())
