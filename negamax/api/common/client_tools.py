"""Tools that a request declares by type alone and that the client runs.

`client_tools.json` has the description and the schema by which the model is shown them.
"""

from pathlib import Path
from typing import Any

import msgspec


class ClientTool(msgspec.Struct, frozen=True):
    """A function as the model is shown it; each of `types` names it in requests."""

    types: tuple[str, ...]
    description: str
    schema: dict[str, Any]


_TOOLS = msgspec.json.decode(
    Path(__file__).with_suffix(".json").read_bytes(), type=dict[str, list[ClientTool]]
)


def load_client_tools(dialect: str) -> dict[str, ClientTool]:
    return {kind: tool for tool in _TOOLS[dialect] for kind in tool.types}
