"""What the benchmark commands read from the command line in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from negamax.base.errors import ConfigError

WORKLOAD, OUTPUT = "Workload", "Output"
MAX_COUNT = 1_000_000

JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help="Write the raw results to this file.",
        rich_help_panel=OUTPUT,
        show_default=False,
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
