"""Reserve machines of a Ray cluster and run their agents. This module runs in its own process.

The process reads `EngineOptions` from standard input, and writes `Placed` or `Failed` to a pipe.
When standard input ends, the process ends the agents and releases the machines.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from negamax.base import env, log
from negamax.base.errors import ConfigError, NegamaxError, ResourceError
from negamax.base.log import get_logger
from negamax.base.supervision import await_parents_end, exit_now
from negamax.config.embedded import EMBEDDED, EMBEDDED_DRAFTS
from negamax.engine.nodes.placement import ClusterNode, RayPlacement, Resources, make_placement
from negamax.engine.nodes.ray_agent import ActorPlace, RayAgent, carried_variables
from negamax.engine.nodes.ray_launcher import CONNECT_SECONDS, Failed, FromDriver, Placed, plan_node
from negamax.options.engine import EngineOptions
from negamax.worker.rank_process import LOOPBACK

logger = get_logger("negamax.engine.nodes.ray_driver")  # Here `__name__` may be "__main__".

_CURRENT = "ray/ray_current_cluster"  # File in which `ray start` stores the cluster's address.
_PROBE_SECONDS = 5.0
_POLL_SECONDS = 0.5  # Time between two searches for free machines.
_GROUP_SECONDS = 5.0  # Longest wait for one reservation by Ray.
_REMINDER_SECONDS = 10.0
_LEAVE_SECONDS = 1.0  # Longest wait for the agents to end.
_END_SECONDS = 10.0  # Time from the end of standard input to a forced exit.
# `_OWN_CLUSTER`: options of `ray.init` for a cluster of this process, which needs little memory.
_OWN_CLUSTER = {"include_dashboard": False, "object_store_memory": 100 * 2**20}
_MAX_MESSAGE = 300  # Largest number of characters of a Ray message.
_PIN = 0.001  # Amount requested of this machine's Ray resource "node:", so that node 0 runs here.


class Driver:
    """Machines and agents of an engine on Ray. Only the thread that makes the driver calls Ray."""

    def __init__(self, options: EngineOptions, stop: threading.Event) -> None:
        """Create the driver of one engine. Another thread sets `stop` when the engine has ended."""
        self._options = options
        self._stop = stop
        self.is_connected = False
        self._group: Any = None
        self._actors: list[Any] = []
        self._places: list[ActorPlace] = []

    def connect(self) -> None:
        """Join the running cluster, or start a cluster on this machine. Raises `ConfigError`."""
        env.set_default("RAY_USAGE_STATS_ENABLED", "0")
        address = find_cluster()
        if address is None:
            # Without this variable, Ray would listen on all interfaces.
            env.set_variable("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
            logger.info("no Ray cluster runs here; starting a cluster of this machine alone")
        import ray

        try:
            ray.init(
                address=address or "local",
                logging_level="warning",
                log_to_driver=self._options.log_format == "text",
                **(_OWN_CLUSTER if address is None else {}),
            )
        except (ray.exceptions.RayError, RuntimeError, ValueError, OSError) as error:
            message = " ".join(str(error).split())[:_MAX_MESSAGE]
            raise ConfigError(f"Ray at {address or 'this machine'} reports: {message}") from None
        self.is_connected = True
        _ignore_signals()

    def place(self) -> RayPlacement:
        """Reserve machines and start a `RayAgent` on each machine. Raises `ResourceError`."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        placement, count = self._reserve()
        share = placement.share(count)
        # Actors need this path to import this package.
        path = env.get("PYTHONPATH")
        # On node 0, the actor only reserves the GPUs of this machine.
        self._actors = [
            ray.remote(RayAgent)
            .options(
                num_cpus=share.cpus,
                num_gpus=share.gpus,
                runtime_env={} if path is None else {"env_vars": {"PYTHONPATH": path}},
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
            )
            .remote()
            for bundle in range(count)
        ]
        for number, actor in enumerate(self._actors):
            try:
                found = ray.get(actor.place.remote(), timeout=CONNECT_SECONDS)
            except ray.exceptions.RayError as error:
                raise ResourceError(f"node {number} does not start: {_last_line(error)}") from None
            self._places.append(msgspec.json.decode(found, type=ActorPlace))
        for number, place in enumerate(self._places):
            gpus = "; ".join(f"{name}={value}" for name, value in place.variables.items())
            logger.info(
                "Ray has placed node %d on %s%s",
                number,
                place.host,
                f" ({gpus})" if share.gpus else "",
            )
        return placement

    def placed(self, placement: RayPlacement) -> Placed:
        has_gpus = placement.device == "cuda"
        interface = LOOPBACK if placement.is_on_loopback else None
        return Placed(
            nnodes=len(self._actors),
            device=placement.device,
            master_addr=placement.master_addr,
            interface=self._options.interface or interface,
            variables=self._places[0].variables if has_gpus else {},
        )

    def run_agents(self, placed: Placed) -> Iterator[str]:
        """Run agents until `stop` is set. Yield a message for each agent that ends by itself."""
        import ray

        variables = carried_variables()
        options = make_paths_absolute(self._options)
        runs = {}
        for number, actor in enumerate(self._actors[1:], start=1):
            text = msgspec.json.encode(plan_node(options, placed, node=number)).decode()
            runs[actor.run.remote(text, variables)] = f"node {number} ({self._places[number].host})"
        while not self._stop.is_set():
            ended, _ = ray.wait(list(runs), timeout=_POLL_SECONDS) if runs else ([], [])
            for run in ended:
                name = runs.pop(run)
                try:
                    reason = ray.get(run)
                except ray.exceptions.RayError as error:
                    reason = _last_line(error)
                if reason:
                    logger.error("%s: %s", name, reason)
                yield f"{name}: {reason or 'the agent was stopped'}"
            if not runs:
                self._stop.wait()
        if runs:
            ray.wait(list(runs), num_returns=len(runs), timeout=_LEAVE_SECONDS)

    def close(self) -> None:
        if not self.is_connected:
            return
        import ray

        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        ray.shutdown()

    def _reserve(self) -> tuple[RayPlacement, int]:
        """Reserve free machines. Raises `ResourceError` after --ray-placement-timeout seconds."""
        import ray

        seconds = self._options.ray_placement_timeout
        deadline, logged_at = time.monotonic() + seconds, float("-inf")
        while True:
            own = ray.get_runtime_context().get_node_id()
            placement = make_placement(self._options, cluster_nodes(), own)
            count = placement.choose()
            if count is not None:
                share = placement.share(count)
                bundle = {"CPU": share.cpus} | ({"GPU": share.gpus} if share.gpus else {})
                bundles = [dict(bundle) for _ in range(count)]
                bundles[0][f"node:{placement.own.address}"] = _PIN
                self._group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
                if self._group.wait(_GROUP_SECONDS):
                    return placement, count
                ray.util.remove_placement_group(self._group)
                self._group = None
            now = time.monotonic()
            if now > deadline:
                raise placement.refusal(seconds)
            if now > logged_at + _REMINDER_SECONDS:
                logged_at = now
                logger.info(
                    "waiting for free machines in the Ray cluster; needed: %s; available: %s",
                    placement.demand,
                    placement.available,
                )
            if self._stop.wait(_POLL_SECONDS):
                raise ResourceError("the engine stopped before Ray reserved machines")


