"""The engine's side of Ray: a child process reserves, starts and releases machines."""

import os
import secrets
import select
from dataclasses import replace
from importlib.util import find_spec

import msgspec

from negamax.base import env
from negamax.base.errors import ConfigError, ResourceError
from negamax.base.log import get_logger
from negamax.base.supervision import Supervised
from negamax.options.engine import EngineOptions
from negamax.options.nodes import KEY_VARIABLE, MP, RAY

logger = get_logger(__name__)

DRIVER_MODULE = "negamax.engine.nodes.ray_driver"
# in addition to --ray-placement-timeout: to import Ray, reach or start a cluster, start actors
CONNECT_SECONDS = 60.0
_CLOSE_SECONDS = 3.0  # for Ray's processes to end; the driver continues by itself


class Placed(msgspec.Struct, frozen=True, tag="placed"):
    """Machines are reserved and the agents start."""

    nnodes: int
    device: str
    master_addr: str
    interface: str | None
    variables: dict[str, str]  # of the environment, that show this machine's GPUs


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    message: str
    exit_code: int


FromDriver = Placed | Failed


def check_installed(options: EngineOptions) -> None:
    """Errors: `ConfigError` if Ray is asked for and not installed."""
    if options.distributed_executor_backend == RAY and find_spec("ray") is None:
        raise ConfigError(
            "--distributed-executor-backend ray needs Ray, which is not installed",
            hint="pip install 'negamax[ray]'",
        )


class RayLauncher:
    """Machines reserved by Ray, until `close`. One object for each start of an engine."""

    def __init__(self, options: EngineOptions) -> None:
        """Wait until Ray has room and hide other GPUs. Errors: `ConfigError`, `ResourceError`."""
        check_installed(options)
        if env.get(KEY_VARIABLE) is None:
            env.set_variable(KEY_VARIABLE, secrets.token_hex(32))  # sent to the agents
        reader, writer = os.pipe()
        self._messages = os.fdopen(reader, "rb", 0)  # unbuffered, for `select`
        self._driver = Supervised(DRIVER_MODULE, str(writer), own_group=True, pass_fds=[writer])
        os.close(writer)
        try:
            self._driver.send(msgspec.json.encode(options))
            placed = self._receive(options.ray_placement_timeout + CONNECT_SECONDS)
        except BaseException:
            self.close()
            raise
        for name, value in placed.variables.items():
            env.set_variable(name, value)
        self.options = plan_node(options, placed)

    def check(self) -> None:
        """Errors: `ConfigError` with the message of an agent that has ended, or of Ray."""
        if select.select([self._messages], [], [], 0.0)[0]:
            self._receive(0.0)

    def close(self) -> None:
        """Release the machines and wait briefly for Ray's processes to end."""
        self._driver.pipe.close()
        self._driver.wait(_CLOSE_SECONDS)
        self._messages.close()

    def _receive(self, seconds: float) -> Placed:
        """Wait for a message of the driver. Errors: as of `__init__`."""
        if not select.select([self._messages], [], [], seconds)[0]:
            raise ResourceError(
                f"Ray does not answer within {seconds:g} s", hint="look at `ray status`"
            )
        line = self._messages.readline()
        if not line:
            raise ResourceError("the process that asks Ray for machines has ended")
        message = msgspec.json.decode(line, type=FromDriver)
        if isinstance(message, Failed):
            error = ConfigError(message.message)
            error.exit_code = message.exit_code
            raise error
        return message


def plan_node(options: EngineOptions, placed: Placed, *, node: int = 0) -> EngineOptions:
    """The options that make `node` one of the placed machines."""
    return replace(
        options,
        nnodes=placed.nnodes,
        node_rank=node,
        master_addr=placed.master_addr,
        interface=placed.interface,
        device=placed.device,
        distributed_executor_backend=MP,
    )
