"""The file of `--tools`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from negamax.base.errors import ConfigError


def read_tools(path: Path) -> list[dict[str, Any]]:
    """The tools in a JSON file, a list as in a request. Errors: `ConfigError`."""
    try:
        tools = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--tools {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--tools {path} is no JSON: {error}") from None
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        found = (
            "a list with other values in it"
            if isinstance(tools, list)
            else f"a JSON {type(tools).__name__}"
        )
        raise ConfigError(
            f"--tools {path} holds {found}; a list of tool objects is needed",
            hint="as `tools` in a request",
        )
    return tools
