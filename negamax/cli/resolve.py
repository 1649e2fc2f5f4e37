"""Find the value of each option in the command line, the environment, a file and a launcher.

An option's value comes from the first of these sources that sets the option: its flag,
`NEGAMAX_<OPTION>`, the file of `--config`, a launcher (`launchers`), its default. `Resolved`
contains the completed command line, with one name per option, and the source of each value.
"""

import itertools
import json
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup

from negamax.base import env
from negamax.base.errors import ConfigError
from negamax.cli.launchers import launched
from negamax.cli.words import (
    HELP,
    Given,
    Option,
    OptionNames,
    is_model_option,
    merged,
    nearest,
    split,
    take_model,
)
from negamax.options.flags import Flag, Kind
from negamax.options.foreign import SERVER, explain_replacement, foreign_options, own_value
from negamax.options.nodes import KEY_VARIABLE

PREFIX = "NEGAMAX_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_BOOLEANS = dict.fromkeys(_TRUE, True) | dict.fromkeys(_FALSE, False)
_MODEL_NAMES = ("--model", "--model-path")
_ONLY_FLAGS = frozenset({"help", "explain", "version", "config"})
_OTHER_SERVERS = ("VLLM_", "SGLANG_", "SGL_", "ATOM_", "AITER_", "HCCL_", "LMCACHE_")
# Environment variables of other servers that Negamax reads, although they set no option.
_READ_LATER = (
    "VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE", "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR",
)  # fmt: skip
# `_SERVICE_LINK`: variables that Kubernetes sets for a service, such as a service named `vllm`.
_SERVICE_LINK = re.compile(r"\w+_SERVICE_(HOST|PORT)\w*|\w+_PORT_\d+_(TCP|UDP|SCTP)\w*")


@dataclass(frozen=True)
class OptionValue:
    """An option as command-line words. `source` is a flag, a variable or a key of a file."""

    words: tuple[str, ...]
    source: str


@dataclass
class Resolved:
    """A command line, completed with option values from all sources."""

    words: list[str]
    choices: dict[str, OptionValue] = field(default_factory=dict)  # parameter name -> value
    notes: list[str] = field(default_factory=list)  # log lines about options without effect


def resolve(root: TyperGroup, words: Sequence[str]) -> Resolved:
    """Complete the command line. Raises `ConfigError` for a wrong name, option or file."""
    command, path, rest = find_command(root, words)
    if isinstance(command, TyperGroup):
        return Resolved(list(words))
    options = options_of(command)
    table: str | None = getattr(command.callback, "foreign_table", None)
    names = OptionNames([*options, HELP], {} if table is None else foreign_options(table))
    line = split(rest, names)
    if any(given.name in HELP.names for given in line.given):
        return Resolved([*path, "--help"])
    takes_model = any(is_model_option(option) for option in options)
    levels = [_of_file(line.given, names), _of_environment(options, names), list(line.given)]
    levels.insert(0, launched(levels) if path == ["serve"] else [])
    named = [item for level in levels for item in level if item.name in _MODEL_NAMES]
    if takes_model and not line.positional and not named:
        line = take_model(line, names)
        levels[-1] = list(line.given)
    model = line.positional[0] if takes_model and line.positional else None
    if model is not None:  # MODEL overrides --model in the file and the environment
        for level in levels[:-1]:
            level[:] = [item for item in level if item.name not in _MODEL_NAMES]
    resolved = Resolved([])
    levels = _translated(levels, names, model, resolved.notes)
    resolved.choices = _choose(levels, names)
    resolved.notes += _replaced_values(levels, names)
    resolved.notes += _misspelled_variables(options)
    resolved.notes += _unknown_variables(names) if table == SERVER else []
    chosen = [word for choice in resolved.choices.values() for word in choice.words]
    resolved.words = [*path, *chosen, *line.positional, *line.after_dashes]
    return resolved


