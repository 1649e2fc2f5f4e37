"""Fork children of tests from a process that has imported PyTorch, the worker and the server.

A fork saves one to two seconds for each child. Children of `negamax.base.supervision.spawn`,
programs of `start` and their children are forked. A child with another environment starts as for
users.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import inspect
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from negamax.base import env, log, supervision
from negamax.base.imports import large_imports
from negamax.config.embedded import EMBEDDED
from negamax.options.nodes import KEY_VARIABLE
from negamax.text.chat_template import ChatTemplate

PRELOADED = (
    "negamax.worker.worker", "negamax.text.grammar.matcher", "torch.distributed",
    "negamax.engine.core.setup", "negamax.engine.core.planned_sizes",
    "negamax.cli.main", "negamax.api.server",
)  # fmt: skip
# modules that start children as the main program
PARENTS = {
    "negamax", "tests.e2e.stub_serve", "tests.e2e.example_endpoint", "negamax.api.server_worker",
    "negamax.engine.core.process", "tests.forked_tool", "tests.stub_server",
    "tests.e2e.held_engine", "tests.dist.killed_in_move",
}  # fmt: skip
# variables that may differ from the environment of the imports
LATE_VARIABLES = {
    log.CHILD_VARIABLE, KEY_VARIABLE, "PYTEST_CURRENT_TEST", "TOKENIZERS_PARALLELISM",
    "TORCHINDUCTOR_CACHE_DIR",  # Importing a model of transformers sets this.
    # variables of the tests' engines and ranks
    "ENGINE_MODULE", "STUB_STEP_MS", "STUB_LOG", "STUB_HOLD", "REPLAY_SCRIPT", "REPLAY_RECORD",
    "HELD_ENGINE", "KILLED_IN_MOVE", "COUNTED_TOKENS",
}  # fmt: skip
ROOT = Path(__file__).parents[1]
COMMAND_BYTES = 2000  # bytes of a child's command line
FIRST_FREE = 500  # Children have no open file with this number or a larger one.
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")  # of `Popen`
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture(scope="session", autouse=sys.platform == "linux")
def forked_children() -> Iterator[None]:
    """Let `supervision.spawn` fork children that have the environment of this run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervision, "spawn", partial(_spawn, supervision.spawn, of_this_run))
        yield


def start(module: str, *args: str, **options: Any) -> subprocess.Popen[Any]:
    """Start `python -m module args` as `subprocess.Popen` does, forked if possible."""
    command = [sys.executable, "-m", module, *args]
    options = {"env": dict(os.environ), **options}
    if sys.platform == "linux" and of_this_run().has_environment(options["env"]):
        return Forked(of_this_run(), command, **options)
    return subprocess.Popen(command, **options)


