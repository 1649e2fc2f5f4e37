"""Find the lane with which UCX, below NIXL, reads memory of this machine.

If UCX cannot use a transport, UCX uses a slower transport without an error. The check runs this
module as a program, because UCX reads its settings only once in a process.
"""

import re
import subprocess
import sys
import time

from negamax.base import env
from negamax.base.errors import ConfigError
from negamax.base.log import get_logger

logger = get_logger(__name__)

# Transport -> value of UCX_TLS, names of UCX's lanes. UCX needs TCP to connect.
_TRANSPORTS = {
    "rdma": ("ib", ("rc", "dc", "ud")),
    "shm": ("tcp,sm,self", ("cma", "xpmem", "knem", "posix", "sysv")),
    "tcp": ("tcp,self", ("tcp",)),
}
# UCX logs a table of read sizes. The last row, for the largest reads, has the method and the lane.
_LANE = re.compile(r"memory read by ucp_get.*?\.\.inf +\|[^|]*\| +([^|]*?) *\|", re.DOTALL)
_ERROR = re.compile(r"(?:UCX +ERROR |^(?:\w+\.)*\w*Error: )(.*)", re.MULTILINE)
_SECONDS = 30.0  # time limit of the test read


def check_nixl(transport: str | None) -> None:
    """Check that NIXL reads memory. NIXL uses only `transport` in this process and its children.

    Raises `ConfigError` if NIXL does not start, or if UCX reads by another transport.
    """
    tls, lanes = _TRANSPORTS.get(transport or "", ("", ("",)))
    if tls:
        env.set_variable("UCX_TLS", tls)
    variables = env.make_child_env(UCX_PROTO_INFO="y", UCX_LOG_FILE="")
    line = [sys.executable, "-m", __name__]
    probe = subprocess.run(line, env=variables, capture_output=True, text=True)
    lane, *_ = [*_LANE.findall(probe.stdout), "an unknown lane"]
    if probe.returncode:
        error, *_ = [*_ERROR.findall(probe.stdout + probe.stderr), f"exit code {probe.returncode}"]
        problem = f"NIXL does not start: {error}"
    elif not any(word.startswith(lanes) for word in lane.split()):
        problem = f"UCX reads by {lane}"
    else:
        logger.info("NIXL reads memory of this machine by %s", lane)
        return
    raise ConfigError(
        f"--kv-transfer-config selects NIXL with transport {transport or 'any'}, but {problem}",
        hint=f"install negamax[pd] if NIXL is missing, set kv_connector_extra_config.transport to "
        f"{', '.join(_TRANSPORTS)}, or use the kv_connector TcpConnector",
    )


def _read_once() -> None:
    """Let one agent of NIXL read memory of another agent, so that UCX logs the lane."""
    from nixl._api import nixl_agent, nixl_agent_config
    from torch import uint8, zeros

    agents = [nixl_agent(name, nixl_agent_config(backends=["UCX"])) for name in ("own", "remote")]
    memory = [zeros(1 << 20, dtype=uint8) for _ in agents]
    for agent, tensor in zip(agents, memory, strict=True):
        agent.register_memory([tensor])
    own, remote = agents
    descriptors = [own.get_xfer_descs([tensor]) for tensor in memory]
    name = own.add_remote_agent(remote.get_agent_metadata())
    transfer, end = own.initialize_xfer("READ", *descriptors, name), time.monotonic() + _SECONDS
    state = own.transfer(transfer)
    while state == "PROC" and time.monotonic() < end:
        time.sleep(0.001)
        state = own.check_xfer_state(transfer)
    if state != "DONE":
        raise RuntimeError(f"a read by NIXL ended in the state {state}")


if __name__ == "__main__":
    _read_once()