def find_command(
    root: TyperGroup, words: Sequence[str]
) -> tuple[TyperCommand | TyperGroup, list[str], list[str]]:
    """Return the innermost command in `words`, the words up to its name, and the later words."""
    command: Any = root
    for place, word in enumerate(words):
        if not isinstance(command, TyperGroup):
            return command, list(words[:place]), list(words[place:])
        if word in command.commands:
            command = command.commands[word]
        elif not word.startswith("-"):
            break
    return command, list(words), []


def options_of(command: TyperCommand) -> list[Option]:
    """Return the options of a command, from its parameters and flags."""
    table: Sequence[Flag] = getattr(command.callback, "flags", ())
    flags: dict[str | None, Flag] = {flag.field: flag for flag in table}
    parameters = [one for one in command.params if one.param_type_name == "option"]
    return [Option.of(parameter, flags.get(parameter.name)) for parameter in parameters]


# Sources of option values


def _of_file(given: Sequence[Given], names: OptionNames) -> list[Given]:
    """Read the options in the file of --config. Raises `ConfigError` for a wrong file or key."""
    if "--config" not in names.own:
        return []
    named = [item.values[0] for item in given if item.name == "--config"]
    path = named[-1] if named else env.get(PREFIX + "CONFIG")
    found = []
    for key, value in (_read_file(path) if path is not None else {}).items():
        name = names.find_key(key)
        if name is None or names.key_of(name) in _ONLY_FLAGS:
            known = [option.key for option in names.options if option.key not in _ONLY_FLAGS]
            near = nearest(key.replace("-", "_"), known)
            hint = near or "keys are the names of options, see --help"
            raise ConfigError(f"{path} has the unknown key {key!r}", hint=hint)
        found.append(_of_key(name, names.kind(name), value, source=f"{key} in {path}"))
    return found


