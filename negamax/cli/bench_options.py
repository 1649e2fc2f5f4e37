"""What the benchmark commands read from the command line in the same way."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from negamax.base.errors import ConfigError
from negamax.bench.serve_options import OUTPUT

MAX_COUNT = 1_000_000
_PICTURES = (".png", ".svg", ".pdf")


def check_result(file: Path, *, flag: str) -> None:
    """Refuse before a run what could not be written behind it; the folder of `file` is made.
    Errors: `ConfigError` naming `flag`."""
    reason = ""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        reason = f"{file.parent} is no folder"
    except OSError as error:
        reason = str(error.strerror)
    if file.is_dir():
        reason = "it is a folder"
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        reason = reason or "permission denied"
    if reason:
        raise ConfigError(f"{flag} is {str(file)!r}, which cannot be written: {reason}")


def result_file(param: typer.CallbackParam, value: Path | None) -> Path | None:
    """The callback of an option that names a file for results: `check_result`."""
    if value is not None:
        check_result(value, flag=param.opts[0])
    return value


def plot_file(param: typer.CallbackParam, value: Path | None) -> Path | None:
    """The same for a picture; refused where there is no matplotlib, too."""
    if value is None:
        return None
    if value.suffix.lower() not in _PICTURES:
        raise ConfigError(
            f"{param.opts[0]} is {str(value)!r}; allowed: names with {', '.join(_PICTURES)}"
        )
    if find_spec("matplotlib") is None:
        raise ConfigError(
            f"{param.opts[0]} needs matplotlib, which is not installed",
            hint="pip install 'negamax[plot]'",
        )
    return result_file(param, value)


def picture(help: str) -> Any:
    """The option `--plot`."""
    return typer.Option(
        "--plot", help=help, rich_help_panel=OUTPUT, show_default=False, callback=plot_file
    )


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help="Write the raw results to this file.",
        rich_help_panel=OUTPUT,
        show_default=False,
        callback=result_file,
    ),
]


def parse_counts(text: str, *, flag: str) -> tuple[int, ...]:
    """'1,4,16' as numbers, each once, in the given order. Errors: `ConfigError` naming `flag`."""
    return tuple(dict.fromkeys(parse_numbers(text, flag=flag)))


def parse_numbers(text: str, *, flag: str) -> tuple[int, ...]:
    """'8,8,32' as numbers, in the given order. Errors: `ConfigError` naming `flag`."""
    words = [word.strip() for word in text.split(",")]
    if not all(
        word.isascii() and word.isdigit() and 0 < int(word[:9]) <= MAX_COUNT and len(word) < 9
        for word in words
    ):
        raise ConfigError(
            f"{flag} is {text[:60]!r}; allowed: numbers from 1 to {MAX_COUNT}, separated by commas"
        )
    return tuple(int(word) for word in words)
