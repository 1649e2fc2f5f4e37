"""Read KV blocks with NIXL, over RDMA or another transport of UCX. The extra `pd` installs NIXL.

The memory of all host blocks is registered once. If both engines have equal tensor-parallel sizes,
a descriptor covers a block's layers in one kind of cache. Otherwise, a descriptor covers one layer.
"""

import time
import uuid
from collections.abc import Sequence
from logging import WARNING, getLogger

import numpy as np
import zmq
from numpy.typing import NDArray

from negamax.base.errors import ConfigError
from negamax.worker import lane_wire as wire
from negamax.worker.host_pool import HostPool
from negamax.worker.lanes import STALL_SECONDS, HeadCopy, HostKind, LaneError, TcpMover

_POLL_SECONDS = 0.0005
_DRAM = "DRAM"


class NixlMover:
    """Copies blocks with NIXL. Only the import thread of a `Lane` may use a mover."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], kinds: list[HostKind], pool: HostPool
    ) -> None:
        """Raises `ConfigError` if NIXL is not installed or does not start."""
        try:
            from nixl._api import nixl_agent, nixl_agent_config

            getLogger("nixl").setLevel(WARNING)  # NIXL logs to stdout.
            self._agent = nixl_agent(uuid.uuid4().hex, nixl_agent_config(backends=["UCX"]))
            self._registered = self._agent.register_memory(pool.host)
        except Exception as error:  # NIXL raises many exception types
            raise ConfigError(
                f"--kv-transfer-config selects NIXL, which does not start: {error}",
                hint="install negamax[pd], or use the kv_connector TcpConnector",
            ) from None
        self._kinds, self._messages = kinds, TcpMover(context, kinds)
        self._peers: dict[str, tuple[str, wire.Description]] = {}  # endpoint -> (agent, memory)
        layouts = [
            wire.KindLayout(memory.data_ptr(), kind.blocks.shape)
            for kind, memory in zip(kinds, pool.host, strict=True)
        ]
        self.description = wire.Description(self._agent.get_agent_metadata(), layouts)

    def fetch(self, endpoint: str, parts: Sequence[HeadCopy], command: wire.ImportBlocks) -> None:
        self._messages.send(endpoint, wire.ReadBlocks([], [], command.remote_step))
        self._messages.receive(endpoint)  # the peer replies when its host blocks are complete
        agent, description = self._find_peer(endpoint)
        own, theirs = self.description.kinds, description.kinds
        pairs = []
        for part in parts:
            here, there, count = own[part.kind], theirs[part.kind], part.num_heads
            local = _describe_heads(here, command.places, part.own_head, count)
            remote = _describe_heads(there, command.remote_places, part.remote_head, count)
            if here.shape[2] == there.shape[2] == count:  # a block's layers are adjacent in memory
                local, remote = (_join_layers(each, here.shape[1]) for each in (local, remote))
            pairs.append((local, remote))
        local, remote = (np.concatenate(each) for each in zip(*pairs, strict=True))
        self._read(local, remote, agent)

    def close(self) -> None:
        self._messages.close()
        self._agent.deregister_memory(self._registered)

    def _find_peer(self, endpoint: str) -> tuple[str, wire.Description]:
        if endpoint not in self._peers:
            self._messages.send(endpoint, wire.Describe())
            (frame,) = self._messages.receive(endpoint)
            description = wire.description_decoder.decode(frame.bytes)
            name = self._agent.add_remote_agent(description.agent)
            text = name.decode() if isinstance(name, bytes) else str(name)
            self._peers[endpoint] = text, description
        return self._peers[endpoint]

    def _read(self, local: NDArray[np.uint64], remote: NDArray[np.uint64], agent: str) -> None:
        """Read blocks and wait. A call that failed with `LaneError` writes no blocks."""
        transfer = self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(local, _DRAM),
            self._agent.get_xfer_descs(remote, _DRAM),
            agent,
        )
        end = time.monotonic() + STALL_SECONDS
        state = self._agent.transfer(transfer)
        while state == "PROC":
            time.sleep(_POLL_SECONDS)
            state = self._agent.check_xfer_state(transfer)
            if state == "PROC" and time.monotonic() > end:
                try:
                    self._agent.release_xfer_handle(transfer)  # this cancels the transfer
                except Exception:  # the transfer goes on, so wait for its end
                    end = time.monotonic() + STALL_SECONDS
                    continue
                raise LaneError(f"NIXL did not read the KV blocks within {STALL_SECONDS:.0f} s")
        self._agent.release_xfer_handle(transfer)
        if state != "DONE":
            raise LaneError("NIXL could not read the KV blocks")


def _describe_heads(
    layout: wire.KindLayout, places: list[int], first: int, count: int
) -> NDArray[np.uint64]:
    """For each block and layer, return (address, bytes, device) of `count` heads from `first` on,
    as [blocks * layers, 3] uint64.
    """
    _, layers, heads, words = layout.shape
    rows = np.add.outer(np.array(places) * layers, np.arange(layers)).reshape(-1)
    found = np.zeros((len(rows), 3), np.uint64)
    found[:, 0] = layout.address + 8 * words * (rows * heads + first)
    found[:, 1] = 8 * words * count
    return found


def _join_layers(descriptors: NDArray[np.uint64], layers: int) -> NDArray[np.uint64]:
    """Join the descriptors of a block's layers, which are adjacent in memory."""
    joined = descriptors[::layers].copy()
    joined[:, 1] *= layers
    return joined
