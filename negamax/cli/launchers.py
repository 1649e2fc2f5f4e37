"""Read the nodes' settings from the environment variables of LeaderWorkerSet, Slurm and torchrun.

Flags, NEGAMAX_ variables and the file of --config override a launcher's settings.
"""

import re
from collections.abc import Mapping, Sequence

from negamax.base import env
from negamax.base.errors import ConfigError
from negamax.cli.words import Given
from negamax.options.nodes import RAY

# With these options and values, Ray starts the other nodes.
_BY_RAY: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("--distributed-executor-backend", (RAY,)),
    ("--data-parallel-backend", (RAY,)),
    ("-dpb", (RAY,)),
    ("--use-ray", ()),
    ("--worker-use-ray", ()),
)


def launched(levels: Sequence[Sequence[Given]]) -> list[Given]:
    """Return the settings that a launcher makes for nodes, or [] for --nnodes 1 and for Ray.

    Raises `ConfigError` if the launcher starts more than one process on a machine.
    """
    said = {item.name: item.values[-1:] for level in levels for item in level}
    if said.get("--nnodes") == ("1",) or any(said.get(name) == value for name, value in _BY_RAY):
        return []
    for read in (_leader_worker_set, _slurm, _torchrun):
        found = read()
        if found.get("--nnodes", ("1", ""))[0] != "1":
            return [Given(name, (value,), source) for name, (value, source) in found.items()]
    return []


def _leader_worker_set() -> Mapping[str, tuple[str, str]]:
    """Read the variables that a LeaderWorkerSet of Kubernetes sets in every pod."""
    names = {"--nnodes": "LWS_GROUP_SIZE", "--node-rank": "LWS_WORKER_INDEX"}
    return _given(names | {"--master-addr": "LWS_LEADER_ADDRESS"})


def _slurm() -> Mapping[str, tuple[str, str]]:
    """Read the variables that `srun` sets for a Slurm step."""
    found = dict(_given({"--nnodes": "SLURM_STEP_NUM_NODES", "--node-rank": "SLURM_NODEID"}))
    hosts = env.get("SLURM_STEP_NODELIST")
    if not found or hosts is None:
        return {}
    if (tasks := env.get("SLURM_STEP_NUM_TASKS")) not in (None, found["--nnodes"][0]):
        raise ConfigError(
            f"srun starts {tasks} tasks on {found['--nnodes'][0]} machines; "
            f"Negamax needs one task per machine",
            hint="use --ntasks-per-node=1",
        )
    return found | {"--master-addr": (first_host(hosts), "SLURM_STEP_NODELIST")}


def _torchrun() -> Mapping[str, tuple[str, str]]:
    """Read torchrun's variables. torchrun must start one process per machine."""
    world, local = env.get("WORLD_SIZE"), env.get("LOCAL_WORLD_SIZE")
    if env.get("GROUP_RANK") is None or world is None:
        return {}
    if local != "1":
        raise ConfigError(
            f"torchrun starts {local} processes per machine; Negamax needs one process per machine",
            hint="use --nproc-per-node 1",
        )
    names = {"--nnodes": "WORLD_SIZE", "--node-rank": "GROUP_RANK", "--master-addr": "MASTER_ADDR"}
    found, port = dict(_given(names)), env.get("MASTER_PORT")
    if port is not None and port.isdigit():
        # torchrun's own store may listen on MASTER_PORT
        found["--master-port"] = (str(int(port) + 1), "MASTER_PORT, plus 1")
    return found


def _given(names: Mapping[str, str]) -> Mapping[str, tuple[str, str]]:
    """Return option -> (value, name of the variable), or {} if a variable is missing."""
    values = {option: (env.get(variable), variable) for option, variable in names.items()}
    found = {option: (value, name) for option, (value, name) in values.items() if value}
    return found if len(found) == len(names) else {}


def first_host(hosts: str) -> str:
    """Return the first host of a Slurm list, such as node3 for "node[3-5,9],other"."""
    match = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\]([^,\[]*))?", hosts)
    assert match is not None
    return "".join(part or "" for part in match.groups())
