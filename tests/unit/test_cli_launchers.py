from typing import Any

import pytest
import typer

from negamax.base.errors import ConfigError
from negamax.cli.launchers import first_host
from negamax.cli.main import app
from negamax.cli.resolve import resolve

GROUP: Any = typer.main.get_command(app)
LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader.svc"}
SLURM = {
    "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "gpu-[07-09]",
}  # fmt: skip
TORCHRUN = {
    "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}  # fmt: skip
NAMES = ("nnodes", "node_rank", "master_addr", "master_port")


def chosen(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], line: str = "serve nano -pp 6"
) -> list[str]:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    choices = resolve(GROUP, line.split()).choices
    return [choices[name].words[0].partition("=")[2] for name in NAMES if name in choices]


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        (LWS, ["2", "1", "leader.svc"]),
        (SLURM, ["3", "2", "gpu-07"]),
        (TORCHRUN, ["2", "0", "10.0.0.1", "29501"]),
        (LWS | {"LWS_GROUP_SIZE": "1"}, []),
        (LWS | {"NEGAMAX_NNODES": "1"}, ["1"]),
        (LWS | {"NEGAMAX_MASTER_ADDR": "other"}, ["2", "1", "other"]),
        # the shell of an allocation, and jobs that start their own processes
        ({"SLURM_NNODES": "2", "SLURM_NODEID": "0"}, []),
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "a", "RANK": "3"}, []),
    ],
)
def test_launcher_variables_are_used_without_flags_and_variables(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], options: list[str]
) -> None:
    assert chosen(monkeypatch, variables) == options


def test_only_servers_are_started_on_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, LWS, "generate nano -p x") == []


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (SLURM | {"SLURM_STEP_NUM_TASKS": "12"}, "--ntasks-per-node=1"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, "--nproc-per-node 1"),
    ],
)
def test_more_than_one_process_per_machine_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        chosen(monkeypatch, variables)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[3-5,9],x", "n3"),
        ("n[08,10]-ib,x", "n08-ib"),
        ("a-b-1", "a-b-1"),
    ],
)
def test_first_host_of_a_slurm_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first