def finished(
    module: str, *args: str, text: str | None = None, timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Run a module to its end. `text` is the stdin (None: inherited). Raises `TimeoutExpired`."""
    pipe = subprocess.PIPE
    stdin = None if text is None else pipe
    with start(module, *args, stdin=stdin, stdout=pipe, stderr=pipe, text=True) as child:
        try:
            out, err = child.communicate(text, timeout)
        except BaseException:
            child.kill()
            raise
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)


def _spawn(
    spawn: Callable[..., subprocess.Popen[bytes]],
    source: Callable[[], Source],
    module: str,
    *args: str,
    own_group: bool = False,
    pass_fds: Sequence[int] = (),
    variables: Mapping[str, str] | None = None,
    has_secrets: bool = True,  # A forked child has all variables of this run.
) -> subprocess.Popen[bytes]:
    wanted = env.make_child_env(**{log.CHILD_VARIABLE: log.settings()} | dict(variables or {}))
    if not source().has_environment(wanted):
        return spawn(module, *args, own_group=own_group, pass_fds=pass_fds, variables=variables)
    return Forked(
        source(), [sys.executable, "-m", module, *args], bufsize=0, stdin=subprocess.PIPE,
        start_new_session=own_group, pass_fds=pass_fds, env=wanted,
    )  # fmt: skip


class Source:
    """Hold the connection to the single-threaded process that is forked."""

    def __init__(self, requests: socket.socket, environment: Mapping[str, str]) -> None:
        self._requests = requests
        self._environment = _early(environment)

    @classmethod
    def started(cls) -> Source:
        """Start a source that ends with this process."""
        requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fd, room = theirs.fileno(), "-" * COMMAND_BYTES
            command = [sys.executable, "-m", "tests.forked_children", str(fd), room]
            subprocess.Popen(command, pass_fds=(fd,), env=environment(), cwd=ROOT)
        return cls(requests, environment())

    def has_environment(self, wanted: Mapping[str, str]) -> bool:
        return self._environment == _early(wanted)

    def fork(self, request: Mapping[str, Any], fds: Sequence[int]) -> int:
        """Fork a child that runs `request` with `fds`. Return the process id."""
        with _adopting():
            socket.send_fds(self._requests, [json.dumps(request).encode()], fds)
            return int(self._requests.recv(32))


@cache
def environment() -> dict[str, str]:
    """Return this run's environment, fixed at the first call, which `tests/conftest.py` makes."""
    return env.make_child_env()


of_this_run = cache(Source.started)


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in LATE_VARIABLES}


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Adopt grandchildren whose parent ends, but only within this context."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class Forked(subprocess.Popen[Any]):
    def __init__(self, source: Source, command: list[str], **options: Any) -> None:
        self._source = source
        super().__init__(command, **options)

    def _execute_child(self, *args: Any) -> None:
        given = inspect.signature(subprocess.Popen._execute_child).bind(self, *args).arguments
        pipes = [given[name] for name in PIPES]
        standard = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        fds = [place if fd == -1 else fd for place, fd in enumerate(standard)]
        late = {name: given["env"][name] for name in LATE_VARIABLES if name in given["env"]}
        request = {
            "command": given["args"],
            "folder": str(given["cwd"] or Path.cwd()),
            "own_group": given["start_new_session"],
            "variables": late,
            "places": [0, 1, 2, *given["pass_fds"]],
        }
        self.pid = self._source.fork(request, [*fds, *given["pass_fds"]])
        self._child_created = True
        self._close_pipe_fds(*pipes)


def await_request(requests: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Serve requests to fork until the end.

    In a child, return the request and the files. In the source, return None at the end.
    """
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    while True:
        frame, fds, _, _ = socket.recv_fds(requests, 65536, 16)
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
            for fd in (reading, writing):
                os.close(fd)
            requests.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            request: dict[str, Any] = json.loads(frame)
            return request, fds
        for fd in (*fds, writing):
            os.close(fd)
        os.waitpid(middle, 0)
        requests.send(os.read(reading, 32))
        os.close(reading)


def become(request: Mapping[str, Any], fds: list[int]) -> None:
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, FIRST_FREE) for fd in fds]
    for fd in fds:
        os.close(fd)
    for place, fd in zip(request["places"], copies, strict=True):
        os.dup2(fd, place)
        os.close(fd)
    os.chdir(request["folder"])
    os.environ.update(request["variables"])
    random.seed()
    _show(request["command"])


def _show(command: list[str]) -> None:
    """Replace the command line of this process."""
    first, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    shown = b"".join(part.encode() + b"\0" for part in command)[: end - first - 1]
    ctypes.memmove(first, shown.ljust(end - first, b"\0"), end - first)


def main(fd: int) -> None:
    """Import modules, then fork a child per request, which runs its module as the main program."""
    global of_this_run  # a child with children gets the process that is forked for it
    environment()
    with large_imports():
        for name in PRELOADED:
            importlib.import_module(name)
    ChatTemplate.from_folder(EMBEDDED["nano"])  # All servers of nano need the compiled template.
    requests = socket.socket(fileno=fd)
    while (received := await_request(requests)) is not None:
        request, fds = received
        if request["own_group"]:
            os.setsid()
        module, *arguments = request["command"][2:]
        if module in PARENTS:
            ours, requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if os.fork() == 0:  # The children of this child are forked from it.
                for other in (ours.detach(), *fds):
                    os.close(other)
                continue
            requests.close()
            of_this_run = cache(partial(Source, ours, environment()))
            supervision.spawn = partial(_spawn, supervision.spawn, of_this_run)
            sys.modules["tests.forked_children"] = sys.modules["__main__"]
        become(request, fds)
        run(module, arguments)


def run(module: str, arguments: list[str]) -> None:
    if module != "negamax":  # For a package, run its `__main__`.
        sys.modules.pop(module, None)
    sys.argv = [module, *arguments]
    sys.stdout = os.fdopen(1, "w", closefd=False)  # The inherited stream may not have been a pipe.
    code: str | int | None = None
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        code = ending.code
    if isinstance(code, str):
        sys.exit(code)
    sys.stdout.flush()
    supervision.exit_now(code or 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
