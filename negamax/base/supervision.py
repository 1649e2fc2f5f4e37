"""Child processes: start, watch by pipe and heartbeat, restart within limits, stop.

Engines, ranks, grammar processes, server workers and Ray's driver are `Supervised` children. The
second half of this module runs in the children, which end with their parent.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from negamax.base import env, log
from negamax.base.shared_numbers import Row, SharedNumbers

logger = log.get_logger(__name__)

_GROUP_END_SECONDS = 5.0
_EXIT_CODE_SECONDS = 1.0  # for the system to report the exit code of a child whose files are closed
_LONGEST_LOOK_SECONDS = 1.0  # a longer time between two looks means that the watcher stood still
_FIRST_PAUSE = 1.0  # seconds before the second of several restarts in a row; doubles
_LONGEST_PAUSE = 30.0
_PARENT_LOOK_SECONDS = 0.1
_LAST_WORDS_SECONDS = 1.0  # for all children to inform their clients before one kills the parent


class Silence:
    """Seconds since the last heartbeat. Times in which the watcher itself stood still do not count.
    Single user: a watcher that looks several times a second.
    """

    def __init__(self) -> None:
        self._heartbeat = 0.0
        self._seconds = 0.0
        self._last_look = time.monotonic()

    def seconds(self, heartbeat: float) -> float:
        """The silence until now. `heartbeat` changes with every heartbeat; 0: none yet."""
        now = time.monotonic()
        self._seconds += min(now - self._last_look, _LONGEST_LOOK_SECONDS)
        self._last_look = now
        if heartbeat != self._heartbeat or not heartbeat:
            self._heartbeat, self._seconds = heartbeat, 0.0
        return self._seconds


def spawn(
    module: str,
    *args: str,
    own_group: bool = False,
    pass_fds: Sequence[int] = (),
    variables: Mapping[str, str] | None = None,
    has_secrets: bool = True,
) -> subprocess.Popen[bytes]:
    """Start `python -m module args`, in a session and process group of its own or in the parent's.

    The child inherits the open files `pass_fds`, and the environment (`env.make_child_env`) with
    `variables` in it. It can log as its parent does (`log.setup_as_parent`). Its standard input is
    an unbuffered pipe that ends when the parent does.
    """
    added = {log.CHILD_VARIABLE: log.settings()} | dict(variables or {})
    child_env = env.make_child_env(has_secrets=has_secrets, **added)
    return subprocess.Popen(
        [sys.executable, "-m", module, *args], bufsize=0, stdin=subprocess.PIPE,
        start_new_session=own_group, pass_fds=pass_fds, env=child_env,
    )  # fmt: skip


class Supervised:
    """A child process, from its start (as by `spawn`) to `reap`."""

    def __init__(
        self, module: str, *args: str, heartbeat: Row | None = None, **options: Any
    ) -> None:
        """`options` as of `spawn`. `heartbeat`: the first number changes as long as the child runs;
        0: not yet.
        """
        self._child = spawn(module, *args, **options)
        self._heartbeat = heartbeat
        self._silence = Silence()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """Negative: the number of the signal that ended the child. None: it runs."""
        return self._child.poll()

    @property
    def pipe(self) -> IO[bytes]:
        """The child's standard input, on which poll() reports POLLERR when the child is gone."""
        assert self._child.stdin is not None
        return self._child.stdin

    @property
    def is_gone(self) -> bool:
        """Whether the child has closed its pipe; a device driver may delay its exit code."""
        if self.exit_code is not None:
            return True
        poller = select.poll()
        poller.register(self.pipe, 0)  # errors are always reported
        return bool(poller.poll(0))

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the child (Linux; elsewhere unknown, False)."""
        return is_stopped(self.pid)

    def silence(self) -> float:
        """Seconds since the child's last heartbeat. Single user, as of `Silence`."""
        assert self._heartbeat is not None
        return self._silence.seconds(self._heartbeat[0])

    def describe_end(self) -> str:
        """How a child that is gone has ended."""
        try:
            return f"exit code {self._child.wait(_EXIT_CODE_SECONDS)}"
        except subprocess.TimeoutExpired:  # the driver is still freeing its memory
            return "an exit code that is not known yet"

    def send(self, line: bytes) -> None:
        """Write a short line to the child's standard input; dropped if the child is gone."""
        with contextlib.suppress(OSError):
            self.pipe.write(line + b"\n")

    def kill(self) -> None:
        """Kill the child without waiting for its end."""
        self._child.kill()

    def kill_group(self) -> None:
        """Kill a child with a group of its own and all its descendants; wait for their end, for at
        most 5 s (the system reaps the children of a dead child).
        """
        # on macOS a group of zombies may not be signalled
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
            self._child.wait()
            deadline = time.monotonic() + _GROUP_END_SECONDS
            while time.monotonic() < deadline:
                os.killpg(self.pid, 0)
                time.sleep(0.01)

    def reap(self) -> None:
        """Wait for the end of the child and close its pipe."""
        self._child.wait()
        self.pipe.close()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the child. Return whether it has ended after `timeout` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout)
        return self.exit_code is not None


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process (Linux; elsewhere unknown, False)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def stop_children(children: Sequence[Supervised], *, timeout: float) -> None:
    """Give children that were told to end `timeout` seconds, then kill the remaining ones."""
    deadline = time.monotonic() + timeout
    for child in children:
        if not child.wait(max(0.0, deadline - time.monotonic())):
            for late in children:
                late.kill()
        child.reap()


