"""The file that `--config` names: TOML, with the names of options as keys."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from negamax.base.errors import ConfigError
from negamax.cli.flags import Kind
from negamax.cli.words import Given


def read(path: str) -> dict[str, Any]:
    """The keys and values of a TOML file. Errors: `ConfigError`."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config is {path!r}, which cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        hint = "give a TOML file"
        raise ConfigError(f"--config is {path!r}, which is no UTF-8", hint=hint) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"--config is {path!r}, which is no TOML: {error}",
            hint="lines such as: max-num-seqs = 64",
        ) from None


def given(name: str, kind: Kind, value: Any, *, source: str) -> Given:
    """A key of the file as an option. Errors: `ConfigError` for a value of another type."""
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
