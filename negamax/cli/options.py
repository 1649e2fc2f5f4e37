"""Turn dataclasses of options into command-line options."""

import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.models import OptionInfo

from negamax.base import env
from negamax.base.errors import ConfigError, check_choice
from negamax.cli.examples import make_epilog
from negamax.cli.resolve import Resolved, options_of
from negamax.cli.words import is_model_option
from negamax.config.embedded import QUOTED_NAMES
from negamax.models.chat_format import REASONING_PARSERS, TOOL_CALL_PARSERS, check_parsers
from negamax.options.engine import MODEL, EngineOptions
from negamax.options.flags import Flag, flags_of
from negamax.options.foreign import SERVER
from negamax.options.key_file import keys_of_file
from negamax.options.server import ServerOptions

AUTO = "auto"
_NEEDED_FILES = 128  # number of open files that a process with a model and a few connections needs
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {unit + "i": 2 ** (10 * power) for power, unit in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([kmgt]?i?)b?", re.IGNORECASE)
_COUNT = re.compile(r"(-?\d{1,15}(?:\.\d{1,15})?)\s*([kKmMgG]?)")
# option -> its values, which the model families define
_CHOICES = {"tool_call_parser": TOOL_CALL_PARSERS, "reasoning_parser": REASONING_PARSERS}

_CONFIG = "Read options from this TOML file. Flags and NEGAMAX_... variables override the file."
_EXPLAIN = "Check the command line, print the value and its source for each option, and exit."
_MODEL_FLAG = Flag(
    "Set the model, like the argument MODEL.", ("--model",), ("--model-path",), field="model_option"
)


def add_options(
    *,
    defaults: dict[str, Any] | None = None,
    needs_model: bool = True,
    explains: bool = True,
    check: Callable[..., None] | None = None,
    foreign: str | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command whose parameters include dataclasses of options.

    Each field of a dataclass becomes an option. A command with `EngineOptions` also has MODEL,
    --model and other servers' options. Without `needs_model`, the model is optional. With
    `explains`, the command has --config and --explain. --explain calls `check`. `defaults` replaces
    default values. `foreign` selects other servers' options for commands without `EngineOptions`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = signature.parameters
        classes: dict[str, type] = {
            name: one.annotation
            for name, one in own.items()
            if isinstance(one.annotation, type) and dataclasses.is_dataclass(one.annotation)
        }
        has_engine = any(issubclass(one, EngineOptions) for one in classes.values())
        parameters = [one for name, one in own.items() if name not in classes]
        if has_engine:
            help = f"A local folder, a hub id, or a built-in model: {QUOTED_NAMES}."
            model = typer.Argument(None, metavar="MODEL", help=help, show_default=False)
            first = [_parameter("model", model, str | None)]
            if explains:
                config = setting(None, _CONFIG, metavar="FILE", show_default=False)
                first += [
                    _parameter("config", config, str | None),
                    _parameter("explain", setting(False, _EXPLAIN, "--explain"), bool),
                    _parameter("typer_context", inspect.Parameter.empty, typer.Context),
                ]
            parameters = first + parameters
        flags: list[Flag] = []
        for options in reversed(classes.values()):  # The server's options come first in the help.
            if issubclass(options, EngineOptions):
                help = _MODEL_FLAG.listed_help
                option = setting(None, help, "--model", panel=MODEL, show_default=False)
                parameters.append(_parameter("model_option", option, str | None))
                flags.append(_MODEL_FLAG)
            parameters += _flag_parameters(options, defaults or {})
            flags += _flags(options)

        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            context = values.pop("typer_context", None)
            values.pop("config", None)
            is_explained = values.pop("explain", False)
            fixed: dict[str, Any] = {}
            if has_engine:
                model, option = values.pop("model"), values.pop("model_option")
                fixed["model"] = _one_model(model, option, needed=needs_model)
                env.allow_open_files(_NEEDED_FILES)
            given = {
                name: _made(options, values, fixed if issubclass(options, EngineOptions) else {})
                for name, options in classes.items()
            }
            if not is_explained:
                return command(**given, **values)
            if check is not None:
                check(**given)
            print("\n".join(_table(context)))

        wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        wrapper.flags = tuple(flags)  # type: ignore[attr-defined]
        wrapper.foreign_table = SERVER if has_engine else foreign  # type: ignore[attr-defined]
        return wrapper

    return decorate


def _parameter(name: str, default: object, annotation: object) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _flag_parameters(options: type, defaults: Mapping[str, Any]) -> Iterator[inspect.Parameter]:
    """Yield the parameters that typer reads for the fields of a dataclass."""
    types = get_type_hints(options)
    for flag in _flags(options):
        kind, default = types[flag.field], defaults.get(flag.field)
        if default is None:
            default = getattr(options, flag.field, None)
        metavar = parser = None
        if flag.turns_off:
            default = False
        elif kind == tuple[str, ...]:
            kind, default, metavar = list[str] | None, None, "<str>"
        elif flag.is_json:
            kind, default, metavar = str | None, None, "JSON"
        elif flag.is_size:
            parser, metavar = parse_bytes, "SIZE"
        elif flag.is_count:
            parser, metavar = parse_count, "NUMBER"
        option = typer.Option(
            *flag.names,
            help=flag.listed_help,
            rich_help_panel=flag.panel,
            show_default=not flag.turns_off and default is not None,
            parser=parser,
            metavar=metavar,
            autocompletion=completion(flag.choices) if flag.choices else None,
        )
        yield _parameter(flag.field, default, Annotated[kind, option])


@functools.cache
def _flags(options: type) -> tuple[Flag, ...]:
    return tuple(
        dataclasses.replace(flag, choices=_CHOICES.get(flag.field, flag.choices))
        for flag in flags_of(options)
    )


def _made(options: type, values: dict[str, Any], fixed: dict[str, Any]) -> Any:
    """Build the dataclass, and remove its fields from `values`. Raises `ConfigError`."""
    chosen = dict(fixed)
    for flag in _flags(options):
        value, name = values.pop(flag.field), flag.names[0]
        if flag.choices:
            check_choice(name, value, flag.choices)
        if flag.turns_off:
            value = not value
        elif flag.is_json:
            if not value:
                continue
            value = json_object(name, value)
        elif isinstance(getattr(options, flag.field, None), tuple):
            value = tuple(value or ())
            value = _listed(name, value) if flag.takes_json_list else value
        chosen[flag.field] = value
    if options is ServerOptions:
        _check_server(chosen)
    return options(**chosen)


def _check_server(chosen: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a server's files, template variables or parser names are unusable."""
    keys_of_file(chosen["api_key_file"])
    if kwargs := chosen.get("default_chat_template_kwargs"):
        from negamax.text.chat_template import check_template_kwargs

        check_template_kwargs(kwargs)
    template = chosen["chat_template"]
    if template is not None and not Path(template).is_file():
        refusal = f"--chat-template is {template!r}, not a file; set the path of a Jinja template"
        raise ConfigError(refusal)
    names = ("tool_call_parser", "reasoning_parser")
    check_parsers(**{name: chosen[name] for name in names})


def _one_model(argument: str | None, option: str | None, *, needed: bool) -> str:
    model = option if argument is None else argument
    if model is None and needed:
        hint = f"pass a folder, a hub id, or {QUOTED_NAMES}, the built-in models"
        raise ConfigError("MODEL is missing", hint=hint)
    if option not in (None, model):
        refusal = f"MODEL is {argument!r} and --model is {option!r}"
        raise ConfigError(refusal, hint="pass only one of MODEL and --model")
    return model or ""


def _listed(flag: str, values: Iterable[str]) -> tuple[str, ...]:
    """Return all values of a repeated option. As in vLLM, a value may be a JSON list."""
    texts: list[str] = []
    for value in values:
        if not value.startswith("["):
            texts.append(value)
            continue
        try:
            listed = json.loads(value)
        except ValueError:
            listed = None
        if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
            refusal = f"{flag} is {value[:60]!r}, which is not a JSON list of strings"
            raise ConfigError(refusal, hint=f"repeat {flag} instead")
        texts += listed
    return tuple(texts)


# Values


def parse_bytes(text: str | int) -> int | None:
    """Read a size such as '1500000', '4GiB', '4g' or '512M'. Return None for 'auto'."""
    if text == AUTO:
        return None
    match = _SIZE.fullmatch(str(text).strip())
    units = _UNITS | _BINARY_UNITS
    if match is None or match[2].lower() not in units:
        allowed = "bytes, or a number with K, M, G or Ki, Mi, Gi"
        raise typer.BadParameter(f"{str(text)[:60]!r} is not a size; allowed: {allowed}")
    return int(float(match[1]) * units[match[2].lower()])


def parse_count(text: str | int) -> int | None:
    """Read a count as in vLLM: '131072', '128k' (times 1000), '128K' (times 1024) or 'auto'."""
    if text == AUTO:
        return None
    match = _COUNT.fullmatch(str(text).strip())
    value = 0.5  # 0.5 is not an integer, so the check below refuses a text without a match
    if match is not None:
        unit = match[2].lower() + "i" * match[2].isupper()
        value = float(match[1]) * (_UNITS | _BINARY_UNITS)[unit]
    if not value.is_integer():
        allowed = "numbers such as 131072, 128k (times 1000) and 128K (times 1024), and auto"
        raise typer.BadParameter(f"{str(text)[:60]!r} is not a number; allowed: {allowed}")
    return int(value)


def json_object(flag: str, text: str | None) -> dict[str, Any]:
    """Return the JSON object in a flag's value, or {} without a value. Raises `ConfigError`."""
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"{flag} is not JSON: {error}") from None
    if not isinstance(found, dict):
        kind = "null" if found is None else type(found).__name__
        raise ConfigError(f"{flag} is a JSON {kind}; an object is needed")
    return found


def setting(
    default: Any,
    help: str,
    *names: str,
    panel: str | None = None,
    choices: Iterable[str] = (),
    **rules: Any,
) -> Any:
    """Declare an option of a single command. The default `...` makes the option required."""
    rules |= {"autocompletion": completion(choices)} if choices else {}
    return typer.Option(default, *names, help=help, rich_help_panel=panel, **rules)


def template_option() -> Any:
    """Declare the option --chat-template of a command without `ServerOptions`."""
    help = "Replace the checkpoint's chat template with this Jinja file."
    return setting(None, help, "--chat-template", panel=MODEL)


def add_command(app: typer.Typer, name: str, module: Any, *, group: str = "") -> None:
    """Add the command of a module. In help, a setting without a panel joins the previous panel."""
    panel = None
    for parameter in inspect.signature(module.command).parameters.values():
        if isinstance(parameter.default, OptionInfo):
            panel = parameter.default.rich_help_panel or panel
            parameter.default.rich_help_panel = panel
    epilog = make_epilog(f"{group} {name}".strip())
    app.command(name, help=module.HELP, epilog=epilog)(module.command)


def completion(choices: Iterable[str]) -> Callable[[str], list[str]]:
    """Return the function that completes a value in a shell."""
    return lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]


# --explain


def _table(context: typer.Context) -> Iterator[str]:
    """Yield a line for each option with its name, its value, and the source of the value."""
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