@dataclass(frozen=True)
class SupervisionLimits:
    """When a silent process is killed, and how often a dead one is started again."""

    max_restarts: int = 0  # within `restart_window`; after that the process stays dead
    restart_window: float = 600.0  # seconds
    hang_timeout: float = 300.0  # seconds without progress while there is work


class RestartPolicy:
    """The recent deaths of one process. Pure: the time is an argument."""

    def __init__(self, limits: SupervisionLimits) -> None:
        self._limits = limits
        self._deaths: deque[float] = deque()

    def note_death(self, now: float) -> float | None:
        """Return the seconds until the next start after a death at `now`; None: give up."""
        while self._deaths and self._deaths[0] <= now - self._limits.restart_window:
            self._deaths.popleft()
        self._deaths.append(now)
        count = len(self._deaths)
        if count > self._limits.max_restarts:
            return None
        return 0.0 if count == 1 else min(_FIRST_PAUSE * 2.0 ** (count - 2), _LONGEST_PAUSE)


# In the children


def exit_with_parent() -> None:
    """End this process when the parent is gone, and ignore signals that ask to end or reload.

    Service managers and terminals send those to every process at once; the parent decides.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    def wait() -> None:
        await_parents_end()
        os._exit(1)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def await_parents_end() -> None:
    """Return when standard input, a pipe or socket that the parent holds, has ended."""
    with contextlib.suppress(ConnectionResetError):
        while os.read(0, 4096):
            pass


def exit_now(code: int) -> NoReturn:
    """End this process from any thread without teardown, which takes PyTorch 0.25 s."""
    os._exit(code)


@dataclass(frozen=True)
class ParentPulse:
    """Where process `pid` shows that its event loop runs, and how long it may fail to."""

    pid: int
    path: str  # of `SharedNumbers`; the first number is the heartbeat
    hang_seconds: float


def watch_parent(parent: ParentPulse, *, report: Callable[[str], object] | None = None) -> None:
    """Watch the parent in a thread. When it is silent for too long, call `report` with the reason;
    one second later kill the parent and end this process.

    As process 1 of a container the parent cannot be killed from inside; its children end all the
    same.
    """
    heartbeat = SharedNumbers(1, path=Path(parent.path)).row(0)

    def watch() -> None:
        silence = Silence()
        while silence.seconds(heartbeat[0]) <= parent.hang_seconds:
            time.sleep(_PARENT_LOOK_SECONDS)
        reason = f"the first server process sends no heartbeat for {parent.hang_seconds:g} s"
        logger.error("%s and is killed", reason)
        if report is not None:
            report(reason)
        time.sleep(_LAST_WORDS_SECONDS)
        if os.getppid() == parent.pid:
            os.kill(parent.pid, signal.SIGKILL)
        exit_now(1)

    threading.Thread(target=watch, name="parent-pulse", daemon=True).start()
