"""Tools that Anthropic's API knows by their type alone: requests have no schema of them, and the
client runs them. What the model is shown of them is written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PATH = {"type": "string", "description": "Absolute path of the file or directory."}
_FILE_TEXT = {"type": "string", "description": "create: the whole text of the file."}
_OLD_STR = {
    "type": "string",
    "description": "str_replace: the text to replace, exactly as in the file, where it is once.",
}
_NEW_STR = {"type": "string", "description": "str_replace: the text that takes its place."}
_INSERT_LINE = {
    "type": "integer",
    "description": "insert: the number of the line after which the text is put; 0: at the start.",
}
_INSERT_TEXT = {"type": "string", "description": "insert: the text to put there."}
_VIEW_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "view: the first and the last line to show, counted from 1; -1: to the end.",
}
_EDITS: dict[str, dict[str, Any]] = {
    "file_text": _FILE_TEXT,
    "old_str": _OLD_STR,
    "new_str": _NEW_STR,
    "insert_line": _INSERT_LINE,
    "insert_text": _INSERT_TEXT,
    "view_range": _VIEW_RANGE,
}


def _command(*commands: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(commands), "description": "What to do."}


def _schema(*required: str, **properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


_BASH = (
    "Runs a command in a bash shell that stays open, with its variables and its working "
    "directory, and answers what the command prints.",
    _schema(
        "command",
        command={"type": "string", "description": "The command to run."},
        restart={"type": "boolean", "description": "true: start a new shell, run no command."},
    ),
)
_EDITOR_TEXT = (
    "Reads and edits files: view shows a file, or lists a directory; create writes a new file; "
    "str_replace replaces a text; insert puts lines in"
)
_OLD_EDITOR = (
    f"{_EDITOR_TEXT}; undo_edit takes back the last edit of a file.",
    _schema(
        "command",
        "path",
        command=_command("view", "create", "str_replace", "insert", "undo_edit"),
        path=_PATH,
        file_text=_FILE_TEXT,
        old_str=_OLD_STR,
        new_str={
            "type": "string",
            "description": f"{_NEW_STR['description']} {_INSERT_TEXT['description']}",
        },
        insert_line=_INSERT_LINE,
        view_range=_VIEW_RANGE,
    ),
)
_EDITOR = (
    f"{_EDITOR_TEXT}.",
    _schema(
        "command",
        "path",
        command=_command("view", "create", "str_replace", "insert"),
        path=_PATH,
        **_EDITS,
    ),
)
_MEMORY = (
    "Files below /memories, which are still there in later conversations: look there for what is "
    "known before a task is begun, and write down what will be needed. view shows a file, or lists "
    "a directory; create writes a file; str_replace replaces a text; insert puts lines in; delete "
    "removes a file or a directory; rename moves one.",
    _schema(
        "command",
        command=_command("view", "create", "str_replace", "insert", "delete", "rename"),
        path={
            "type": "string",
            "description": "Path from /memories on; all commands but rename have one.",
        },
        **_EDITS,
        old_path={"type": "string", "description": "rename: the path that there is."},
        new_path={"type": "string", "description": "rename: the path to be."},
    ),
)
# by type: the description, and the schema of the input
_CLIENT_TOOLS = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _OLD_EDITOR,
    "text_editor_20250124": _OLD_EDITOR,
    "text_editor_20250429": _EDITOR,
    "text_editor_20250728": _EDITOR,
    "memory_20250818": _MEMORY,
}


def with_schema(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """The declared `tool` with the description and `input_schema` of its type; None for a tool that
    this server does not know, or that runs on Anthropic's."""
    kind = tool.get("type")
    if not isinstance(kind, str) or kind not in _CLIENT_TOOLS:
        return None
    description, schema = _CLIENT_TOOLS[kind]
    shown = tool.get("max_characters")
    if isinstance(shown, int):
        description += f" At most {shown} characters of a file are shown."
    return {**tool, "description": description, "input_schema": schema}
