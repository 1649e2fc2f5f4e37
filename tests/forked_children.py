"""Children of the tests' own process, which `negamax.base.process.spawn` starts, forked from a
process that has PyTorch, the worker and the grammars' compiler imported: more than a second of work
for each of them otherwise. Servers and engines of the end-to-end tests start as users start them.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import inspect
import json
import os
import random
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from negamax.base import env, log, process
from negamax.base.imports import large_imports

PRELOADED = ("negamax.worker.worker", "negamax.text.grammar.matcher", "torch.distributed")
# what may differ from the environment in which all that was imported
LATE_VARIABLES = {log.CHILD_VARIABLE, "PYTEST_CURRENT_TEST"}
PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture(scope="session", autouse=sys.platform == "linux")
def forked_children() -> Iterator[None]:
    """Has `process.spawn` fork, as long as a child is to have the environment, and no more open
    files than usual.
    """
    source: Source | None = None
    spawn = process.spawn

    def fork(
        module: str,
        *args: str,
        own_group: bool = False,
        pass_fds: Sequence[int] = (),
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        nonlocal source
        wanted = env.for_child(**{log.CHILD_VARIABLE: log.settings()} | dict(variables or {}))
        source = source or Source(wanted)
        if pass_fds or not source.has_environment(wanted):
            return spawn(module, *args, own_group=own_group, pass_fds=pass_fds, variables=variables)
        return Forked(source, [module, *args], env=wanted, own_group=own_group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "spawn", fork)
        yield
    if source is not None:
        source.stop()


class Source:
    """The process that is forked, single-threaded."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = _early(environment)
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.forked_children", str(theirs.fileno())]
            fds = (theirs.fileno(),)
            self._process = subprocess.Popen(command, pass_fds=fds, env=dict(environment))

    def has_environment(self, wanted: Mapping[str, str]) -> bool:
        return self._environment == _early(wanted)

    def fork(self, request: Mapping[str, Any], fds: Sequence[int]) -> int:
        """The id of a new child of this process."""
        with _adopting():
            socket.send_fds(self._requests, [json.dumps(request).encode()], fds)
            return int(self._requests.recv(32))

    def stop(self) -> None:
        self._requests.close()
        self._process.wait(60)


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in LATE_VARIABLES}


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Grandchildren whose parent ends become children of this process, and no longer afterwards:
    those that tests leave behind are for the system to reap.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class Forked(subprocess.Popen[bytes]):
    """A child as `process.spawn` gives it, not made from a program, but from `source`."""

    def __init__(
        self, source: Source, command: list[str], *, env: dict[str, str], own_group: bool
    ) -> None:
        self._source = source
        super().__init__(
            command, bufsize=0, stdin=subprocess.PIPE, start_new_session=own_group, env=env
        )

    def _execute_child(self, *args: Any) -> None:
        given = inspect.signature(subprocess.Popen._execute_child).bind(self, *args).arguments
        late = {name: given["env"][name] for name in LATE_VARIABLES if name in given["env"]}
        request = {
            "command": given["args"],
            "folder": str(Path.cwd()),
            "own_group": given["start_new_session"],
            "variables": late,
        }
        self.pid = self._source.fork(request, [given["p2cread"], 1, 2])
        self._child_created = True
        os.close(given["p2cread"])


def await_request(requests: socket.socket) -> dict[str, Any] | None:
    """Serve the tests' process. In a child: what it is to be, with the three open files that it is
    given in their places. In the process that is forked: None at the end.
    """
    while True:
        frame, fds, _, _ = socket.recv_fds(requests, 65536, 3)
        if not frame:
            return None
        reading, writing = os.pipe()
        middle = os.fork()
        if middle == 0:
            middle = os.getpid()
            child = os.fork()
            if child != 0:
                os.write(writing, str(child).encode())
                os._exit(0)
            while os.getppid() == middle:
                time.sleep(0.0005)
            requests.close()
            for place, fd in enumerate(fds):
                os.dup2(fd, place)
            for fd in (*fds, reading, writing):
                os.close(fd)
            request: dict[str, Any] = json.loads(frame)
            return request
        for fd in (*fds, writing):
            os.close(fd)
        os.waitpid(middle, 0)
        requests.send(os.read(reading, 32))
        os.close(reading)


def main(fd: int) -> None:
    """Import, then fork a child for each request, which runs its module as the main program."""
    with large_imports():
        for name in PRELOADED:
            importlib.import_module(name)
    request = await_request(socket.socket(fileno=fd))
    if request is None:
        return
    if request["own_group"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.update(request["variables"])
    random.seed()
    module, *arguments = request["command"]
    assert module not in sys.modules
    sys.argv = [module, *arguments]
    code: str | int | None = None
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        code = ending.code
    if isinstance(code, str):
        sys.exit(code)
    sys.stdout.flush()
    process.exit_now(code or 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
