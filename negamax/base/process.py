"""Child processes: how they are started, and that they never outlive their parent."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from negamax.base import env, log

_GROUP_END_SECONDS = 5.0


def spawn(
    module: str,
    *args: str,
    own_group: bool = False,
    pass_fds: Sequence[int] = (),
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `python -m module args`, in a session and process group of its own, or in those of this
    process; it inherits the open files `pass_fds`, and the environment with `variables` in it.

    The child may log as this process does: `log.setup_as_parent`. Its standard input is a pipe
    without a buffer: it reaches its end when the parent is gone, by whatever cause.
    """
    command = [sys.executable, "-m", module, *args]
    return subprocess.Popen(
        command,
        bufsize=0,
        stdin=subprocess.PIPE,
        start_new_session=own_group,
        pass_fds=pass_fds,
        env=env.for_child(**{log.CHILD_VARIABLE: log.settings()} | dict(variables or {})),
    )


def is_gone(process: subprocess.Popen[bytes]) -> bool:
    """Whether a child has ended, by the pipe to its standard input, which has no reader then: with
    a device driver to clean up after, its exit code is known much later."""
    assert process.stdin is not None
    if process.poll() is not None:
        return True
    poller = select.poll()
    poller.register(process.stdin, 0)  # errors are always reported
    return bool(poller.poll(0))


def exit_with_parent() -> None:
    """In a child started by `spawn`: end this process as soon as the parent is gone.

    Signals that ask to end or to reload are the parent's business. Service managers and terminals
    send them to every process at once; a child that followed them would break off what the parent
    wants to finish.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process (Linux; elsewhere unknown, False)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def exit_now(code: int) -> NoReturn:
    """End this process from any of its threads, without waiting for the others, and without taking
    modules apart: of PyTorch's that is a quarter of a second.
    """
    os._exit(code)


def stop(*processes: subprocess.Popen[bytes], timeout: float) -> None:
    """Give children that were told to end `timeout` seconds for it, then kill those that are
    left.
    """
    deadline = time.monotonic() + timeout
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            for late in processes:
                late.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the process group of a child with a group of its own, the child and its
    children; wait until they are gone, for at most 5 s (children of a dead child are reaped by the
    system)."""
    # on macOS a group of zombies may not be signalled
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + _GROUP_END_SECONDS
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.01)
