"""Define the JSON lines that the first process writes to the standard input of other processes."""

import msgspec

from negamax.base.supervision import ParentPulse
from negamax.engine.wire import ModelInfo
from negamax.options.engine import EngineOptions
from negamax.options.server import ServerOptions


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first message to a new server process."""

    index: int
    folder: str  # Folder of the shared files.
    listener: int  # File descriptor of the bound socket on which the process listens.
    parent: ParentPulse
    engine: EngineOptions
    server: ServerOptions


class UseEngine(msgspec.Struct, frozen=True, tag="engine-ready"):
    """The engine of `replica` accepts requests at the sockets in `folder`."""

    replica: int
    folder: str
    info: ModelInfo


class EngineLost(msgspec.Struct, frozen=True, tag="engine-lost"):
    """The engine of `replica` has ended. A new engine should be ready in `ready_in` seconds."""

    replica: int
    reason: str
    ready_in: float


class EngineDead(msgspec.Struct, frozen=True, tag="engine-failed"):
    """The engine of `replica` has ended and is not restarted."""

    replica: int
    reason: str


class Reload(msgspec.Struct, frozen=True, tag="reload"):
    """Reload the key and TLS files."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Answer open requests, and end."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Abort open requests, and end."""


EngineMessage = UseEngine | EngineLost | EngineDead
ServerMessage = Begin | EngineMessage | Reload | Drain | Abort

encoder = msgspec.json.Encoder()
decoder: msgspec.json.Decoder[ServerMessage] = msgspec.json.Decoder(ServerMessage)
