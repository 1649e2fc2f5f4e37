"""Find the address, interface and ports through which other nodes reach this machine."""

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from negamax.base import env
from negamax.base.errors import ConfigError, ResourceError
from negamax.options.nodes import KEY_VARIABLE, NodeOptions
from negamax.worker.node_sockets import has_key

# Variables that select interfaces for gloo and NCCL. A value may be a list or begin with "=".
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True)
class Place:
    address: str
    interface: str
    reason: str  # Reason why this interface was chosen.

    def __str__(self) -> str:
        return f"{self.address} on {self.interface} ({self.reason})"


class UnreachableError(Exception):
    """Node 0 cannot be resolved or reached. A later attempt may succeed."""


def resolve(host: str) -> str:
    """Resolve `host` to an address. Raises `UnreachableError`."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise UnreachableError(f"{host} cannot be resolved: {error}") from None
    return str(found[0][4][0])


def check_key(options: NodeOptions) -> None:
    """Raise `ConfigError` if nodes run on other machines and NEGAMAX_NODE_KEY is not set."""
    host = options.master_addr or ""
    if options.nnodes == 1 or has_key():
        return
    with contextlib.suppress(UnreachableError):
        if ipaddress.ip_address(resolve(host)).is_loopback:
            return
    raise ConfigError(
        f"{KEY_VARIABLE} is not set, and --master-addr is {host}: any program that reaches the "
        "ports of the nodes could join and read requests",
        hint=f"set {KEY_VARIABLE} to the same secret on all nodes, for example to the output of "
        "`openssl rand -hex 32`",
    )


def find_place_of_node_0(options: NodeOptions) -> Place:
    """Find the network interface whose address is --master-addr. Raises `ConfigError`."""
    host = options.master_addr or ""
    try:
        address = resolve(host)
    except UnreachableError as error:
        raise ConfigError(
            f"--master-addr: {error}", hint="set --master-addr to an address of this machine"
        ) from None
    own = _addresses()
    named, reason = _named_interface(options)
    holders = [name for name, addresses in own.items() if address in addresses]
    if not holders:
        others = [one for name, each in own.items() if name != "lo" for one in each]
        raise ConfigError(
            f"--master-addr is {host} ({address}), which is not an address of node 0",
            hint=f"use one of {', '.join(others)}" if others else "this machine has no network",
        )
    if named is not None and named not in holders:
        raise ConfigError(
            f"--master-addr is {host} ({address}) on {holders[0]}, but {reason} is {named}",
            hint=f"use {' or '.join(own.get(named, [])) or 'another interface'}",
        )
    if ipaddress.ip_address(address).is_loopback and named is None:
        raise ConfigError(
            f"--master-addr is {host} ({address}), which other machines cannot reach",
            hint=f"use another address of this machine; to run all nodes on this machine, add "
            f"--interface {holders[0]}",
        )
    return Place(address, holders[0], reason if named else "the interface has --master-addr")


def find_place_of_agent(options: NodeOptions, node_0: str) -> Place:
    """Find the interface that reaches `node_0`. Raises `ConfigError` or `UnreachableError`."""
    own = _addresses()
    named, reason = _named_interface(options)
    if named is not None:
        is_v6 = ":" in node_0
        fitting = [address for address in own.get(named, ()) if (":" in address) == is_v6]
        if not fitting:
            raise UnreachableError(f"{reason} is {named}, which has no address yet")
        return Place(fitting[0], named, reason)
    with socket.socket(
        socket.AF_INET6 if ":" in node_0 else socket.AF_INET, socket.SOCK_DGRAM
    ) as probe:
        try:
            probe.connect((node_0, options.master_port))  # Connecting a UDP socket sends nothing.
        except OSError as error:
            raise UnreachableError(f"no route to {node_0}: {error.strerror}") from None
        address = str(probe.getsockname()[0])
    holders = [name for name, addresses in own.items() if address in addresses]
    if not holders:
        raise ConfigError(f"no local interface has the address {address}", hint="set --interface")
    return Place(address, holders[0], "the route to --master-addr")


def check_ports(address: str, ports: Sequence[int]) -> None:
    """Raise `ResourceError` if a port cannot be used."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in ports:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except (OSError, OverflowError) as error:  # OverflowError: the port exceeds 65535.
                why = error.strerror if isinstance(error, OSError) else "the highest port is 65535"
                raise ResourceError(
                    f"port {port} on {address} cannot be used: {why}; the nodes need "
                    f"{len(ports)} ports, from --master-port {ports[0]} on",
                    hint="end the program on this port, or set another --master-port on all nodes",
                ) from None


def ephemeral_ports() -> str:
    """Return the range from which the system assigns ports to gloo and NCCL."""
    try:
        return "-".join(_PORT_RANGE.read_text().split())
    except OSError:
        return "1024-65535"


def _named_interface(options: NodeOptions) -> tuple[str | None, str]:
    """Return (interface, option or variable that names it), or (None, ""). Raises `ConfigError`."""
    found = [("--interface", options.interface or "")]
    found += [(name, env.get(name) or "") for name in _VARIABLES]
    known = [each for _, each in socket.if_nameindex()]
    for reason, value in found:
        name = value.split(",")[0].strip().removeprefix("=").split(":")[0]
        if not name or name.startswith("^"):
            continue
        # A value for gloo or NCCL may be a prefix of the interface's name.
        fitting = [name] if name in known else [each for each in known if each.startswith(name)]
        if not fitting or (reason == "--interface" and name not in known):
            raise ConfigError(
                f"{reason} is {value[:60]!r}, which this machine does not have",
                hint=f"use one of {', '.join(known)}",
            )
        return fitting[0], reason
    return None, ""


def _addresses() -> dict[str, list[str]]:
    """Return one IPv4 address and all IPv6 addresses of each interface."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for name, addresses in found.items():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asker.fileno(), _SIOCGIFADDR, request)
            except OSError:  # The interface has no IPv4 address.
                continue
            addresses.append(socket.inet_ntoa(answer[20:24]))
    listed = Path("/proc/net/if_inet6")
    for line in listed.read_text().splitlines() if listed.exists() else ():
        digits, *_, name = line.split()
        address = ipaddress.IPv6Address(bytes.fromhex(digits))
        if not address.is_link_local and name in found:
            found[name].append(str(address))
    return found
