"""`--config` and `--explain` of commands that run a model: where options are, and came from."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from negamax.cli.flags import parameter
from negamax.cli.resolve import Resolved, options_of
from negamax.cli.words import is_model_option

_CONFIG = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="TOML file with options by name; flags and NEGAMAX_... variables come before it.",
        show_default=False,
    ),
]
_EXPLAIN = Annotated[
    bool,
    typer.Option(
        "--explain",
        help="Check the command line, show each option and where it came from, and end.",
    ),
]


def with_explanation(
    check: Callable[..., None] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command, innermost, so that its options are checked when they are explained.
    `check` gets what the command gets, and refuses what would be refused at start."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        added = [
            parameter("config", None, _CONFIG),
            parameter("explain", False, _EXPLAIN),
            parameter("typer_context", inspect.Parameter.empty, typer.Context),
        ]

        @functools.wraps(command)
        def wrapper(
            *, config: str | None, explain: bool, typer_context: typer.Context, **values: Any
        ) -> None:
            if not explain:
                return command(**values)
            if check is not None:
                check(**values)
            print("\n".join(_table(typer_context)))

        wrapper.__signature__ = own.replace(parameters=[*own.parameters.values(), *added])  # type: ignore[attr-defined]
        return wrapper

    return decorate


def _table(context: typer.Context) -> Iterator[str]:
    """A line for each option: its name, its value, where it came from."""
    resolved: Resolved = context.obj
    rows = []
    for option in options_of(context.command):  # type: ignore[arg-type]
        if option.key in ("help", "config", "explain"):
            continue
        choice = resolved.choices.get(option.name)
        value = context.params[option.name]
        source = "default" if choice is None else choice.source
        if is_model_option(option) and choice is None:
            value, source = context.params["model"], "MODEL"
        if option.is_secret and value:
            value = "(not shown)"
        rows.append((option.key.replace("_", "-"), _shown(value, option.turns_off), source))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, source in rows:
        yield f"{name:{widths[0]}}  {value:{widths[1]}}  {source}"


def _shown(value: Any, turns_off: bool) -> str:
    if value is None or value == ():
        return "-"
    if isinstance(value, bool):
        return "on" if value != turns_off else "off"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
