"""Render conversations to prompts with the checkpoint's Jinja template, in a sandbox."""

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from negamax.base.errors import CheckpointError, ConfigError, InvalidRequestError
from negamax.base.unicode import valid_unicode
from negamax.config.embedded import EMBEDDED
from negamax.config.generation import token_text
from negamax.config.json_file import read_file, read_json_object
from negamax.text.confined import Confined
from negamax.text.escaping import ESCAPE, TokenEscaper, unescape

RESERVED_KWARGS = frozenset({"messages", "tools", "add_generation_prompt"})

_NOT_ASCII = re.compile(rf"[^\x00-\x7f{ESCAPE}]+")
_MESSAGE_CHARS = 2000  # maximum characters of a template's error message
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class _GenerationTag(Extension):
    """Renders the content of the tag {% generation %}, which marks answers for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """A compiled chat template. Threads may share an object of this class."""

    def __init__(
        self,
        source: str,
        *,
        variables: Mapping[str, Any] | None = None,
        origin: str = "chat template",
        is_trusted: bool = True,
    ) -> None:
        """Compile `source`. A template that is not trusted runs in another process (`Confined`).

        Every call passes `variables` to the template. `origin` is the template's name in errors.
        Raises `CheckpointError` if the template has a syntax error.
        """
        self.source = source
        self._confined: Confined | None = None
        if not is_trusted:
            self._confined = Confined("chat template", source, variables, origin, origin=origin)
            read, self.has_root_role, self.shows_earlier_thinking = self._confined.load()
            self.variables = frozenset(read)
            return
        self._defined = dict(variables or {})
        try:
            self.variables, self._template = _compile(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"{origin} has a syntax error in line {error.lineno}: {_shorten(error.message)}",
                hint="correct the template, or replace it with --chat-template FILE",
            ) from error

    @classmethod
    def from_folder(cls, path: Path, override: Path | None = None) -> Self | None:
        """Read the chat template of the checkpoint folder `path`, or return None if none exists.

        The first of these sources that exists is used: the file `override`, `chat_template.jinja`,
        the field `chat_template` of chat_template.json, and the same field of
        tokenizer_config.json. If a field lists several templates, the template named "default" is
        used. Raises `ConfigError` if a template file cannot be read. Raises `CheckpointError` if a
        JSON file is malformed, or if a list of several templates has no default.
        """
        is_trusted = path in EMBEDDED.values()
        config_file = path / "tokenizer_config.json"
        # If `config_file` is missing, `Tokenizer` refuses the folder.
        config = read_json_object(config_file) if config_file.exists() else {}
        variables = {
            name: text
            for name in _NAMED_TOKENS
            if (text := token_text(config.get(name))) is not None
        }
        file = override if override is not None else path / "chat_template.jinja"
        if override is not None or file.exists():
            try:
                source = (override.read_bytes() if override else read_file(file)).decode(
                    "utf-8-sig"
                )
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"the chat template {file} cannot be read: {error}",
                    hint="use a file of UTF-8 text",
                ) from error
            return cls(source, variables=variables, origin=str(file), is_trusted=is_trusted)
        beside = path / "chat_template.json"  # old transformers versions write templates here
        if beside.exists():
            config_file, config = beside, read_json_object(beside)
        entry = config.get("chat_template")
        origin = f"chat_template in {config_file}"
        if isinstance(entry, list):
            entry = {
                item.get("name"): item.get("template")
                for item in entry
                if isinstance(item, Mapping)
            }
        if isinstance(entry, Mapping) and entry:
            names = list(entry)
            entry = entry.get("default") if len(names) > 1 else entry[names[0]]
            if entry is None:
                raise CheckpointError(
                    f"{origin} has several templates and no default: {', '.join(map(str, names))}",
                    hint="save one of these templates as FILE, and use --chat-template FILE",
                )
        if not entry:
            return None
        if not isinstance(entry, str):
            raise CheckpointError(
                f"{origin} has the type {type(entry).__name__}; a string is needed",
                hint="use --chat-template FILE",
            )
        return cls(entry, variables=variables, origin=origin, is_trusted=is_trusted)

    def reads(self, variable: str) -> bool:
        return variable in self.variables

    @functools.cached_property
    def has_root_role(self) -> bool:
        """Whether the template renders the role root, which ranks above the role system in M3."""
        mark = "text-of-the-root"
        try:
            return mark in self.render(
                [{"role": "root", "content": mark}, {"role": "user", "content": "text"}]
            )
        except InvalidRequestError:
            return False

    @functools.cached_property
    def shows_earlier_thinking(self) -> bool:
        """Whether the template renders the reasoning of answers before the last user message."""
        mark, user = "what-was-thought", {"role": "user", "content": "text"}
        answer = {"role": "assistant", "content": "text", "reasoning_content": mark}
        try:
            return mark in self.render([user, answer, user])
        except InvalidRequestError:
            return True

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        escaper: TokenEscaper | None = None,
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Render a conversation from `normalize_messages`. Return the prompt as valid Unicode.

        If an `escaper` escapes control tokens in the conversation (`text.escaping`), the result
        contains escapes. `kwargs` are template variables. Raises `InvalidRequestError` if the
        template refuses the conversation or fails.
        """
        check_template_kwargs(kwargs)
        if escaper is not None:
            messages, tools = escaper.messages(messages), escaper.value(tools)
            kwargs = escaper.value(kwargs)
        given = {**kwargs, "tools": tools, "add_generation_prompt": add_generation_prompt}
        if self._confined is None:
            text = self.render_values(messages, given)
        else:
            text = self._confined.call(messages, given).decode("utf-8", "surrogatepass")
        return text if escaper is not None else valid_unicode(text)

    def render_values(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        """Render in this process, without limits. Raises `InvalidRequestError` or `MemoryError`."""
        try:
            return self._template.render({**self._defined, **variables}, messages=messages)
        except (InvalidRequestError, MemoryError):
            raise
        # If a checkpoint's template has a bug, only the request that renders it fails.
        except Exception as error:
            raise InvalidRequestError(
                f"the chat template cannot render these messages: {_shorten(error)}",
                hint="check the roles, the contents and chat_template_kwargs of the request",
                param="messages",
            ) from error


@functools.lru_cache(maxsize=4)  # Engines of one process mostly have the same template.
def _compile(source: str) -> tuple[frozenset[str], jinja2.Template]:
    """Return the variables that template `source` reads, and the compiled template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    parsed = environment.parse(source)
    variables = frozenset(jinja2.meta.find_undeclared_variables(parsed))
    return variables, environment.from_string(parsed)


def require_template(template: ChatTemplate | None) -> ChatTemplate:
    """Return `template`. Raises `InvalidRequestError` if the model has no template."""
    if template is None:
        raise InvalidRequestError(
            "this model has no chat template",
            hint="start Negamax with --chat-template FILE, or use an interface without a template: "
            "/v1/completions, negamax generate --raw, LLM.generate",
        )
    return template


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raise `InvalidRequestError` for template variables that would replace the conversation."""
    taken = sorted(RESERVED_KWARGS & kwargs.keys())
    if taken:
        raise InvalidRequestError(
            f"chat_template_kwargs must not contain {', '.join(taken)}; use the request fields "
            f"with these names",
            param="chat_template_kwargs",
        )


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def _raise_exception(message: str) -> NoReturn:
    raise InvalidRequestError(
        f"the chat template refuses these messages: {_shorten(message)}", param="messages"
    )


def _shorten(message: object) -> str:
    return unescape(str(message)[:_MESSAGE_CHARS])
