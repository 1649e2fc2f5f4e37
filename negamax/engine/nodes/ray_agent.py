"""The actor that Ray starts on each machine, whose methods take and return strings."""

import socket

import msgspec

from negamax.base import env, log
from negamax.base.errors import NegamaxError
from negamax.options.engine import EngineOptions
from negamax.options.nodes import KEY_VARIABLE

# Environment variables in which Ray lists the GPUs of an actor.
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_CARRIED = ("HF_", "NCCL_")  # Prefixes of environment variables to copy from node 0.


class ActorPlace(msgspec.Struct, frozen=True):
    host: str
    variables: dict[str, str]  # Variable in `DEVICE_VARIABLES` -> value.


def carried_variables() -> str:
    names = env.find_variables(*_CARRIED)
    kept = {name: names[name] for name in names if not name.endswith("_SOCKET_IFNAME")}
    return msgspec.json.encode(kept | env.find_variables(KEY_VARIABLE)).decode()


class RayAgent:
    """An actor on one machine. Ray sets `DEVICE_VARIABLES` before the actor imports modules."""

    def place(self) -> str:
        found = {name: env.get(name) for name in DEVICE_VARIABLES}
        variables = {name: value for name, value in found.items() if value is not None}
        return msgspec.json.encode(ActorPlace(socket.gethostname(), variables)).decode()

    def run(self, options: str, variables: str) -> str:
        """Run a node's agent with `options` until its ranks end. Return an error message or ""."""
        for name, value in msgspec.json.decode(variables, type=dict[str, str]).items():
            if name == KEY_VARIABLE:
                env.set_variable(name, value)
            else:
                env.set_default(name, value)
        env.set_openmp_defaults()
        chosen = msgspec.json.decode(options, type=EngineOptions)
        log.setup(chosen.log_level, chosen.log_format)
        from negamax.engine.nodes.agent import run_agent  # The import reads environment variables.

        try:
            run_agent(chosen, waits_again=False)
        except (NegamaxError, OSError) as error:
            return str(error)
        return ""