def _read_file(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"--config is {path!r}, which cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        hint = "pass a TOML file"
        raise ConfigError(f"--config is {path!r}, which is not UTF-8", hint=hint) from None
    except tomllib.TOMLDecodeError as error:
        refusal = f"--config is {path!r}, which is not TOML: {error}"
        raise ConfigError(refusal, hint="write lines such as: max-num-seqs = 64") from None


def _of_key(name: str, kind: Kind, value: Any, *, source: str) -> Given:
    """Read a key of --config as an option. Raises `ConfigError` for a value of a wrong type."""
    if kind is Kind.SWITCH:
        if not isinstance(value, bool):
            raise ConfigError(f"{source} is {value!r}; allowed: true or false")
        return Given(name, (), source, is_set=value)
    values = value if kind is Kind.LIST and isinstance(value, list) else [value]
    if kind is Kind.JSON and not isinstance(value, str):
        values = [json.dumps(value)]
    if any(isinstance(one, bool | dict | list) for one in values):
        raise ConfigError(f"{source} is {value!r}; allowed: {kind.value}")
    return Given(name, tuple(map(str, values)), source)


def _of_environment(options: Sequence[Option], names: OptionNames) -> list[Given]:
    given = [(f"--{name}", text, name) for name, text in env.find_variables("").items()]
    found = [Given(name, (text,), source) for name, text, source in given if name in names.foreign]
    for option in options:
        text = None if option.key in _ONLY_FLAGS else env.get(option.variable)
        if text is None or _is_service_link(option.variable, text):
            continue
        values: tuple[str, ...] = (text,)
        is_set = True
        if option.kind is Kind.LIST:
            values = tuple(part.strip() for part in text.split(",") if part.strip())
        elif option.kind is Kind.SWITCH:
            if text.lower() not in _BOOLEANS:
                allowed = ", ".join(_BOOLEANS)
                raise ConfigError(f"{option.variable} is {text[:60]!r}; allowed: {allowed}")
            values, is_set = (), _BOOLEANS[text.lower()] != option.turns_off
        found.append(Given(option.flag, values, option.variable, is_set=is_set))
    return found


def _is_service_link(name: str, text: str) -> bool:
    """Return whether Kubernetes sets the variable for a service `negamax`, such as NEGAMAX_PORT."""
    return name.startswith(f"{PREFIX}SERVICE_") or text.startswith(("tcp://", "udp://", "sctp://"))


def _misspelled_variables(options: Sequence[Option]) -> list[str]:
    known = [option.variable for option in options]
    return [
        f"the environment variable {name} has no effect ({suggestion})"
        for name, text in env.find_variables(PREFIX).items()
        if name not in (*known, KEY_VARIABLE)
        and not _is_service_link(name, text)
        and (suggestion := nearest(name, known))
    ]


def _unknown_variables(names: OptionNames) -> list[str]:
    """Return a note about variables of other servers that foreign.toml does not list, if any."""
    unknown = [
        name
        for name, text in env.find_variables(*_OTHER_SERVERS).items()
        if f"--{name}" not in names.foreign and name not in _READ_LATER
        if not _SERVICE_LINK.fullmatch(name) and not _is_service_link(name, text)
    ]
    if not unknown:
        return []
    verb = "has" if len(unknown) == 1 else "have"
    return [f"{', '.join(unknown)} {verb} no effect: unknown to Negamax"]


# Other servers' options


def _translated(
    levels: Sequence[Sequence[Given]], names: OptionNames, model: str | None, notes: list[str]
) -> list[list[Given]]:
    """Replace other servers' options by Negamax options. Given Negamax options take precedence."""
    own = [[item for item in level if item.name in names.own] for level in levels]
    chosen = {name: choice.words for name, choice in _choose(own, names).items() if choice.words}
    line = {name: words[-1].partition("=")[2] for name, words in chosen.items()}
    line["model"] = model or line.get("model_option", "")
    foreign = [item for level in levels for item in level if item.name not in names.own]
    line |= {item.name.lstrip("-").replace("-", "_"): "".join(item.values) for item in foreign}
    without_effect: dict[str, list[str]] = {}
    refusals: list[str] = []
    for place, level in enumerate(levels):
        instead, over = [], []
        for item in _once_each((item for item in level if item.name not in names.own), names):
            entry = names.foreign[item.name]
            translation = entry.translate(item.parsed(entry.kind), line)
            if translation.refusal is not None:
                refusals.append(f"{item.shown}: {translation.refusal} ({translation.remedy})")
            if translation.note is not None:
                without_effect.setdefault(translation.note, []).append(item.source)
            for name, value in translation.instead:
                instead.append(Given(name, (value,) if value else (), item.source))
            over += [Given(name, (value,), item.source) for name, value in translation.over]
        own[place] = [*instead, *own[place], *over]
    if refusals:
        raise ConfigError("; ".join(refusals))
    for reason, flags in without_effect.items():
        once = list(dict.fromkeys(flags))
        notes.append(f"{', '.join(once)} {'has' if len(once) == 1 else 'have'} no effect: {reason}")
    return own


def _once_each(items: Iterable[Given], names: OptionNames) -> list[Given]:
    """Merge the given values of each option."""
    found: dict[str, Given] = {}
    for item in items:
        key = names.parameter(item.name)
        found[key] = merged(found[key], item, names.kind(item.name)) if key in found else item
    return list(found.values())


# Precedence


def _choose(levels: Sequence[Sequence[Given]], names: OptionNames) -> dict[str, OptionValue]:
    """Return each option's value in the last level that sets it; lists of all levels are joined."""
    chosen: dict[str, OptionValue] = {}
    for level in levels:
        for item in _once_each(level, names):
            option, words, source = names.own[item.name], _words(item, names), item.source
            if option.adds_up and (lower := chosen.get(option.name)) is not None:
                words, source = (*lower.words, *words), f"{lower.source}, {source}"
            chosen[option.name] = OptionValue(words, source)
    return chosen


def _replaced_values(levels: Sequence[Sequence[Given]], names: OptionNames) -> list[str]:
    notes = [
        f"{item.source} {reason}"
        for item in itertools.chain(*levels)
        for value in item.values
        if (reason := explain_replacement(names.own[item.name].name, value))
    ]
    return list(dict.fromkeys(notes))


def _words(item: Given, names: OptionNames) -> tuple[str, ...]:
    option = names.own[item.name]
    if option.kind is Kind.SWITCH:
        return (option.flag,) if item.is_set == (item.name in option.names) else ()
    return tuple(f"{option.flag}={own_value(option.name, value)}" for value in item.values)
