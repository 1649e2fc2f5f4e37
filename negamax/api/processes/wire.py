"""What the first process sends another server process: lines of JSON on its standard input, whose
end is its end.
"""

from __future__ import annotations

import msgspec

from negamax.base.supervision import ParentPulse
from negamax.engine.wire import ModelInfo
from negamax.options.engine import EngineOptions
from negamax.options.server import ServerOptions


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first line."""

    index: int
    folder: str  # of what the processes share
    listener: int  # file descriptor of a bound socket
    parent: ParentPulse
    engine: EngineOptions
    server: ServerOptions


class UseEngine(msgspec.Struct, frozen=True, tag="engine-ready"):
    """The engine of a replica waits for requests at the sockets in `folder`."""

    replica: int
    folder: str
    info: ModelInfo


class EngineLost(msgspec.Struct, frozen=True, tag="engine-lost"):
    """The engine is gone; another one is expected in `ready_in` seconds."""

    replica: int
    reason: str
    ready_in: float


class EngineDead(msgspec.Struct, frozen=True, tag="engine-failed"):
    """The engine stays dead."""

    replica: int
    reason: str


class Reload(msgspec.Struct, frozen=True, tag="reload"):
    """Read the files again that can be replaced while the server runs."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Answer what is open, and end."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Break off what is open, and end."""


EngineMessage = UseEngine | EngineLost | EngineDead
ServerMessage = Begin | EngineMessage | Reload | Drain | Abort

encoder = msgspec.json.Encoder()
decoder: msgspec.json.Decoder[ServerMessage] = msgspec.json.Decoder(ServerMessage)
