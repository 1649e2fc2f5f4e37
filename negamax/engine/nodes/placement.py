"""Choose machines of a Ray cluster for the ranks of an engine, without importing Ray."""

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from negamax.base.errors import ConfigError, ResourceError
from negamax.options.engine import EngineOptions
from negamax.options.nodes import MOST_NODES

_SHOWN_NODES = 16  # Largest number of machines that an error message lists.


@dataclass(frozen=True)
class Resources:
    gpus: float
    cpus: float

    def holds(self, asked: "Resources") -> bool:
        return self.gpus >= asked.gpus and self.cpus >= asked.cpus

    def __str__(self) -> str:
        found = [f"{self.gpus:g} GPU{'s' * (self.gpus != 1)}"] if self.gpus else []
        return " and ".join([*found, f"{self.cpus:g} CPU{'s' * (self.cpus != 1)}"])


@dataclass(frozen=True)
class ClusterNode:
    id: str
    address: str
    total: Resources
    available: Resources

    def __str__(self) -> str:
        have, all_ = self.available, self.total
        gpus = f"{have.gpus:g} of {all_.gpus:g} GPUs, " if all_.gpus else ""
        return f"{self.address}: {gpus}{have.cpus:g} of {all_.cpus:g} CPUs"


@dataclass(frozen=True)
class RayPlacement:
    """Chooses machines of a Ray cluster for the ranks of an engine."""

    options: EngineOptions
    nodes: tuple[ClusterNode, ...]
    own: ClusterNode  # This machine, which runs the server and is node 0.

    @property
    def device(self) -> str:
        """Return "cuda" or "cpu". "auto" means "cuda" if the cluster has GPUs."""
        asked = self.options.device
        has_gpus = any(node.total.gpus for node in self.nodes)
        return ("cuda" if has_gpus else "cpu") if asked == "auto" else asked

    @property
    def master_addr(self) -> str:
        return self.options.master_addr or (
            "127.0.0.1" if self.is_on_loopback else self.own.address
        )

    @property
    def is_on_loopback(self) -> bool:
        """Return whether all nodes of the cluster are on this machine."""
        return ipaddress.ip_address(self.own.address).is_loopback

    def share(self, count: int) -> Resources:
        """Return the GPUs and CPUs that each of `count` nodes needs for its ranks."""
        ranks = self.options.parallel.num_ranks // count
        if self.device == "cuda":
            return Resources(gpus=ranks, cpus=ranks)
        return Resources(gpus=0, cpus=ranks * (self.options.num_threads or 1))

    def counts(self) -> list[int]:
        return [count for count in self._divisors() if self._objection(count) is None]

    def choose(self) -> int | None:
        return next((count for count in self.counts() if self._fits(count)), None)

    def refusal(self, seconds: float) -> ResourceError:
        """Return the error to raise if Ray has found no free machines within `seconds`."""
        return ResourceError(
            f"Ray has found no room for {self.options.parallel.num_ranks} ranks in {seconds:g} s; "
            f"needed: {self.demand}; available: {self.available}",
            hint=self._remedy(),
        )

    @property
    def demand(self) -> str:
        found = []
        for count in self.counts():
            each = "" if count == 1 else f"{count} machines with "
            found.append(f"{each}{self.share(count)}{' on this one' if count == 1 else ' each'}")
        return ", or ".join(found) + (", this one among them" if self.counts()[-1] > 1 else "")

    @property
    def available(self) -> str:
        others = [str(node) for node in self.nodes if node.id != self.own.id]
        listed = [f"this machine {self.own}", *others[: _SHOWN_NODES - 1]]
        more = len(others) + 1 - len(listed)
        return "; ".join(listed) + (f"; and {more} more" if more else "")

    def _divisors(self) -> Iterator[int]:
        if self.options.nnodes > 1:
            yield self.options.nnodes
            return
        ranks = self.options.parallel.num_ranks
        yield from (count for count in range(1, min(ranks, MOST_NODES) + 1) if ranks % count == 0)

    def _objection(self, count: int) -> ConfigError | None:
        """Return the error that the options raise with `count` nodes, or None for valid options."""
        try:
            replace(self.options.nodes, nnodes=count).check(self.options.parallel)
        except ConfigError as error:
            return error
        return None

    def _fits(self, count: int, *, if_idle: bool = False) -> bool:
        """Return whether `count` nodes have room now or, with `if_idle`, on idle machines."""
        share = self.share(count)
        room = [
            node.id
            for node in self.nodes
            if (node.total if if_idle else node.available).holds(share)
        ]
        return self.own.id in room and len(room) >= count

    def _remedy(self) -> str:
        counts = self.counts()
        if any(self._fits(count, if_idle=True) for count in counts):
            return "end programs that use the resources, or raise --ray-placement-timeout"
        for count in self._divisors():
            objection = self._objection(count)
            if objection is not None and objection.hint and self._fits(count, if_idle=True):
                return objection.hint
        for count in counts:
            share = self.share(count)
            able = [node.address for node in self.nodes if node.total.holds(share)]
            if len(able) >= count:
                return f"start this command on a machine with {share}, such as {able[0]}"
        return "use smaller sizes, or add machines to the cluster"


def make_placement(
    options: EngineOptions, nodes: Sequence[ClusterNode], own_id: str
) -> RayPlacement:
    """Create the placement of this machine. Raises `ResourceError` if `nodes` lacks `own_id`."""
    own = next((node for node in nodes if node.id == own_id), None)
    if own is None:
        raise ResourceError(
            "this machine is not in the Ray cluster", hint="run `ray start --address` here"
        )
    return RayPlacement(options, tuple(nodes), own)
