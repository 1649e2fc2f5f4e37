"""Options and values that several benchmark commands share."""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from negamax.base.errors import ConfigError
from negamax.bench.serve_options import OUTPUT
from negamax.cli.options import setting

MAX_COUNT = 1_000_000
_PICTURES = (".png", ".svg", ".pdf")


def check_result(file: Path, *, flag: str) -> None:
    """Create the result folder of `file`. Raises `ConfigError` if `file` cannot be written."""
    reason = ""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        reason = f"{file.parent} is not a folder"
    except OSError as error:
        reason = str(error.strerror)
    if file.is_dir():
        reason = "it is a folder"
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        reason = reason or "permission denied"
    if reason:
        raise ConfigError(f"{flag} is {str(file)!r}, which cannot be written: {reason}")


def _check_file(param: typer.CallbackParam, value: Path | None) -> Path | None:
    if value is not None:
        check_result(value, flag=param.opts[0])
    return value


def _check_picture(param: typer.CallbackParam, value: Path | None) -> Path | None:
    if value is None:
        return None
    if value.suffix.lower() not in _PICTURES:
        raise ConfigError(
            f"{param.opts[0]} is {str(value)!r}; allowed: names that end in {', '.join(_PICTURES)}"
        )
    if find_spec("matplotlib") is None:
        hint = "pip install 'negamax[plot]'"
        raise ConfigError(f"{param.opts[0]} needs matplotlib, which is not installed", hint=hint)
    return _check_file(param, value)


def picture(help: str) -> Any:
    """Declare the option --plot."""
    help = f"{help} This option needs `pip install 'negamax[plot]'`."
    return setting(None, help, "--plot", panel=OUTPUT, callback=_check_picture)


def json_option() -> Any:
    help = "Write the raw results to this JSON file."
    return setting(None, help, "--json", panel=OUTPUT, callback=_check_file)


def write_json(file: Path | None, document: object) -> None:
    """Write `document` as indented JSON to the file of --json, if the option is given."""
    if file is not None:
        text = json.dumps(document, indent=2, ensure_ascii=False, default=str)
        file.write_text(text + "\n", encoding="utf-8")


def parse_counts(text: str, *, flag: str) -> tuple[int, ...]:
    """Read text such as '1,4,16' as distinct numbers. Raises a `ConfigError` that names `flag`."""
    return tuple(dict.fromkeys(parse_numbers(text, flag=flag)))


def parse_numbers(text: str, *, flag: str) -> tuple[int, ...]:
    """Read text such as '8,8,32' as a list of numbers. Raises a `ConfigError` that names `flag`."""
    words = [word.strip() for word in text.split(",")]
    if not all(
        word.isascii() and word.isdigit() and 0 < int(word[:9]) <= MAX_COUNT and len(word) < 9
        for word in words
    ):
        raise ConfigError(
            f"{flag} is {text[:60]!r}; allowed: numbers from 1 to {MAX_COUNT}, separated by commas"
        )
    return tuple(int(word) for word in words)
