"""Start child processes, watch their pipes and heartbeats, restart and stop them.

Engines, ranks, grammar processes, server workers and Ray's driver are `Supervised` children. Child
processes call the functions in the second half of this module, to end when their parent ends.
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
_EXIT_CODE_SECONDS = 1.0  # Longest wait for the exit code of a child that closed its pipe.
_LONGEST_LOOK_SECONDS = 1.0  # One call of `Silence.seconds` adds at most this much silence.
_FIRST_PAUSE = 1.0  # Seconds before the second restart in a row; each restart doubles this time.
_LONGEST_PAUSE = 30.0
_PARENT_LOOK_SECONDS = 0.1
_LAST_WORDS_SECONDS = 1.0  # Time between reporting and killing a hung parent.


class Silence:
    """Measures the seconds since the last heartbeat of a process. Only one watcher calls `seconds`,
    several times a second. Each call adds at most `_LONGEST_LOOK_SECONDS`, so that a pause of the
    watcher does not count as silence of the process.
    """

    def __init__(self) -> None:
        self._heartbeat = 0.0
        self._seconds = 0.0
        self._last_look = time.monotonic()

    def seconds(self, heartbeat: float) -> float:
        """Return the seconds since `heartbeat` changed, or 0 while `heartbeat` is 0."""
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
    """Start `python -m module args`. If `own_group` is set, create a session and process group.

    The child inherits the open files `pass_fds`. `env.make_child_env` makes the child's
    environment, with `variables`. The child can log as its parent does (`log.setup_as_parent`). The
    child's standard input is an unbuffered pipe that ends when the parent ends.
    """
    added = {log.CHILD_VARIABLE: log.settings(), **(variables or {})}
    child_env = env.make_child_env(has_secrets=has_secrets, **added)
    return subprocess.Popen(
        [sys.executable, "-m", module, *args], bufsize=0, stdin=subprocess.PIPE,
        start_new_session=own_group, pass_fds=pass_fds, env=child_env,
    )  # fmt: skip


class Supervised:
    """A child process, from its start until `reap`."""

    def __init__(
        self, module: str, *args: str, heartbeat: Row | None = None, **options: Any
    ) -> None:
        """Start the child; `options` are passed to `spawn`. The running child keeps changing the
        first number of `heartbeat`, which is 0 before the first heartbeat.
        """
        self._child = spawn(module, *args, **options)
        self._heartbeat = heartbeat
        self._silence = Silence()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """Return the exit code (-N if signal N ended the child); None while the child runs."""
        return self._child.poll()

    @property
    def pipe(self) -> IO[bytes]:
        """Return the child's stdin. poll() reports POLLERR on the pipe when the child has ended."""
        assert self._child.stdin is not None
        return self._child.stdin

    @property
    def is_gone(self) -> bool:
        """Return whether the child has closed its pipe; its exit code may arrive later."""
        if self.exit_code is not None:
            return True
        poller = select.poll()
        poller.register(self.pipe, 0)  # poll() reports errors even for mask 0.
        return bool(poller.poll(0))

    def silence(self) -> float:
        """Return the seconds since the child's last heartbeat. Only one watcher calls `silence`."""
        assert self._heartbeat is not None
        return self._silence.seconds(self._heartbeat[0])

    def describe_end(self) -> str:
        """Describe the exit code of a child that has ended."""
        try:
            return f"exit code {self._child.wait(_EXIT_CODE_SECONDS)}"
        except subprocess.TimeoutExpired:  # The device driver is still freeing the child's memory.
            return "an exit code that is not known yet"

    def send(self, line: bytes) -> None:
        """Write a short line to the child's stdin. Drop the line if the child has ended."""
        with contextlib.suppress(OSError):
            self.pipe.write(line + b"\n")

    def kill(self) -> None:
        """Kill the child without waiting for its end."""
        self._child.kill()

    def kill_group(self) -> None:
        """Kill a child that was started with `own_group`, and all its descendants. Wait at most 5 s
        until the system has reaped the descendants.
        """
        # macOS raises PermissionError for a group of zombies.
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
        """Wait at most `timeout` seconds for the end of the child; return whether it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout)
        return self.exit_code is not None


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process. Return False on systems without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def stop_children(children: Sequence[Supervised], *, timeout: float) -> None:
    """Wait at most `timeout` seconds for `children` to end, then kill those that still run."""
    deadline = time.monotonic() + timeout
    for child in children:
        if not child.wait(max(0.0, deadline - time.monotonic())):
            for late in children:
                late.kill()
        child.reap()


@dataclass(frozen=True)
class SupervisionLimits:
    """Limits for killing silent processes and for restarting dead processes."""

    max_restarts: int = 0  # Largest number of restarts of a process within `restart_window`.
    restart_window: float = 600.0  # Period in which restarts are counted, in seconds.
    hang_timeout: float = 300.0  # Seconds without progress after which a busy process is killed.


class RestartPolicy:
    """Decides whether a dead process is restarted, based on the times of its recent deaths."""

    def __init__(self, limits: SupervisionLimits) -> None:
        self._limits = limits
        self._deaths: deque[float] = deque()

    def note_death(self, now: float) -> float | None:
        """Return the seconds from a death at `now` to the restart, or None to stop restarting."""
        while self._deaths and self._deaths[0] <= now - self._limits.restart_window:
            self._deaths.popleft()
        self._deaths.append(now)
        count = len(self._deaths)
        if count > self._limits.max_restarts:
            return None
        return 0.0 if count == 1 else min(_FIRST_PAUSE * 2.0 ** (count - 2), _LONGEST_PAUSE)


# Child processes call the functions below.


def exit_with_parent() -> None:
    """End this process when its parent has ended. Ignore SIGINT, SIGTERM and SIGHUP from now on.

    Terminals and service managers signal every process, but only the parent handles the signals.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    def wait() -> None:
        await_parents_end()
        os._exit(1)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def await_parents_end() -> None:
    """Wait until the parent has closed the pipe or socket that is this process's stdin."""
    with contextlib.suppress(ConnectionResetError):
        while os.read(0, 4096):
            pass


def exit_now(code: int) -> NoReturn:
    """End this process from any thread without teardown. PyTorch's teardown takes 0.25 s."""
    os._exit(code)


@dataclass(frozen=True)
class ParentPulse:
    """The heartbeat file of process `pid`, and the seconds without heartbeat that mean a hang."""

    pid: int
    path: str  # File of `SharedNumbers`, whose first number is the heartbeat.
    hang_seconds: float


def watch_parent(parent: ParentPulse, *, report: Callable[[str], object] | None = None) -> None:
    """Watch the parent's heartbeat in a thread. If the parent is silent for too long, call `report`
    with the reason. One second later, kill the parent and end this process.

    A parent that is process 1 of a container cannot be killed, so only this process ends.
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
