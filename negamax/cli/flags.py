"""A dataclass's fields as flags of a command: a table per dataclass, for typer, `resolve`, docs."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, get_type_hints

import typer

from negamax.base.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {unit + "i": 2 ** (10 * power) for power, unit in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([kmgt]?i?)b?", re.IGNORECASE)
_COUNT = re.compile(r"(-?\d{1,15}(?:\.\d{1,15})?)\s*([kKmMgG]?)")
AUTO = "auto"


class Kind(Enum):
    """What follows a name on the command line."""

    SWITCH = "nothing"
    VALUE = "one value"
    LIST = "one value or more"
    JSON = "one value, which is JSON"


@dataclass(frozen=True)
class Flag:
    """One field of an options class as a flag."""

    field: str
    panel: str
    help: str
    flags: tuple[str, ...] = ()  # default: the field's name
    also: tuple[str, ...] = ()  # other servers' names for it
    choices: tuple[str, ...] = ()  # the only values
    turns_off: bool = False  # a switch that sets the field to False
    is_size: bool = False  # bytes, with units
    is_count: bool = False  # a number, with units
    is_json: bool = False  # an object
    adds_up: bool = False  # a list to which flags, environment and file contribute

    @property
    def names(self) -> tuple[str, ...]:
        """The flags that are listed."""
        return self.flags or (f"--{self.field.replace('_', '-')}",)

    @property
    def listed_help(self) -> str:
        """The help with the values that it may have, and the other names."""
        values = f" ({', '.join(self.choices)})" if self.choices else ""
        also = f" [also: {', '.join(self.also)}]" if self.also else ""
        return f"{self.help}{values}{also}"


def parse_bytes(text: str | int) -> int | None:
    """'1500000', '4GiB', '4g', '512M' as bytes; 'auto' is None; a default comes as a number."""
    if isinstance(text, int):
        return text
    if text == AUTO:
        return None
    match = _SIZE.fullmatch(text.strip())
    units = _UNITS | _BINARY_UNITS
    if match is None or match[2].lower() not in units:
        allowed = "bytes, or a number with K, M, G or Ki, Mi, Gi"
        raise typer.BadParameter(f"{text[:60]!r} is not a size; allowed: {allowed}")
    return int(float(match[1]) * units[match[2].lower()])


def parse_count(text: str | int) -> int | None:
    """'131072', '128k' (thousands), '128K' (of 1024), read as vLLM does; 'auto' is None."""
    if isinstance(text, int):
        return text
    if text == AUTO:
        return None
    match = _COUNT.fullmatch(text.strip())
    value = 0.5  # of what is no number
    if match is not None:
        unit = match[2].lower() + "i" * match[2].isupper()
        value = float(match[1]) * (_UNITS | _BINARY_UNITS)[unit]
    if not value.is_integer():
        raise typer.BadParameter(
            f"{text[:60]!r} is not a number; allowed: such as 131072, 128k (thousands), 128K (of "
            f"1024), auto"
        )
    return int(value)


def parameter(name: str, default: object, annotation: object) -> inspect.Parameter:
    """One option of a command, as typer reads it."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def flag_parameters(
    options: type, table: Sequence[Flag], *, defaults: dict[str, Any]
) -> list[inspect.Parameter]:
    """The parameters that typer reads for `table`, fields of the dataclass `options`. `defaults`
    replaces those of the class."""
    types = get_type_hints(options)
    fields = {field.name: field.default for field in dataclasses.fields(options)} | defaults
    parameters = []
    for flag in table:
        kind, default = types[flag.field], False if flag.turns_off else fields[flag.field]
        if kind == tuple[str, ...]:
            kind, default = list[str] | None, None
        if flag.is_json:
            kind = str | None
        option = typer.Option(
            *flag.names,
            help=flag.listed_help,
            rich_help_panel=flag.panel,
            show_default=not flag.turns_off and default is not None,
            parser=_parser(flag),
            metavar=_metavar(flag),
            autocompletion=completion(flag.choices) if flag.choices else None,
        )
        parameters.append(parameter(flag.field, default, Annotated[kind, option]))
    return parameters


def chosen_fields(table: Sequence[Flag], values: dict[str, Any]) -> dict[str, Any]:
    """The fields of `table`, from the parameters. Errors: `ConfigError` for a value that is not
    among a flag's choices."""
    chosen = {}
    for flag in table:
        value = values[flag.field]
        if flag.choices and value not in flag.choices:
            raise ConfigError(f"{flag.names[0]} is {value!r}; allowed: {', '.join(flag.choices)}")
        if flag.is_json:
            value = json_object(flag.names[0], value) if value else None
        chosen[flag.field] = not value if flag.turns_off else value
    return chosen


def _parser(flag: Flag) -> Callable[[str], int | None] | None:
    if flag.is_size:
        return parse_bytes
    return parse_count if flag.is_count else None


def _metavar(flag: Flag) -> str | None:
    if flag.is_size:
        return "SIZE"
    if flag.is_json:
        return "JSON"
    return "NUMBER" if flag.is_count else None


def json_object(flag: str, text: str | None) -> dict[str, Any]:
    """The object in the value of a flag, empty without one. Errors: `ConfigError`."""
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"{flag} is no JSON: {error}") from None
    if not isinstance(found, dict):
        kind = "null" if found is None else type(found).__name__
        raise ConfigError(f"{flag} is a JSON {kind}; an object is needed")
    return found


def completion(choices: Iterable[str]) -> Callable[[str], list[str]]:
    """What a shell offers for the value of an option that has only these."""
    return lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]
