"""Settings for prefill and decode on different engines, with the keys of vLLM's
`--kv-transfer-config`.
"""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from negamax.base.errors import ConfigError
from negamax.options.flags import flag_name
from negamax.options.json_options import check_json, refuse_key

PRODUCER, CONSUMER, BOTH = "kv_producer", "kv_consumer", "kv_both"
ROLES = (PRODUCER, CONSUMER, BOTH)
RECOMPUTE, FAIL = "recompute", "fail"
NIXL, TCP = "nixl", "tcp"
LANES = {"NixlConnector": NIXL, "NixlPullConnector": NIXL, "TcpConnector": TCP}  # to transport
PORT = 5600  # The default port of vLLM's NIXL side channel.
HOST_GIB = 4.0  # Main memory for KV blocks, in GiB, if no other option sets the size.

_FLAG = "--kv-transfer-config"
_refuse = partial(refuse_key, _FLAG)
# accepted connectors that move blocks within one engine only and need the role kv_both
_ELSEWHERE = ("OffloadingConnector", "MultiConnector")
# Negamax lacks these connectors of vLLM. With the role kv_both, the server ignores the option.
_STORES = (
    "FlexKVConnectorV1",
    "HF3FSKVConnector",
    "LMCacheConnectorV1",
    "LMCacheMPConnector",
    "MooncakeStoreConnector",
    "SimpleCPUOffloadConnector",
)
_LOOPBACK = ("127.0.0.0/8", "::1", "localhost")
_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_SPLITS = (
    "num_replicas",
    "nnodes",
    "data_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
)


def read_offloading(fields: Mapping[str, Any]) -> tuple[float | None, str | None]:
    """Return the main memory in GiB and the file folder that vLLM's OffloadingConnector sets for KV
    blocks.
    """
    extra = fields.get("kv_connector_extra_config")
    if fields.get("kv_connector") != "OffloadingConnector" or not isinstance(extra, Mapping):
        return None, None
    num_bytes, tiers = extra.get("cpu_bytes_to_use"), extra.get("secondary_tiers")
    if not isinstance(num_bytes, int) or num_bytes <= 0:
        return None, None
    folders = [
        tier.get("root_dir")
        for tier in (tiers if isinstance(tiers, list) else ())
        if isinstance(tier, Mapping) and tier.get("type") == "fs"
    ]
    return num_bytes / 2**30, next((each for each in folders if isinstance(each, str)), None)


@dataclass(frozen=True)
class KvTransferConfig:
    """Settings for exchanging KV blocks between engines. `read` parses `--kv-transfer-config`."""

    role: str = BOTH  # One of ROLES.
    lane: str = NIXL  # NIXL or TCP, the transport of the blocks.
    host: str = "127.0.0.1"  # Address of this machine that the other engines can reach.
    port: int = PORT  # Port for the messages between engines.
    failure_policy: str = FAIL  # If a prompt does not arrive, FAIL or RECOMPUTE the request.
    # `lease_seconds`: how long a prompt is kept after the last message of the reading engine.
    lease_seconds: float = 30.0
    timeout_seconds: float = 120.0  # Time limit of each phase of a transfer.
    allowed_hosts: tuple[str, ...] = ()  # Hosts of prefill servers; () allows private addresses.
    transport: str | None = None  # The only transport that NIXL may use; None: UCX chooses.

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def hosts_of_others(self) -> tuple[str, ...]:
        """Return the names, addresses and networks of prefill servers that a request may name."""
        default = _LOOPBACK if self.is_loopback else (*_LOOPBACK, *_PRIVATE)
        return self.allowed_hosts or default

    @staticmethod
    def read(fields: Mapping[str, Any]) -> "KvTransferConfig | None":
        """Read `--kv-transfer-config`, where null means a missing key. Return None if the connector
        does not connect engines. Raises `ConfigError`.
        """
        given = {key: value for key, value in fields.items() if value is not None}
        connector, role = given.get("kv_connector", "NixlConnector"), given.get("kv_role", BOTH)
        if (connector, role) == ("lmcache_offload", "offload"):  # ATOM's names
            return None
        if role not in ROLES:
            _refuse("kv_role", role, ", ".join(ROLES))
        if not isinstance(connector, str):
            _refuse("kv_connector", connector, ", ".join(LANES))
        if connector not in LANES:
            for nested in _list_connectors(given) if connector == "MultiConnector" else ():
                if str(nested.get("kv_connector")) in LANES:
                    return KvTransferConfig.read({"kv_role": role, **nested})
            if connector not in (*_ELSEWHERE, *_STORES) or role != BOTH:
                _refuse("kv_connector", connector, ", ".join((*LANES, *_ELSEWHERE)))
            return None
        check_json(_FLAG, given)
        extra = given.get("kv_connector_extra_config", {})
        check_json(f"{_FLAG} kv_connector_extra_config", extra)
        host = given.get("kv_ip", "127.0.0.1")
        try:
            ipaddress.ip_address(host if isinstance(host, str) else "")
        except ValueError:
            _refuse("kv_ip", host, "an IPv4 or IPv6 address of this machine")
        hosts = extra.get("allowed_hosts", [])
        if not isinstance(hosts, list) or not all(map(_is_host, hosts)):
            _refuse("allowed_hosts", hosts, "a list of addresses, networks and names")
        lane, transport = LANES[connector], extra.get("transport")
        if transport is not None and lane != NIXL:
            _refuse("transport", transport, "no value, because only NixlConnector has transports")
        return KvTransferConfig(
            role,
            lane,
            host,
            port=given.get("kv_port", PORT),
            failure_policy=given.get("kv_load_failure_policy", FAIL),
            allowed_hosts=tuple(hosts),
            transport=transport,
            **{name: float(extra[name]) for name in extra if name.endswith("_seconds")},
        )


def _list_connectors(fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the nested connectors of vLLM's MultiConnector."""
    extra = fields.get("kv_connector_extra_config")
    listed = extra.get("connectors") if isinstance(extra, Mapping) else None
    found = listed if isinstance(listed, list) else []
    return [each for each in found if isinstance(each, Mapping)]


def allows_host(allowed: Sequence[str], host: str, address: str | None) -> bool:
    """Return whether `allowed` contains the name, the address or a network of a host. If the
    address is not known yet (None), the host is allowed.
    """
    if host.lower() in (each.lower() for each in allowed) or address is None:
        return True
    parsed = ipaddress.ip_address(address.partition("%")[0])
    parsed = getattr(parsed, "ipv4_mapped", None) or parsed
    networks = [_read_network(each) for each in allowed]
    return any(network is not None and parsed in network for network in networks)


def _read_network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        return None


def _is_host(given: object) -> bool:
    """Return whether an entry is a valid network, address or host name."""
    if not isinstance(given, str):
        return False
    is_name = _NAME.fullmatch(given) is not None and not given.replace(".", "").isdigit()
    return is_name or _read_network(given) is not None


def check_one_engine(options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless `options` use one engine with tensor parallelism only."""
    refused = [f"{flag_name(name)} {options[name]}" for name in _SPLITS if options[name] > 1]
    if options["script"] is not None:
        refused.append("--script")
    if refused:
        raise ConfigError(
            f"{_FLAG} supports only tensor-parallel ranks of one engine on one machine, not "
            f"{refused[0]}",
            hint="start several servers, and give all their URLs to `negamax route`",
        )
