from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import zmq

from negamax.base.errors import ConfigError
from negamax.config.kv_cache import KvCacheSpec
from negamax.options.transfer import NIXL, TCP
from negamax.worker import lane_wire, lanes
from negamax.worker.config import LaneOptions
from negamax.worker.device import runtime_of
from negamax.worker.host_pool import HostPool
from negamax.worker.kv_cache import allocate
from negamax.worker.lane_wire import HeadRange, ImportBlocks, ImportDone, ReadBlocks
from negamax.worker.lanes import HostKind, Lane, plan_reads
from negamax.worker.node_sockets import connect

CPU = torch.device("cpu")
KEY, INDEX = KvCacheSpec("k", 4, 8), KvCacheSpec("index", 1, 16, dtype="float32")
COPIED = KvCacheSpec("copied", 2, 8, dtype="float8_e4m3fn", replicated=True)
SPECS = [[KEY, INDEX], [KEY], [KEY, INDEX], [COPIED]]
NUM_BLOCKS = 24


class EngineLanes:
    """Hold the lanes of an engine's ranks, which are threads of this process."""

    def __init__(self, folder: Path, ranks: int, host: str | None, kind: str = TCP) -> None:
        folder.mkdir()
        options = LaneOptions(kind, str(folder), host)
        self.lanes: list[Lane] = []
        self.sockets: list[zmq.Socket[bytes]] = []
        self.context = zmq.Context()
        for rank in range(ranks):
            caches = allocate(SPECS, 5, block_size=4, dtype=torch.bfloat16, ranks=ranks, device=CPU)
            pool = HostPool(caches, NUM_BLOCKS, block_size=4, device=CPU, runtime=runtime_of(CPU))
            self.lanes.append(Lane(pool, SPECS, caches, options, rank=rank, ranks=ranks))
            self.sockets.append(self.context.socket(zmq.DEALER))
            connect(self.sockets[-1], options.imports_endpoint(rank))

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()
        self.context.destroy(linger=0)

    def fill(self, whole: list[torch.Tensor]) -> None:
        """Fill each rank's part of caches [blocks, layers, heads, words] that hold all heads."""
        for kind, values in self.pair_with(whole):
            kind.blocks[:] = values

    def pair_with(self, whole: list[torch.Tensor]) -> list[tuple[HostKind, torch.Tensor]]:
        found = []
        for rank, lane in enumerate(self.lanes):
            for kind, values in zip(lane.kinds, whole, strict=True):
                heads = kind.heads_of(rank, len(self.lanes))
                found.append((kind, values[:, :, heads.start : heads.stop]))
        return found

    def import_from(self, other: EngineLanes, places: list[int], remote: list[int]) -> list[str]:
        command = ImportBlocks(3, places, -1, [lane.endpoint for lane in other.lanes], remote, -1)
        for socket in self.sockets:
            socket.send(lane_wire.encode(command))
        done = [lane_wire.done_decoder.decode(socket.recv()) for socket in self.sockets]
        assert all(isinstance(one, ImportDone) and one.number == 3 for one in done)
        return [one.problem for one in done]


def make_caches() -> list[torch.Tensor]:
    sizes = (3, 4, 8), (2, 1, 32), (1, 2, 4)  # layers, heads and words of a block, for each kind
    return [torch.randint(-(2**62), 2**62, (NUM_BLOCKS, *size)) for size in sizes]


@pytest.mark.parametrize(("source", "target"), [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (8, 2)])
@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_each_rank_reads_its_heads_of_every_kind(
    source: int, target: int, host: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_wire, "PIECE_BYTES", 2_000)  # The copy has several pieces.
    with ExitStack() as stack:
        first, second = (
            EngineLanes(tmp_path / name, ranks, host)
            for name, ranks in (("first", source), ("second", target))
        )
        stack.callback(first.close)
        stack.callback(second.close)
        whole, before = make_caches(), make_caches()
        first.fill(whole)
        second.fill(before)
        places = torch.randperm(NUM_BLOCKS)[:17].tolist()
        remote = torch.randperm(NUM_BLOCKS)[:17].tolist()
        assert second.import_from(first, places, remote) == [""] * target
        for cache, values in zip(before, whole, strict=True):
            cache[places] = values[remote]
        for kind, values in second.pair_with(before):
            assert torch.equal(torch.from_numpy(kind.blocks), values)


