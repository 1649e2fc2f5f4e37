from __future__ import annotations

import ctypes
import logging
import re
import threading
from contextlib import ExitStack, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from negamax import LLM, SamplingParams
from negamax.base.errors import ConfigError, ResourceError
from negamax.config.kv_cache import KvCacheSpec
from negamax.options.transfer import NIXL, TCP
from negamax.scheduler.step import NewRow, StepPlan
from negamax.worker import block_loader, host_pool, lane_wire, lanes, nixl_probe
from negamax.worker.config import LaneOptions
from negamax.worker.host_pool import HostPool
from negamax.worker.kv_cache import allocate
from negamax.worker.lane_wire import HeadRange, ImportBlocks, ImportDone, ReadBlocks
from negamax.worker.lanes import HostKind, Lane, plan_reads
from negamax.worker.nixl_probe import check_nixl
from negamax.worker.node_sockets import connect
from tests.copy_support import CPU, check_copies, make_plan, make_pool, read_block
from tests.loop_driver import admitted, drive, free_all, generate_tokens, read_tokens
from tests.probes import needs_nixl
from tests.tables import read_table

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LONGER = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
# The numbers are prompt tokens and KV blocks. Two sessions do not fit into the blocks together.
SIZES = {"nano": (300, 32), "nano-m3": (900, 10)}


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 331, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def start(model: str, **options: Any) -> LLM:
    sizes = {"num_kv_blocks": SIZES[model][1], "max_model_len": 1024, "max_num_seqs": 4}
    return LLM(model, **{"num_threads": 1, "kv_offloading_size": 0.1, **sizes, **options})


def draft_options(model: str, **more: Any) -> dict[str, Any]:
    config = {"method": "eagle3", "model": f"{model}-draft", "num_speculative_tokens": 3}
    return {"speculative_config": config | more}


