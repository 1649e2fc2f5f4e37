"""The entry point: sub-commands, --version, and every refusal as one line with the right exit code."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence

import typer

from negamax import __version__
from negamax.base.errors import NegamaxError
from negamax.cli import bench, chat, generate, parse, serve

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
app.command("parse", help=parse.HELP)(parse.command)
app.add_typer(bench.app, name="bench")

_BAD_VALUE = re.compile(r"Invalid value for ((?:'[^']+'(?: / )?)+): (.*)")
_UNKNOWN_OPTION = re.compile(r"No such option: (\S+)")


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
    """`message` on one line; a bad value is shown, an unknown option gets the nearest known one."""
    text = " ".join(message.split())
    bad = _BAD_VALUE.match(text)
    if bad is not None:
        flags = re.findall(r"'([^']+)'", bad[1])
        return f"{flags[0]} is {_given_value(flags, given)}: {bad[2][0].lower()}{bad[2][1:]}"
    unknown = _UNKNOWN_OPTION.search(text)
    if unknown is None:
        return text
    matches = difflib.get_close_matches(unknown[1].split("=")[0], _known_options(given), n=1, cutoff=0.5)
    hint = f"did you mean {matches[0]}?" if matches else "see --help"
    return f"no such option: {unknown[1]} ({hint})"


def _given_value(flags: list[str], given: list[str]) -> str:
    """What was written after one of `flags`."""
    for word, following in zip(given, [*given[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag in flags:
            return repr((value if equals else following)[:60])
    return "wrong"


def _known_options(given: list[str]) -> list[str]:
    """All flags of the sub-command in `given`."""
    group = typer.main.get_command(app)
    commands: dict[str, typer.core.TyperCommand] = group.commands  # type: ignore[attr-defined]
    for word in given:
        if word in commands:
            group = commands[word]
            break
    return [flag for option in group.params for flag in (*option.opts, *option.secondary_opts) if flag.startswith("-")]


if __name__ == "__main__":
    sys.exit(main())
