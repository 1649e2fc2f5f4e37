"""Sort the words of a command line into options, values and arguments."""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from negamax.base.errors import ConfigError, check_choice
from negamax.options.flags import Flag, Kind
from negamax.options.foreign import Foreign

_TRUTHS = {"true": True, "false": False}
_SECRETS = ("-key", "-token", "-password")  # endings of the names of options with secret values
_SECRET_FLAGS = ("--api-key", "--admin-api-key")
_SHORTEST = 5  # An abbreviated option must have more characters than this, including dashes.
_SIMILARITY = 0.8  # Least similarity of a suggested name to the given name.


@dataclass(frozen=True)
class Option:
    """An option of Negamax. The flags `names` turn a switch on, and `opposites` turn it off."""

    name: str  # Name of the command's parameter.
    key: str  # Name of the option in files and environment variables.
    flag: str  # The option's flag in typer.
    kind: Kind
    names: tuple[str, ...]
    opposites: tuple[str, ...]
    turns_off: bool
    adds_up: bool
    is_secret: bool
    takes_many: bool  # whether several values may follow one flag

    @classmethod
    def of(cls, parameter: Any, flag: Flag | None) -> "Option":
        """Build an option from typer's parameter, and from the `Flag` of its field if any."""
        has_field = flag is not None
        flag = flag or Flag(field=parameter.name)
        listed = next((name for name in parameter.opts if name.startswith("--")), parameter.opts[0])
        key = listed.removeprefix("--")
        if flag.turns_off:
            key = key.removeprefix("no-") if key.startswith("no-") else flag.field
        names = (*parameter.opts, *flag.also)
        kind = Kind.SWITCH if parameter.is_flag else Kind.LIST if parameter.multiple else Kind.VALUE
        if kind is Kind.VALUE and parameter.metavar == "JSON":
            kind = Kind.JSON
        opposites: tuple[str, ...] = ()
        if kind is Kind.SWITCH:
            opposites = tuple(_opposite(name) for name in names if name.startswith("--"))
            opposites += (_name_of(key),) if flag.turns_off else ()
        is_secret, takes_many = listed in _SECRET_FLAGS, kind is Kind.LIST and has_field
        rules = (flag.turns_off, flag.adds_up, is_secret, takes_many)
        key = key.replace("-", "_")
        return cls(parameter.name, key, listed, kind, names, opposites, *rules)

    @property
    def variable(self) -> str:
        return f"NEGAMAX_{self.key.upper()}"


@dataclass(frozen=True)
class Given:
    """An option that some source sets, for example a command line. `is_set` is a switch's value."""

    name: str
    values: tuple[str, ...]
    source: str
    is_set: bool = True

    @property
    def shown(self) -> str:
        """Return the option and its value for messages, without the value of a secret."""
        if not self.values or self.name.endswith(_SECRETS):
            return self.source
        return f"{self.source} is {' '.join(self.values)[:60]!r}"

    def parsed(self, kind: Kind) -> Any:
        """Return the value as a boolean, list, string or JSON value. Raises `ConfigError`."""
        if kind is Kind.SWITCH:
            return self.is_set
        if kind is Kind.LIST:
            return list(self.values)
        text = self.values[-1] if self.values else ""
        if kind is Kind.VALUE or text.lower() in ("", "none", "auto"):
            return text
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            hint = 'quote the value: \'{"key": "value"}\''
            raise ConfigError(f"{self.source} is not JSON: {error}", hint=hint) from None


def merged(first: Given, second: Given, kind: Kind) -> Given:
    """Merge two items of one option: join lists, merge JSON objects, or return `second`."""
    if kind is Kind.LIST:
        return replace(second, values=(*first.values, *second.values))
    if kind is not Kind.JSON:
        return second
    return replace(second, values=(json.dumps(_deep(first.parsed(kind), second.parsed(kind))),))


HELP = Option("help", "help", "--help", Kind.SWITCH, ("--help", "-h"), (), *[False] * 4)


def nearest(word: str, known: Sequence[str]) -> str | None:
    """Return 'did you mean X?' for the most similar name, or None."""
    names = {name.lstrip("-"): name for name in known}
    matches = difflib.get_close_matches(word.lstrip("-"), names, n=1, cutoff=_SIMILARITY)
    return f"did you mean {names[matches[0]]}?" if matches else None


class OptionNames:
    """All option names that a command accepts, including other servers' names for options."""

    def __init__(self, options: Sequence[Option], foreign: Mapping[str, Foreign]) -> None:
        self.options = options
        self.own = {name: option for option in options for name in option.names}
        for option in options:
            for name in option.opposites:
                self.own.setdefault(name, option)
        self.foreign = foreign

    def parameter(self, name: str) -> str:
        """Return the command's parameter that `name` sets, or a foreign option's `name`."""
        return self.own[name].name if name in self.own else name

    def kind(self, name: str) -> Kind:
        """Return the kind of values that option `name` has."""
        return self.own[name].kind if name in self.own else self.foreign[name].kind

    def key_of(self, name: str) -> str | None:
        return self.own[name].key if name in self.own else None

    def find_key(self, key: str) -> str | None:
        """Return the name of the option that `key` of a file sets, or None."""
        name = _name_of(key)
        return name if name in self.own or name in self.foreign else None

    def suggestions(self) -> list[str]:
        """Return the option names to suggest, without opposites of switches and refused options."""
        ours = [name for name, option in self.own.items() if name in option.names]
        ignored = [name for name, entry in self.foreign.items() if entry.remedy is None]
        return [name for name in (*ours, *ignored) if name.startswith("--") and not name.isupper()]


