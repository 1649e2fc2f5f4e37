"""Metadata that turns dataclass fields into options of a command.

An option is one dataclass field, such as `max_num_seqs: int | None = optional("Limit the sequences
in one step.")`. The field determines flag, environment variable, TOML key and help.
"""

import difflib
import math
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast

from negamax.base.errors import ConfigError, check_choice

T = TypeVar("T")


class Kind(Enum):
    """The kinds of values that follow the name of an option on the command line."""

    SWITCH = "nothing"
    VALUE = "one value"
    LIST = "one value or more"
    JSON = "one value, which is JSON"


@dataclass(frozen=True)
class Flag:
    """The metadata that turns a dataclass field into an option of a command."""

    help: str = ""
    names: tuple[str, ...] = ()  # The option's own flags, which the help lists.
    also: tuple[str, ...] = ()  # Names of the same option in vLLM and SGLang.
    choices: tuple[str, ...] = ()  # Allowed values; an empty tuple allows any value.
    least: float | None = None
    most: float | None = None
    above: float | None = None
    panel: str = ""  # Section of the help; "" stands for the section of the previous field.
    is_seconds: bool = False  # The value is a finite number of seconds.
    is_size: bool = False  # The value is a number of bytes that may have a unit, such as 4GiB.
    is_count: bool = False  # The value is a number that may have a unit, such as 32K.
    is_json: bool = False  # The value is a JSON object.
    adds_up: bool = False  # Values of config file, environment and command line form one list.
    takes_json_list: bool = False  # A value may be a JSON list of strings.
    turns_off: bool = False  # The option is a switch that sets the field to False.
    field: str = ""

    @property
    def listed_help(self) -> str:
        """Return the help text with the allowed values and the option's other names."""
        values = f" ({', '.join(self.choices)})" if self.choices else ""
        also = f" [also: {', '.join(self.also)}]" if self.also else ""
        return f"{self.help}{values}{also}"

    @property
    def has_limits(self) -> bool:
        return (self.least, self.most, self.above) != (None, None, None)

    @property
    def limits(self) -> str:
        """Return the range of allowed numbers, as text for error messages."""
        if self.least is not None and self.most is not None:
            return f"{self.least} to {self.most}"
        if self.least is not None:
            return f"{self.least} {'seconds ' if self.is_seconds else ''}or more"
        most = "" if self.most is None else f", at most {self.most}"
        return f"{'seconds ' if self.is_seconds else ''}above {self.above}{most}"

    def allows(self, number: float) -> bool:
        """Return whether `number` is within this option's limits. Return False for NaN."""
        least = -math.inf if self.least is None else self.least
        most = math.inf if self.most is None else self.most
        is_above = self.above is None or number > self.above
        return least <= number <= most and is_above and not (self.is_seconds and number == math.inf)


def option(default: T, help: str, *names: str, also: str = "", **rules: Any) -> T:
    """Declare a dataclass field that is an option.

    `names` replaces the flag derived from the field's name; a single short name, such as `-tp`, is
    added to the derived flag. `also` lists the option's names in other servers. A field that is
    True by default becomes a switch that sets the field to False. `rules` are further fields of
    `Flag`. Without other rules, counts are at least 1, and seconds are above 0.
    """
    if rules.get("is_count"):
        rules.setdefault("least", 1)
    if rules.get("is_seconds") and "least" not in rules:
        rules["above"] = 0
    flag = Flag(help, names, tuple(also.split()), turns_off=default is True, **rules)
    if isinstance(default, dict):
        return cast(T, field(default_factory=default.copy, metadata={"flag": flag}))
    return field(default=default, metadata={"flag": flag})


def optional(help: str, *names: str, also: str = "", **rules: Any) -> Any:
    """Declare a dataclass field that is an option whose default is None."""
    return option(None, help, *names, also=also, **rules)


@cache
def flags_of(options: type[Any]) -> tuple[Flag, ...]:
    """Return the `Flag`s of a dataclass of options, in the order of its fields."""
    found, panel = [], ""
    for one in fields(options):
        flag: Flag | None = one.metadata.get("flag")
        if flag is None:
            continue
        panel = flag.panel or panel
        own = f"--{'no-' if flag.turns_off else ''}{one.name.replace('_', '-')}"
        is_named = any(name.startswith("--") for name in flag.names)
        names = flag.names if is_named else (own, *flag.names)
        found.append(replace(flag, names=names, field=one.name, panel=panel))
    return tuple(found)


def flag_name(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def check_options(options: Any) -> None:
    """Check every option field against its choices and limits. Raises `ConfigError`."""
    kind: type = type(options)
    for flag in flags_of(kind):
        name, value = flag_name(flag.field), getattr(options, flag.field)
        if flag.choices:
            check_choice(name, value, flag.choices)
        if value is None:
            continue
        if flag.is_json and not isinstance(value, dict):
            raise ConfigError(f"{name} is {value!r}; allowed: a JSON object, {{key: value}}")
        if flag.has_limits and not flag.allows(value):
            shown = f"{value:g}" if isinstance(value, float) else value
            raise ConfigError(f"{name} is {shown}; allowed: {flag.limits}")


def check_keys(
    flag: str, given: Collection[str], known: Collection[str], *, also: Collection[str]
) -> None:
    """Raise `ConfigError` for a key of `given` that is neither in `known` nor in `also`."""
    for key in given:
        if key not in known and key not in also:
            near = difflib.get_close_matches(key, sorted(known), n=1)
            raise ConfigError(
                f"{flag} has the unknown key {key[:60]!r}; known: {', '.join(sorted(known))}",
                hint=f"did you mean {near[0]}?" if near else f"leave {key[:60]} out",
            )