def find_cluster() -> str | None:
    """Return the address of the running Ray cluster, or None. Raises `ConfigError`."""
    given = env.get("RAY_ADDRESS") or ""
    if given == "local":
        return None
    if "://" in given:
        raise ConfigError(
            f"RAY_ADDRESS is {given}, but node 0 must be a machine of the cluster",
            hint="run `negamax serve` on a machine of the cluster, with RAY_ADDRESS=auto",
        )
    is_named = given not in ("", "auto")
    current = Path(env.get("RAY_TMPDIR") or "/tmp") / _CURRENT
    address = given if is_named else current.read_text().strip() if current.exists() else ""
    if address and _answers(address):
        return address
    if given:
        raise ConfigError(
            f"RAY_ADDRESS is {given}, and no Ray cluster answers"
            + (f" at {address}" if address and not is_named else ""),
            hint="start a cluster with `ray start --head`, or unset RAY_ADDRESS",
        )
    return None


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        raise ConfigError(f"RAY_ADDRESS is {address[:60]}; allowed: HOST:PORT, auto, local")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS).close()
    except (OSError, OverflowError):
        return False
    return True


def cluster_nodes() -> list[ClusterNode]:
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        ClusterNode(
            node["NodeID"],
            node["NodeManagerAddress"],
            total=_resources(node["Resources"]),
            available=_resources(free.get(node["NodeID"], {})),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def make_paths_absolute(options: EngineOptions) -> EngineOptions:
    """Make the options' paths absolute, for processes that run in another folder. Keep the name of
    a built-in model, even if a folder has the same name.
    """

    def whole(path: str | None) -> str | None:
        return str(Path(path).absolute()) if path and Path(path).exists() else path

    def whole_model(name: str) -> str:
        return name if name in EMBEDDED or name in EMBEDDED_DRAFTS else whole(name) or name

    draft = dict(options.speculative_config or {})
    if isinstance(draft.get("model"), str):
        draft["model"] = whole_model(draft["model"])
    return replace(
        options,
        model=whole_model(options.model),
        download_dir=whole(options.download_dir),
        weight_cache=whole(options.weight_cache),
        kv_offloading_path=whole(options.kv_offloading_path),
        speculative_config=draft or None,
        show_progress=False,
    )


def _resources(listed: dict[str, float]) -> Resources:
    return Resources(gpus=listed.get("GPU", 0.0), cpus=listed.get("CPU", 0.0))


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:_MAX_MESSAGE] if lines else type(error).__name__


def _ignore_signals() -> None:
    """Ignore signals that the parent handles. Repeat the call after Ray has set its handlers."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _watch_parent(driver: Driver, stop: threading.Event) -> None:
    """When standard input ends, set `stop` and end this process within `_END_SECONDS`."""
    await_parents_end()
    stop.set()
    if driver.is_connected:
        time.sleep(_END_SECONDS)
    exit_now(1)


def main(fd: int) -> int:
    """Keep the reserved machines until standard input ends. Return the exit code."""
    _ignore_signals()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Ray prints output of workers to stdout.
    log.setup_as_parent()
    options = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineOptions)
    stop = threading.Event()
    driver = Driver(options, stop)
    threading.Thread(target=_watch_parent, args=(driver, stop), name="parent", daemon=True).start()

    def send(message: FromDriver) -> None:
        with contextlib.suppress(BrokenPipeError):  # The parent process has ended.
            os.write(fd, msgspec.json.encode(message) + b"\n")

    try:
        driver.connect()
        placed = driver.placed(driver.place())
        send(placed)
        for reason in driver.run_agents(placed):
            send(Failed(reason, exit_code=2))
    except NegamaxError as error:
        send(Failed(str(error), error.exit_code))
        return error.exit_code
    finally:
        driver.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