@pytest.mark.parametrize("has_draft", [False, True])
@pytest.mark.parametrize("model", SIZES)
def test_a_returning_session_is_loaded_and_gives_the_same_text(model: str, has_draft: bool) -> None:
    length, num_blocks = SIZES[model]
    options = draft_options(model) if has_draft else {}
    turns = [prompt(seed, length) for seed in range(3)]
    with start(model, **options, num_kv_blocks=None, kv_offloading_size=None) as plain:
        expected = [plain.generate([turn], GREEDY)[0] for turn in turns]
    with start(model, **options) as llm:
        first = [llm.generate([turn], GREEDY)[0] for turn in turns]
        size = llm._loop._scheduler.limits.block_size
        kept = length // size * size
        assert num_blocks < 2 * (length // size) and not any(one.num_cached_tokens for one in first)
        again = [llm.generate([turn], GREEDY)[0] for turn in turns]
        assert [one.num_cached_tokens for one in again] == [kept] * 3
        for one, two, three in zip(first, again, expected, strict=True):
            assert one.outputs[0].token_ids == two.outputs[0].token_ids
            assert one.outputs[0].token_ids == three.outputs[0].token_ids
        stats = llm.stats()
        assert stats.num_host_hits >= 2 * kept and stats.num_host_loads >= 2 * kept // size
        assert stats.cached_prompt_tokens == 3 * kept
        if has_draft:  # The caches of the draft were loaded, too.
            assert stats.num_accepted_tokens > 0
        free_all(llm)


def test_a_small_host_pool_evicts_and_keeps_the_text() -> None:
    prompts = [prompt(seed, 300) for seed in range(5)]
    with start("nano", num_kv_blocks=64, kv_offloading_size=None) as plain:
        expected = [generate_tokens(plain, [one], GREEDY)[0] for one in prompts]
    with start("nano", kv_offloading_size=None, kv_offloading_ratio=1.5) as llm:
        for _ in range(2):
            assert [generate_tokens(llm, [one], GREEDY)[0] for one in prompts] == expected
        stats = llm.stats()
        assert stats.num_used_host_blocks <= stats.num_host_blocks == 48
        assert stats.num_host_evictions > 50
        free_all(llm)


@pytest.mark.parametrize("overlap", [True, False])
def test_preemption_aborts_and_a_reset_keep_the_text(overlap: bool) -> None:
    prompts = [prompt(seed, 130 + seed) for seed in range(6)]
    with start("nano", num_kv_blocks=200, kv_offloading_size=None) as plain:
        expected = generate_tokens(plain, prompts, LONGER)
    with start("nano", enable_overlap=overlap, num_kv_blocks=36) as llm:
        assert generate_tokens(llm, prompts, LONGER) == expected
        for prefix in (1, 2, 3):  # The request is aborted before, during or after the load.
            requests = admitted(llm, prompts, [LONGER] * 6)
            first = drive(llm, requests, num_steps=prefix)
            llm._loop.abort([request.request_id for request in requests[::2]])
            updates = drive(llm, ())
            for request, tokens in list(zip(requests, expected, strict=True))[1::2]:
                name = request.request_id
                assert read_tokens(first[name] + updates.get(name, [])) == tokens
        free_all(llm)
        assert llm.stats().num_host_loads > 20 and llm.stats().preemption_count > 0
        llm._loop.reset_prefix_cache()
        assert llm.stats().num_used_host_blocks == 0
        assert llm.generate(prompts[:1], GREEDY)[0].num_cached_tokens == 0
        free_all(llm)


@pytest.mark.parametrize("piece", [1, 2, 100])
def test_copies_move_exactly_their_blocks(piece: int) -> None:
    check_copies(CPU, piece)


@pytest.mark.parametrize(("most", "num_copies"), [(block_loader.MAX_PITCH, 3), (0, 6)])
def test_2d_copies_move_exactly_their_blocks(
    most: int, num_copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the rows of the copies on the CPU, where CUDA's function does not exist."""
    monkeypatch.setattr(block_loader, "MAX_PITCH", most)
    caches, pool = make_pool(6)
    before = [read_block(caches, block) for block in range(9)]
    pool.run(make_plan(0, [7, 2], [4, 5], [], []))
    kinds = zip(pool._caches, pool.host, strict=True)
    planes = [plane for kind in kinds for plane in block_loader.split_planes(*kind)]
    for cache, pitch, host, stride, width, rows in planes:
        for row in range(rows):
            source = host + 5 * stride + row * width
            ctypes.memmove(cache + 3 * width + row * pitch, source, width)
    before[3] = before[2]
    assert [read_block(caches, block) for block in range(9)] == before and len(planes) == num_copies


def test_a_wait_for_a_load_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace CUDA events, so that the test decides when a copy is complete."""
    launches, events = [block_loader.Launch() for _ in range(2)], [Event(), Event()]
    monkeypatch.setattr(host_pool, "AWAIT_SECONDS", 0.05)
    batches = tuple(host_pool._Batch(step, launch) for step, launch in enumerate(launches, 5))
    progress = host_pool.LoadProgress(2, batches, is_awaited=True)
    assert progress.read() == 2  # No load is launched.
    for launch, event in zip(launches, events, strict=True):
        launch.set_result(event)  # type: ignore[arg-type]
    assert progress.read() == 2
    events[1].is_complete = True
    assert progress.read() == 2
    events[0].is_complete = True
    assert progress.read() == 6


class Event:
    is_complete = False

    def query(self) -> bool:
        return self.is_complete


def test_a_step_waits_for_copies_of_blocks_that_it_uses() -> None:
    _, pool = make_pool(4)
    waits: list[int] = []

    class Waiting(Event):
        def wait(self) -> None:
            waits.append(len(waits))

    def count(*rows: Any, appended: tuple[int, ...] = ()) -> int:
        waits.clear()
        slots = list(range(len(appended)))
        pool.run(StepPlan(9, list(rows), slots, list(appended), [], [], [], []))
        return len(waits)

    launch = block_loader.Launch()
    launch.set_result(Waiting())  # type: ignore[arg-type]
    pool._batches.append(host_pool._Batch(1, launch, frozenset({4, 5}), frozenset({6})))

    def row(num_computed: int, *blocks: int) -> Any:
        return NewRow(0, [1] * 12, 12, num_computed, list(blocks), SamplingParams())

    assert count(row(4, 6, 1)) == 1  # The row reads a block that is loaded.
    assert count(row(4, 4, 5)) == 1  # The row writes a block that is stored.
    assert count(row(8, 4, 5, 1)) == 0  # The row only reads blocks that are stored.
    assert count(row(0, 1, 2), appended=(3,)) == 0
    assert count(appended=(5,)) == 1


@pytest.mark.parametrize(
    ("options", "words"), read_table("host_pool.options_that_cannot_work_are_refused")
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM("nano", **{"kv_offloading_size": 1.0, **options})


@pytest.mark.parametrize(
    ("size", "error", "words"),
    [
        (60000.0, ResourceError, "are available.*use --kv-offloading-size [0-9.]+ or less"),
        (1e-9, ConfigError, "less than one KV block.*or more"),
    ],
)
def test_a_size_out_of_bounds_is_refused(size: float, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as raised:
        start("nano", kv_offloading_size=size)
    assert re.search(words, str(raised.value), re.DOTALL)


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
            pool = HostPool(caches, NUM_BLOCKS, block_size=4, device=CPU)
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


def test_a_start_without_nixl_is_refused(tmp_path: Path) -> None:
    if find_spec("nixl"):
        pytest.skip("NIXL is installed here")
    with pytest.raises(ConfigError, match=r"negamax\[pd\]"):
        EngineLanes(tmp_path / "a", 1, None, NIXL)
    with pytest.raises(ConfigError, match=r"No module named 'nixl' \(install negamax\[pd\]"):
        check_nixl(None)


@pytest.mark.parametrize(
    ("transport", "lane", "is_allowed"),
    [
        ("rdma", "48% on rc_mlx5/mlx5_0:1 and 52% on rc_mlx5/mlx5_1:1", True),
        ("rdma", "tcp/eth0", False),
        ("shm", "cma/memory", True),
        ("shm", "tcp/lo", False),
    ],
)
def test_the_last_row_of_ucxs_table_is_the_lane(
    transport: str, lane: str, is_allowed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a log that has UCX's form, because few machines have RDMA or NIXL."""
    table = f"""remote memory write by ucp_put* from host memory to host |
| 0..inf | zero-copy | tcp/eth1 |
remote memory read by ucp_get*(multi) into host memory from host |
| 0..8184  | copy-out  | tcp/eth1 |
| 8185..inf | zero-copy | {lane}  |"""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{table}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("UCX_TLS", "all")  # so that the value is restored after the test
    monkeypatch.setattr(nixl_probe.sys, "executable", str(program))
    expected = nullcontext() if is_allowed else pytest.raises(ConfigError, match=f"by {lane} ")
    with expected:
        check_nixl(transport)


@needs_nixl
def test_nixl_reads_by_the_given_transport_or_the_start_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UCX_TLS", "all")  # so that the value is restored after the test
    with caplog.at_level(logging.INFO):
        for transport, lane in (("tcp", "tcp/"), ("shm", "(cma|posix|sysv)/")):
            check_nixl(transport)
            assert re.search(f"NIXL reads memory of this machine by {lane}", caplog.text)
    monkeypatch.setitem(nixl_probe._TRANSPORTS, "shm", ("tcp,self", ("cma", "posix", "sysv")))
    with pytest.raises(ConfigError, match=r"transport shm, but UCX reads by tcp/.*rdma, shm"):
        check_nixl("shm")
    if not Path("/sys/class/infiniband").exists():
        with pytest.raises(
            ConfigError, match=r"with transport rdma, but .* no usable transports/devices"
        ):
            check_nixl("rdma")


@needs_nixl
def test_nixl_copies_blocks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
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
    assert "NIXL" not in capfd.readouterr().out  # `serve` must print its ready message first.
