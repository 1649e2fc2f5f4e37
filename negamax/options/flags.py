"""Flag metadata of option fields.

An option is one dataclass field, such as `max_num_seqs: int | None = option(None, "Limit the
sequences in one step.")`. Its flag, environment variable, TOML key and help follow from it.
"""

import difflib
import math
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast

from negamax.base.errors import ConfigError

T = TypeVar("T")


class Kind(Enum):
    """Values that follow a name on the command line."""

    SWITCH = "nothing"
    VALUE = "one value"
    LIST = "one value or more"
    JSON = "one value, which is JSON"


@dataclass(frozen=True)
class Flag:
    """A field as an option of a command."""

    help: str = ""
    names: tuple[str, ...] = ()  # listed in the help
    also: tuple[str, ...] = ()  # names that vLLM and SGLang use
    choices: tuple[str, ...] = ()  # the only values
    least: float | None = None
    most: float | None = None
    above: float | None = None
    panel: str = ""  # of the help; "": that of the field before
    is_seconds: bool = False  # finite
    is_size: bool = False  # bytes, with units
    is_count: bool = False  # a number, with units
    is_json: bool = False  # an object
    adds_up: bool = False  # a list to which flags, environment and file contribute
    takes_json_list: bool = False  # a value may be a JSON list of texts
    turns_off: bool = False  # a switch that sets the field to False
    field: str = ""

    @property
    def listed_help(self) -> str:
        """The help with the allowed values and the other names."""
        values = f" ({', '.join(self.choices)})" if self.choices else ""
        also = f" [also: {', '.join(self.also)}]" if self.also else ""
        return f"{self.help}{values}{also}"

    @property
    def limits(self) -> str:
        """The allowed numbers, for messages."""
        if self.least is not None and self.most is not None:
            return f"{self.least} to {self.most}"
        if self.least is not None:
            return f"{self.least} {'seconds ' if self.is_seconds else ''}or more"
        most = "" if self.most is None else f", at most {self.most}"
        return f"{'seconds ' if self.is_seconds else ''}above {self.above}{most}"

    def allows(self, number: float) -> bool:
        """Check a number against the limits. NaN is never allowed."""
        least = -math.inf if self.least is None else self.least
        most = math.inf if self.most is None else self.most
        is_above = self.above is None or number > self.above
        return least <= number <= most and is_above and not (self.is_seconds and number == math.inf)


def option(default: T, help: str, *names: str, also: str = "", **rules: Any) -> T:
    """Declare a dataclass field that is an option.

    `names` replaces the name that follows from the field's; a single short one, such as `-tp`, is
    added to it. `also` lists other servers' names. A field that is True by default becomes a switch
    that turns it off. `rules` are fields of `Flag`.
    """
    flag = Flag(help, names, tuple(also.split()), turns_off=default is True, **rules)
    if isinstance(default, dict):
        return cast(T, field(default_factory=default.copy, metadata={"flag": flag}))
    return field(default=default, metadata={"flag": flag})


@cache
def flags_of(options: type[Any]) -> tuple[Flag, ...]:
    """Return the flags of a dataclass of options, in the order of its fields."""
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
    """Check every field against its choices and limits. Errors: `ConfigError`."""
    kind: type = type(options)
    for flag in flags_of(kind):
        name, value = flag_name(flag.field), getattr(options, flag.field)
        if flag.choices and value not in flag.choices:
            raise ConfigError(f"{name} is {value!r:.62}; allowed: {', '.join(flag.choices)}")
        if value is None:
            continue
        if flag.is_json and not isinstance(value, dict):
            raise ConfigError(f"{name} is {value!r}; allowed: an object, {{key: value}}")
        has_limits = (flag.least, flag.most, flag.above) != (None, None, None)
        if has_limits and not flag.allows(value):
            shown = f"{value:g}" if isinstance(value, float) else value
            raise ConfigError(f"{name} is {shown}; allowed: {flag.limits}")


def check_keys(
    flag: str, given: Collection[str], known: Collection[str], *, also: Collection[str]
) -> None:
    """Refuse keys of an object that are neither `known` nor `also` accepted: `ConfigError`."""
    for key in given:
        if key not in known and key not in also:
            near = difflib.get_close_matches(key, sorted(known), n=1)
            raise ConfigError(
                f"{flag} has the unknown key {key[:60]!r}; known: {', '.join(sorted(known))}",
                hint=f"did you mean {near[0]}?" if near else f"leave {key[:60]} out",
            )
