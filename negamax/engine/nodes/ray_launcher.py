"""Start the child process that reserves machines of a Ray cluster for an engine."""

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
# Time limit to import Ray, connect and start actors, in addition to --ray-placement-timeout.
CONNECT_SECONDS = 60.0
_CLOSE_SECONDS = 3.0  # Longest wait for the driver to end Ray's processes.


class Placed(msgspec.Struct, frozen=True, tag="placed"):
    """The driver sends this message when it has reserved machines and starts the agents."""

    nnodes: int
    device: str
    master_addr: str
    interface: str | None
    variables: dict[str, str]  # Environment variables that select this machine's GPUs.


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    message: str
    exit_code: int


FromDriver = Placed | Failed


def check_installed(options: EngineOptions) -> None:
    """Raise `ConfigError` if the options ask for Ray and Ray is not installed."""
    if options.distributed_executor_backend == RAY and find_spec("ray") is None:
        raise ConfigError(
            "--distributed-executor-backend ray needs Ray, which is not installed",
            hint="pip install 'negamax[ray]'",
        )


class RayLauncher:
    """The machines that Ray reserves for one start of an engine. `close` releases the machines."""

    def __init__(self, options: EngineOptions) -> None:
        """Reserve machines and hide unreserved GPUs. Raises `ConfigError` or `ResourceError`."""
        check_installed(options)
        if env.get(KEY_VARIABLE) is None:
            env.set_variable(KEY_VARIABLE, secrets.token_hex(32))  # Secret shared by all nodes.
        reader, writer = os.pipe()
        self._messages = os.fdopen(reader, "rb", 0)  # `select` needs an unbuffered file.
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
        """Raise `ConfigError` if the driver reports that an agent has ended or Ray has failed."""
        if select.select([self._messages], [], [], 0.0)[0]:
            self._receive(0.0)

    def close(self) -> None:
        """Release the machines and wait briefly for Ray's processes to end."""
        self._driver.pipe.close()
        self._driver.wait(_CLOSE_SECONDS)
        self._messages.close()

    def _receive(self, seconds: float) -> Placed:
        """Wait for a message of the driver. Raises `ConfigError` or `ResourceError`."""
        if not select.select([self._messages], [], [], seconds)[0]:
            raise ResourceError(
                f"Ray has not answered within {seconds:g} s", hint="check `ray status`"
            )
        line = self._messages.readline()
        if not line:
            raise ResourceError("the process that reserves Ray's machines has ended")
        message = msgspec.json.decode(line, type=FromDriver)
        if isinstance(message, Failed):
            error = ConfigError(message.message)
            error.exit_code = message.exit_code
            raise error
        return message


def plan_node(options: EngineOptions, placed: Placed, *, node: int = 0) -> EngineOptions:
    """Return the options of `node`, which is one of the reserved machines."""
    return replace(
        options,
        nnodes=placed.nnodes,
        node_rank=node,
        master_addr=placed.master_addr,
        interface=placed.interface,
        device=placed.device,
        distributed_executor_backend=MP,
    )
