"""Settings for events of the prefix cache, with the keys of vLLM's `--kv-events-config`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from negamax.base.errors import ConfigError
from negamax.options.json_options import check_json, refuse_key

_FLAG = "--kv-events-config"
_refuse = partial(refuse_key, _FLAG)
_PUBLISHERS = ("zmq", "null")
_ADDRESS = re.compile(r"(tcp://(?:\[[^\]]+\]|[^:/\s]+)):(\d{1,5})|ipc://\S+")
_NO_PORT = -1  # Stands for the port of an ipc:// address, which has no port.
# The publisher listens at addresses that `_OWN` matches, and connects to all other addresses.
_OWN = re.compile(r"tcp://(\*|0\.0\.0\.0|\[::1?\]|localhost|127(\.\d+){3}):|ipc://")


@dataclass(frozen=True)
class KvEventsConfig:
    """Settings for publishing the KV cache events of a rank. `read` raises `ConfigError`."""

    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None  # None disables replay.
    buffer_steps: int = 10_000  # Number of latest event batches that are kept for replay.
    hwm: int = 100_000  # Maximum unsent event batches per subscriber; others are dropped.
    max_queue_size: int = 100_000  # Largest number of steps whose cache events are queued.
    topic: str = ""

    @staticmethod
    def read(given: Mapping[str, Any], *, num_ranks: int) -> "KvEventsConfig | None":
        """Read `--kv-events-config`. `num_ranks`: number of data-parallel ranks of all replicas.
        Return None if the option does not enable publishing.
        """
        check_json(_FLAG, given)
        known = {field.name for field in fields(KvEventsConfig)}
        is_enabled = given.get("enable_kv_cache_events")
        if type(is_enabled) not in (bool, type(None)):
            _refuse("enable_kv_cache_events", is_enabled, "true or false")
        publisher = given.get("publisher") or ("zmq" if is_enabled else "null")
        if publisher not in _PUBLISHERS:
            _refuse("publisher", publisher, " or ".join(_PUBLISHERS))
        if not isinstance(given.get("topic", ""), str):
            _refuse("topic", given["topic"], "a string")
        config = KvEventsConfig(**{key: value for key, value in given.items() if key in known})
        ports = [_check_address("endpoint", config.endpoint, num_ranks)]
        if config.replay_endpoint is not None:
            ports.append(_check_address("replay_endpoint", config.replay_endpoint, num_ranks))
            if not listens(config.replay_endpoint):
                _refuse("replay_endpoint", config.replay_endpoint, "an address of this machine")
        if len(ports) == 2 and _NO_PORT not in ports and abs(ports[0] - ports[1]) < num_ranks:
            raise ConfigError(
                f"{_FLAG}: the ports {ports[0]} and {ports[1]} overlap, because each of "
                f"{num_ranks} data-parallel ranks adds its number to both ports",
                hint=f"set ports that differ by {num_ranks} or more",
            )
        return config if publisher == "zmq" and is_enabled is not False else None

    def add_rank(self, rank: int) -> "KvEventsConfig":
        """Return the settings of a data-parallel rank; `rank` is counted over all replicas."""
        replay = self.replay_endpoint and _shift_port(self.replay_endpoint, rank)
        return replace(self, endpoint=_shift_port(self.endpoint, rank), replay_endpoint=replay)


def listens(endpoint: str) -> bool:
    """Return whether the publisher listens at `endpoint` instead of connecting to it."""
    return _OWN.match(endpoint) is not None


def is_endpoint(address: str) -> bool:
    """Return whether a subscriber can connect to `address`."""
    found = _ADDRESS.fullmatch(address)
    return found is not None and (not found[2] or (found[1] != "tcp://*" and int(found[2]) < 65536))


def _shift_port(endpoint: str, rank: int) -> str:
    """Add `rank` to the port of an address, as vLLM does."""
    found = _ADDRESS.fullmatch(endpoint)
    if found is None or found[2] is None:
        return f"{endpoint}_dp{rank}" if rank else endpoint
    return f"{found[1]}:{int(found[2]) + rank}"


def _check_address(key: str, address: object, num_ranks: int) -> int:
    """Check an address, and return its port, or `_NO_PORT` if the address is a path."""
    found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    port = int(found[2]) if found is not None and found[2] else _NO_PORT
    if found is None or (found[2] and not 1 <= port <= 65536 - num_ranks):
        _refuse(key, address, "tcp://HOST:PORT or ipc://PATH, with a port for each rank")
    return port
