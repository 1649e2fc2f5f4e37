import contextlib
import ipaddress
from pathlib import Path

from tests.e2e.conftest import Server

_LISTEN = "0A"  # number of the state in /proc/net/tcp


def process_tree(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):  # one list per thread
        with contextlib.suppress(OSError):  # The process has ended.
            children += map(int, task.read_text().split())
    return [pid, *(member for child in children for member in process_tree(child))]


def unexpected_addresses(server: Server) -> tuple[set[str], set[str]]:
    """Return public and loopback addresses on which `server` listens, except the configured one."""
    configured = server.url.removeprefix("http://")
    addresses = set[str]().union(*map(_listening, process_tree(server.process.pid))) - {configured}
    hosts = {address: ipaddress.ip_address(address.rpartition(":")[0]) for address in addresses}
    local = {address for address, host in hosts.items() if host.is_loopback}
    return addresses - local, local


def _listening(pid: int) -> set[str]:
    found = set[str]()
    inodes = _sockets(pid)
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in inodes:
                found.add(_address(fields[1]))
    return found


def _sockets(pid: int) -> set[str]:
    targets = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # The descriptor is closed.
            targets.append(str(entry.readlink()))
    return {
        target.removeprefix("socket:[").removesuffix("]")
        for target in targets
        if target.startswith("socket:")
    }


def _address(text: str) -> str:
    """Convert an address of /proc/net/tcp to host:port.

    The kernel writes the host in 32-bit words in native byte order.
    """
    words, _, port = text.partition(":")
    packed = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
    return f"{ipaddress.ip_address(packed)}:{int(port, 16)}"
