"""Emulate slow, lossy or broken links between machines, for kernels without netem.

    python tests/dist/link_emulator.py DEVICE:NAMESPACE:ADDRESS ...

For each machine, create a TUN device with the address (IPv4, /24) in the network namespace
(default: the current one), and carry packets between the machines. Each line of standard input is
JSON such as {"source": 0, "target": 1, "delay": 0.1, "loss": 0.05}. Without source or target the
line applies to all links. After each line and after startup, print the packets carried and dropped
per link: {"0-1": [120, 6]}. The emulator needs Linux, root and the standard library.
"""

import contextlib
import fcntl
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

_SET_DEVICE = 0x400454CA  # TUNSETIFF
_TUN, _NO_INFO = 0x0001, 0x1000  # flags for IP packets without a header of four bytes
_TCP, _UDP, _SYN, _ACK = 6, 17, 0x02, 0x10
_BATCH = 64  # packets of one machine that are sent before those of the next
_MOST_BYTES = 65536
_SEED = 47


@dataclass(frozen=True)
class Settings:
    delay: float = 0.0  # seconds
    jitter: float = 0.0  # seconds, uniform; packets keep their order
    loss: float = 0.0  # share of packets
    rate: float = 0.0  # bits per second; 0: no limit
    queue: float = 0.1  # longest wait in seconds at a limited rate; further packets are dropped
    cut: bool = False  # The link carries nothing.
    # A firewall drops TCP connections and datagrams to other ports than these pairs of first and
    # last port; empty: all ports are open.
    open_ports: Sequence[Sequence[int]] = ()


class Link:
    def __init__(self, device: int, *, seed: int) -> None:
        self.settings = Settings()
        self.num_carried = self.num_dropped = 0
        self._device = device
        self._random = random.Random(seed)
        self._free_at = 0.0  # end of the last transmission at the limited rate
        self._waiting: deque[tuple[float, bytes]] = deque()  # (due, packet), in order

    def take(self, packet: bytes, now: float) -> None:
        settings = self.settings
        is_lost = self._random.random() < settings.loss
        if settings.cut or is_lost or (settings.open_ports and self._is_shut_out(packet)):
            self.num_dropped += 1
            return
        sent_at = now
        if settings.rate:
            sent_at = max(now, self._free_at) + 8 * len(packet) / settings.rate
            if sent_at > now + settings.queue:
                self.num_dropped += 1
                return
            self._free_at = sent_at
        due = sent_at + settings.delay + self._random.uniform(-settings.jitter, settings.jitter)
        if self._waiting:
            due = max(due, self._waiting[-1][0])
        self._waiting.append((due, packet))

    def _is_shut_out(self, packet: bytes) -> bool:
        head = 4 * (packet[0] & 15)
        begins = packet[9] == _TCP and packet[head + 13] & (_SYN | _ACK) == _SYN
        if not begins and packet[9] != _UDP:
            return False
        port = int.from_bytes(packet[head + 2 : head + 4], "big")
        return not any(first <= port <= last for first, last in self.settings.open_ports)

    def deliver(self, now: float) -> float | None:
        while self._waiting and self._waiting[0][0] <= now:
            _, packet = self._waiting.popleft()
            self.num_carried += 1
            with contextlib.suppress(OSError):  # The device of the target is down.
                os.write(self._device, packet)
        return self._waiting[0][0] if self._waiting else None


class Emulator:
    """Emulate all links. The number of a machine is the last number of its address, less 1."""

    def __init__(self, devices: list[int]) -> None:
        self._devices = devices
        self.links = {
            (source, target): Link(devices[target], seed=_SEED + 100 * source + target)
            for source, target in permutations(range(len(devices)), 2)
        }

    def run(self) -> None:
        control = sys.stdin.fileno()
        os.set_blocking(control, False)
        poller = select.poll()
        for descriptor in (control, *self._devices):
            poller.register(descriptor, select.POLLIN)
        sources = {device: machine for machine, device in enumerate(self._devices)}
        self._say()
        text, next_due = b"", None
        while True:
            wait = None if next_due is None else max(0.0, 1000 * (next_due - time.monotonic()))
            for descriptor, event in poller.poll(wait):
                if descriptor != control:
                    self._read(descriptor, sources[descriptor], event)
                    continue
                if not (read := os.read(control, _MOST_BYTES)):
                    return
                *lines, text = (text + read).split(b"\n")
                for line in lines:
                    self._set(json.loads(line))
                    self._say()
            now = time.monotonic()
            dues = [link.deliver(now) for link in self.links.values()]
            next_due = min((due for due in dues if due is not None), default=None)

    def _read(self, device: int, source: int, event: int) -> None:
        if not event & select.POLLIN:  # The device is down.
            time.sleep(0.001)
            return
        for _ in range(_BATCH):
            try:
                packet = os.read(device, _MOST_BYTES)
            except OSError:
                return
            target = packet[19] - 1 if packet[0] >> 4 == 4 else -1  # IPv6 packets are dropped.
            link = self.links.get((source, target))
            if link is not None:
                link.take(packet, time.monotonic())

    def _set(self, message: dict[str, Any]) -> None:
        ends = message.pop("source", None), message.pop("target", None)
        for link_ends, link in self.links.items():
            if all(wanted in (None, end) for wanted, end in zip(ends, link_ends, strict=True)):
                link.settings = replace(link.settings, **message)

    def _say(self) -> None:
        counts = {
            f"{source}-{target}": [link.num_carried, link.num_dropped]
            for (source, target), link in self.links.items()
        }
        print(json.dumps(counts), flush=True)


def open_device(name: str, namespace: str, address: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _SET_DEVICE, struct.pack("16sH22x", name.encode(), _TUN | _NO_INFO))
    space = []
    if namespace:  # The descriptor stays valid when the device moves.
        _ip("link", "set", name, "netns", namespace)
        space = ["-n", namespace]
    _ip(*space, "addr", "add", f"{address}/24", "dev", name)
    _ip(*space, "link", "set", name, "up")
    return descriptor


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def main(machines: list[str]) -> int:
    try:
        devices = [open_device(*machine.split(":")) for machine in machines]
    except subprocess.CalledProcessError as error:
        print(error.stderr.strip(), file=sys.stderr)
        return 1
    except OSError as error:
        print(f"/dev/net/tun: {error.strerror}", file=sys.stderr)
        return 1
    Emulator(devices).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
