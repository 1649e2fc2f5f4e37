"""The actors that Ray starts, one on each machine. Ray imports this module on all of them;
arguments and results are strings only.
"""

from __future__ import annotations

import socket

import msgspec

from negamax.base import env, log
from negamax.base.errors import NegamaxError
from negamax.options.engine import EngineOptions
from negamax.options.nodes import KEY_VARIABLE

# by these Ray shows an actor its GPUs
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_CARRIED = ("HF_", "NCCL_")  # of the machine that serves, to those that have no own values


class ActorPlace(msgspec.Struct, frozen=True):
    """The machine of an actor."""

    host: str
    variables: dict[str, str]  # of `DEVICE_VARIABLES`, those that are set


def carried_variables() -> str:
    """What `RayAgent.run` is to be told of this process's environment, as JSON."""
    names = env.starting_with(*_CARRIED)
    kept = {name: names[name] for name in names if not name.endswith("_SOCKET_IFNAME")}
    return msgspec.json.encode(kept | env.starting_with(KEY_VARIABLE)).decode()


class RayAgent:
    """An actor. Ray has set the variables of its GPUs before it imports anything."""

    def place(self) -> str:
        """An `ActorPlace`, as JSON."""
        found = {name: env.get(name) for name in DEVICE_VARIABLES}
        variables = {name: value for name, value in found.items() if value is not None}
        return msgspec.json.encode(ActorPlace(socket.gethostname(), variables)).decode()

    def run(self, options: str, variables: str) -> str:
        """Run the agent that `options` (`EngineOptions`) describe until its ranks have ended; an
        error message, or "". `variables`: from `carried_variables`.
        """
        for name, value in msgspec.json.decode(variables, type=dict[str, str]).items():
            if name == KEY_VARIABLE:
                env.set_variable(name, value)
            else:
                env.set_default(name, value)
        env.set_openmp_defaults()
        chosen = msgspec.json.decode(options, type=EngineOptions)
        log.setup(chosen.log_level, chosen.log_format)
        from negamax.engine.nodes.agent import run_agent  # behind the variables, which it reads

        try:
            run_agent(chosen, waits_again=False)
        except (NegamaxError, OSError) as error:
            return str(error)
        return ""