def test_a_rank_reads_each_head_once_and_copies_of_heads_from_different_ranks() -> None:
    blocks = make_caches()[0].numpy()
    kinds = [HostKind(KEY, blocks), HostKind(INDEX, blocks), HostKind(COPIED, blocks)]
    for ranks, peers in ((1, 4), (4, 1), (2, 4), (8, 4), (4, 8), (16, 2)):
        asked = set()
        for rank in range(ranks):
            reads = plan_reads(kinds, rank=rank, ranks=ranks, peers=peers)
            for index, kind in enumerate(kinds):
                parts = [part for each in reads.values() for part in each if part.kind == index]
                ranges = [range(part.own_head, part.own_head + part.num_heads) for part in parts]
                heads = [head for each in ranges for head in each]
                assert heads == list(range(len(kind.heads_of(rank, ranks))))
            asked |= reads.keys()
        assert len(asked) == min(ranks, peers) or ranks < peers


def test_problems_of_a_copy_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "STALL_SECONDS", 0.5)
    first, second = EngineLanes(tmp_path / "a", 1, None), EngineLanes(tmp_path / "b", 1, None)
    try:
        whole = make_caches()
        first.fill(whole)
        for bad in (NUM_BLOCKS, -1):
            assert "Index" in second.import_from(first, [1], [bad])[0]
        (lane,) = first.lanes
        lane._pool._last_step = 3
        command = ImportBlocks(3, [1], -1, [lane.endpoint], [2], 4)
        second.sockets[0].send(lane_wire.encode(command))
        done = lane_wire.done_decoder.decode(second.sockets[0].recv())
        assert done.problem == "the blocks were not copied to main memory in time"
        threading.Timer(0.1, setattr, (lane._pool, "_last_step", 4)).start()
        second.sockets[0].send(lane_wire.encode(command))
        assert lane_wire.done_decoder.decode(second.sockets[0].recv()).problem == ""
        stranger = first.context.socket(zmq.DEALER)
        connect(stranger, lane.endpoint)
        stranger.send(b"\xc1")
        assert b"Error" in stranger.recv()
        ranges = [HeadRange(0, 0, 4)] * 100_000
        stranger.send(lane_wire.encode(ReadBlocks([0] * 1000, ranges, -1)))
        assert b"bytes exceeds the limit" in stranger.recv()
        assert second.import_from(first, [1], [2]) == [""]
        assert torch.equal(torch.from_numpy(second.lanes[0].kinds[0].blocks)[1], whole[0][2])
    finally:
        first.close()
    try:
        assert "has disconnected" in second.import_from(first, [1], [2])[0]
    finally:
        second.close()


def test_nixl_is_used_or_the_start_fails(tmp_path: Path) -> None:
    try:
        import nixl  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"negamax\[pd\]"):
            EngineLanes(tmp_path / "a", 1, None, NIXL)
        return
    for source, target in ((1, 1), (2, 1), (1, 2)):
        first = EngineLanes(tmp_path / f"a{source}{target}", source, None, NIXL)
        second = EngineLanes(tmp_path / f"b{source}{target}", target, None, NIXL)
        whole, before = make_caches(), make_caches()
        first.fill(whole)
        second.fill(before)
        assert second.import_from(first, [3, 1], [7, 9]) == [""] * target
        for cache, values in zip(before, whole, strict=True):
            cache[[3, 1]] = values[[7, 9]]
        for kind, values in second.pair_with(before):
            assert torch.equal(torch.from_numpy(kind.blocks), values)
        first.close()
        second.close()