@dataclass(frozen=True)
class Line:
    """The words after a command, as arguments and options."""

    positional: tuple[str, ...]
    given: tuple[Given, ...]
    after_dashes: tuple[str, ...]  # `--` and the words after it


def is_model_option(option: "Option") -> bool:
    """Return whether the option is --model."""
    return option.name == "model_option"


def split(words: Sequence[str], names: OptionNames) -> Line:
    """Sort the words of a command line. Raises `ConfigError` for an unknown name."""
    reader = _Reader(list(words), names)
    while reader.words:
        reader.read()
    return Line(tuple(reader.positional), tuple(reader.given), tuple(reader.after_dashes))


def take_model(line: Line, names: OptionNames) -> Line:
    """Use the last value of the last option with several values as MODEL, which is missing."""
    for place in reversed(range(len(line.given))):
        item = line.given[place]
        takes_many = item.name in names.own and names.own[item.name].takes_many
        if takes_many and len(item.values) > 1:
            given = list(line.given)
            given[place] = replace(item, values=item.values[:-1])
            return replace(line, positional=(item.values[-1],), given=tuple(given))
    return line


class _Reader:
    """Removes options and arguments from the front of `words`. Only `split` uses this class."""

    def __init__(self, words: list[str], names: OptionNames) -> None:
        self.words = words
        self.names = names
        self.positional: list[str] = []
        self.given: list[Given] = []
        self.after_dashes: list[str] = []

    def read(self) -> None:
        """Read and remove one option with its values, or one positional word."""
        word = self.words.pop(0)
        if word == "--":
            self.after_dashes = ["--", *self.words]
            self.words = []
        elif not word.startswith("-") or word == "-":
            self.positional.append(word)
        else:
            self.given.append(self._option(word))

    def _option(self, word: str) -> Given:
        written, equals, value = word.partition("=")
        written, dot, path = written.partition(".")
        name, is_set = self._name(written), True
        attached = [value] if equals else []
        short = None if word.startswith("--") else self._name(word[:2])
        if name is None and short is not None:  # a value is attached to the flag: -n2, -O3
            name, written, attached, dot = short, word[:2], [word[2:]], ""
        opposite = self._name(_opposite(written)) if written.startswith("--") else None
        if name is None and opposite in self.names.foreign:
            name, is_set = opposite, False
        name = name or self._find_beginning(written)
        kind = self.names.kind(name)
        if dot and kind is Kind.JSON:
            text = (attached or self._values(Kind.VALUE, own=False) or ["true"])[0]
            return Given(name, (json.dumps(_nested(path.split("."), text)),), written)
        if kind is Kind.SWITCH:
            is_foreign = name in self.names.foreign
            if is_foreign and not attached and self.words and self.words[0].lower() in _TRUTHS:
                attached = [self.words.pop(0)]
            said = (attached or ["true"])[0].lower()
            check_choice(written, said, _TRUTHS)
            return Given(name, (), written, is_set=is_set == _TRUTHS[said])
        is_own = name in self.names.own
        values = attached or self._values(kind, own=is_own, name=name)
        if is_own and not values:
            raise ConfigError(f"{written} needs a value", hint="see --help")
        return Given(name, tuple(values), written)

    def _name(self, written: str) -> str | None:
        name = "--" + written[2:].replace("_", "-") if written.startswith("--") else written
        return name if name in self.names.own or name in self.names.foreign else None

    def _values(self, kind: Kind, *, own: bool, name: str = "") -> list[str]:
        """Remove an option's values from `words`. Only Negamax's options accept a value like -1."""
        many = kind is Kind.LIST and (not own or self.names.own[name].takes_many)
        values = [self.words.pop(0)] if self.words and (own or _is_value(self.words[0])) else []
        while many and self.words and _is_value(self.words[0]):
            values.append(self.words.pop(0))
        return values

    def _find_beginning(self, written: str) -> str:
        """Return the option whose name begins with `written`, as argparse does.

        Raises `ConfigError` for an unknown name, and for an abbreviation of several options.
        """
        start, own = written.replace("_", "-"), self.names.own
        found = {
            self.names.parameter(name): name
            for name in (*self.names.foreign, *own)
            if len(start) > _SHORTEST and name.startswith(start)
        }
        if len(found) == 1:
            return next(iter(found.values()))
        near = nearest(start, self.names.suggestions())
        if found and not near:
            near = f"it abbreviates {', '.join(list(found.values())[:5])}"
        raise ConfigError(f"no such option: {written}", hint=near or "see --help")


def _is_value(word: str) -> bool:
    return not word.startswith("-") or word[1:2].isdigit() or word == "-"


def _opposite(name: str) -> str:
    name = name.replace("_", "-").removeprefix("--")
    return f"--{name.removeprefix('no-')}" if name.startswith("no-") else f"--no-{name}"


def _name_of(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _nested(path: Sequence[str], text: str) -> dict[str, Any]:
    """Return {'a': {'b': value}} for the path a.b."""
    try:
        value: Any = json.loads(text)
    except ValueError:
        value = text
    for key in reversed(path):
        value = {key: value}
    return value  # type: ignore[no-any-return]


def _deep(first: Any, second: Any) -> Any:
    if not isinstance(first, dict) or not isinstance(second, dict):
        return second
    return first | {key: _deep(first.get(key), value) for key, value in second.items()}
