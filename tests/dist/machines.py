"""Use network namespaces as machines, with a bridge or emulated links, and run agents on them."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from negamax.options.nodes import MASTER_PORT

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = Path(__file__).with_name("link_emulator.py")
START_SECONDS = 120.0
_PREFIX = "ngmx"  # prefix of interfaces and namespaces, before the process id


class Machines:
    """Run machine 0 in this process and the others in namespaces. Each machine has one address."""

    def __init__(self, count: int) -> None:
        number = os.getpid()
        self._prefix = f"{_PREFIX}{number}"
        self._subnet = f"10.{100 + number // 250 % 100}.{number % 250}"
        self.num_others = count - 1

    def set_up(self) -> None:
        bridge = self.interface
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{self.address(0)}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for machine in range(1, self.num_others + 1):
            space, here = self._space(machine), f"{self._prefix}v{machine}"
            _ip("netns", "add", space)
            _ip("link", "add", here, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", here, "master", bridge, "up")
            _ip("-n", space, "addr", "add", f"{self.address(machine)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "link", "set", "eth0", "up")

    port = MASTER_PORT
    options: tuple[str, ...] = ()  # further options of each node

    @property
    def interface(self) -> str:
        return f"{self._prefix}br"

    def address(self, machine: int) -> str:
        return f"{self._subnet}.{machine + 1}"

    def set_link(self, machine: int, state: str) -> None:
        """Set the cable of a machine to "up" or "down"."""
        _ip("link", "set", f"{self._prefix}v{machine}", state)

    def command(self, machine: int) -> list[str]:
        return ["ip", "netns", "exec", self._space(machine)] if machine else []

    def set_port_range(self, machine: int, first: int, last: int) -> None:
        """Set the range from which the system of another machine assigns ports."""
        line = f"echo {first} {last} > /proc/sys/net/ipv4/ip_local_port_range"
        subprocess.run([*self.command(machine), "sh", "-c", line], check=True)

    def listening_ports(self, machine: int) -> set[int]:
        """Return the TCP and UDP ports on which the programs of another machine listen."""
        command = [*self.command(machine), "ss", "--no-header", "-lntu"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return {int(line.split()[4].rpartition(":")[2]) for line in listed.splitlines()}

    def remove(self) -> None:
        self._remove_spaces()
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", self.interface)

    def _remove_spaces(self) -> None:
        for machine in range(1, self.num_others + 1):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", self._space(machine))

    def _space(self, machine: int) -> str:
        return f"{self._prefix}n{machine}"


class DistantMachines(Machines):
    """Join machines by `link_emulator`, which counts packets per link ("0-1")."""

    def set_up(self) -> None:
        words = [f"{self.interface}::{self.address(0)}"]
        for machine in range(1, self.num_others + 1):
            space = self._space(machine)
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            words.append(f"{self._prefix}t{machine}:{space}:{self.address(machine)}")
        command = [sys.executable, str(EMULATOR), *words]
        pipe = subprocess.PIPE
        self._emulator = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self._lock = threading.Lock()  # locks a line and its answer
        assert self._emulator.stdout is not None and self._emulator.stderr is not None
        if not self._emulator.stdout.readline():
            error = self._emulator.stderr.read()
            raise subprocess.CalledProcessError(self._emulator.wait(), command, stderr=error)

    @property
    def interface(self) -> str:
        return f"{self._prefix}t0"

    def set_links(
        self, *, source: int | None = None, target: int | None = None, **settings: Any
    ) -> dict[str, list[int]]:
        """Change settings from `source` to `target` (None: all). Return the packet counts."""
        emulator = self._emulator
        assert emulator.stdin is not None and emulator.stdout is not None
        message = {"source": source, "target": target, **settings}
        with self._lock:
            emulator.stdin.write(json.dumps(message) + "\n")
            emulator.stdin.flush()
            counts: dict[str, list[int]] = json.loads(emulator.stdout.readline())
        return counts

    def set_link(self, machine: int, state: str) -> None:
        self.set_links(source=machine, cut=state == "down")
        self.set_links(target=machine, cut=state == "down")

    def remove(self) -> None:
        if hasattr(self, "_emulator"):
            self._emulator.communicate()  # The process ends when its input ends.
        self._remove_spaces()


class OneMachine:
    def __init__(self, port: int, reason: str) -> None:
        self.port = port  # first port of node 0
        self.reason = reason  # reason for the lack of namespaces

    def address(self, machine: int) -> str:
        return "127.0.0.1"

    def command(self, machine: int) -> list[str]:
        return []

    @property
    def options(self) -> tuple[str, ...]:
        return "--interface", "lo", "--master-port", str(self.port)


_Made = TypeVar("_Made", bound=Machines)


@contextlib.contextmanager
def machines(count: int, kind: type[_Made] = Machines) -> Iterator[_Made]:  # type: ignore[assignment]
    """Make machines. Raises `NoMachinesError` with the reason if that is not possible."""
    if shutil.which("ip") is None:
        raise NoMachinesError("no network namespaces here: there is no `ip` (Debian: iproute2)")
    made = kind(count)
    try:
        _remove_abandoned()
        try:
            made.set_up()
        except subprocess.CalledProcessError as error:
            raise NoMachinesError(f"no network namespaces here: {error.stderr.strip()}") from None
        yield made
    finally:
        made.remove()


class NoMachinesError(Exception):
    """Raised if this machine cannot make network namespaces."""


class Agent:
    def __init__(
        self,
        network: Machines | OneMachine,
        node: int,
        *options: str,
        model: str = "nano",
        **variables: str,
    ) -> None:
        """Start the agent with `options`, or with the address and node rank of `node`."""
        if not {"--data-parallel-address", "--dist-init-addr"}.intersection(options):
            options = ("--node-rank", str(node), "--master-addr", network.address(0), *options)
        command = [
            *network.command(node), sys.executable, "-m", "negamax", "serve", model,
            "--device", "cpu", "--num-threads", "1", *network.options, *options,
        ]  # fmt: skip
        pipes = dict.fromkeys(("stdin", "stdout"), subprocess.DEVNULL) | {"stderr": subprocess.PIPE}
        place: dict[str, Any] = {"cwd": ROOT, "env": os.environ | variables, **pipes}
        self.process = subprocess.Popen(command, text=True, start_new_session=True, **place)
        self.log = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line

    def wait_for(self, text: str, *, seconds: float = START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.log:
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.log}"
            time.sleep(0.02)

    def end(self, *, seconds: float = 20.0) -> int:
        return self.process.wait(seconds)

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _remove_abandoned() -> None:
    for listed, kind in ((_ip("-o", "link"), ("link",)), (_ip("netns"), ("netns",))):
        for name, pid in set(re.findall(rf"\b({_PREFIX}(\d+)(?:br|n\d+))\b", listed)):
            if not Path(f"/proc/{pid}").exists():
                with contextlib.suppress(subprocess.CalledProcessError):
                    _ip(*kind, "del", name)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
