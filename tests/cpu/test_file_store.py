from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from negamax import LLM, SamplingParams
from negamax.base.errors import ConfigError
from negamax.engine.core.source import locate
from negamax.engine.nodes.facts import collect_facts
from negamax.options.engine import EngineOptions
from negamax.scheduler.prefix_cache import BlockHashes
from negamax.scheduler.step import FileCopies, FileProgress
from negamax.worker import file_store
from negamax.worker.file_store import FileStore
from tests.cpu.test_host_pool import GREEDY, SIZES, draft_options, prompt, start
from tests.loop_driver import free_all, generate_tokens, token_ids

Harm = Callable[[Path], object]


def ended() -> None:
    """Return at once, because all copies of host blocks have ended."""


def list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/*") if path.is_file())


def count_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in list_files(folder))


def begin(folder: Path, model: str = "nano", **options: Any) -> LLM:
    sizes = {"kv_offloading_path": str(folder), "kv_offloading_path_size": 1.0}
    return start(model, **{**sizes, **options})


def expect(prompts: list[list[int]], model: str = "nano", **options: Any) -> list[list[int]]:
    with start(model, num_kv_blocks=None, kv_offloading_size=None, **options) as plain:
        return generate_tokens(plain, prompts, GREEDY)


@pytest.mark.parametrize("has_draft", [False, True])
@pytest.mark.parametrize("model", SIZES)
def test_a_session_returns_after_a_restart(model: str, has_draft: bool, tmp_path: Path) -> None:
    options = draft_options(model, adaptive=False) if has_draft else {}
    turns = [prompt(seed, SIZES[model][0]) for seed in range(3)]
    expected = expect(turns, model, **options)
    with begin(tmp_path, model, **options) as llm:
        size = llm._loop._scheduler.limits.block_size
        assert [generate_tokens(llm, [turn], GREEDY)[0] for turn in turns] == expected
    for _ in range(2):
        with begin(tmp_path, model, **options) as llm:
            again = [llm.generate([turn], GREEDY)[0] for turn in turns]
            assert token_ids(again) == expected
            kept = len(turns[0]) // size * size
            assert [one.num_cached_tokens for one in again] == [kept] * 3
            stats = llm.stats()
            assert stats.num_file_reads == 3 * kept // size
            block_bytes = llm.info.host_block_bytes + file_store._HEADER.size
            assert stats.num_file_bytes_read == stats.num_file_reads * block_bytes
            assert stats.num_file_errors == 0
            if has_draft:
                assert stats.num_accepted_tokens > 0
            free_all(llm)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def find_other(path: Path) -> Path:
    return next(other for other in path.parent.iterdir() if other != path)


HARMS: dict[str, Harm] = {
    "a byte of the keys": lambda path: flip(path, 70_001),
    "a byte of the header": lambda path: flip(path, 30),
    "its checksum": lambda path: flip(path, file_store._HEADER.size - 1),
    "its last byte": lambda path: flip(path, -1),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "cut in the header": lambda path: os.truncate(path, 20),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "of another block": lambda path: shutil.copy(find_other(path), path),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_file_is_a_miss_and_is_deleted(
    harm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    turn = prompt(1, 300)
    with begin(tmp_path) as llm:
        expected = generate_tokens(llm, [turn], GREEDY)
    before = count_bytes(tmp_path)
    block_hash = BlockHashes(turn, block_size=16, salt="")[7]
    (path,) = tmp_path.glob(f"*/{block_hash.hex()}")
    HARMS[harm](path)
    with begin(tmp_path) as llm:
        (again,) = llm.generate([turn], GREEDY)
        assert [again.outputs[0].token_ids] == expected
        assert again.num_cached_tokens == 7 * 16
        assert llm.stats().num_file_errors == 1
        assert f"{path} is damaged" in caplog.text
    assert count_bytes(tmp_path) == before  # written again
    with begin(tmp_path) as llm:
        assert llm.generate([turn], GREEDY)[0].num_cached_tokens == 288


def test_files_of_another_model_or_option_are_not_used(tmp_path: Path) -> None:
    turn = prompt(1, 300)
    with begin(tmp_path) as llm:
        llm.generate([turn], GREEDY)
    found = {path.parent for path in list_files(tmp_path)}
    others: list[tuple[str, dict[str, Any]]] = [
        ("nano-m3", {"num_kv_blocks": 16}),
        ("nano-m3", {"num_kv_blocks": 16, "index_cache_dtype": "fp8"}),
        ("nano", {"load_format": "synthetic"}),
        ("nano", {"load_format": "synthetic", "seed": 1}),
        ("nano", {"dtype": "float32"}),
        ("nano", {"block_size": 32}),
        ("nano", {"speculative_config": {"method": "eagle3", "model": "nano-draft"}}),
    ]
    for model, options in others:
        expected = expect([turn], model, **{k: v for k, v in options.items() if "blocks" not in k})
        with begin(tmp_path, model, **options) as llm:
            (made,) = llm.generate([turn], GREEDY)
            assert made.num_cached_tokens == 0 and token_ids([made]) == expected, options
        folders = {path.parent for path in list_files(tmp_path)}
        assert len(folders - found) == 1, options
        found |= folders


def test_files_moved_from_another_model_are_misses(tmp_path: Path) -> None:
    turn = prompt(1, 300)
    for seed in (1, 2):
        with begin(tmp_path, load_format="synthetic", seed=seed) as llm:
            expected = generate_tokens(llm, [turn], GREEDY)
    first, second = sorted({path.parent for path in list_files(tmp_path)}, key=os.path.getmtime)
    for path in first.iterdir():
        shutil.copy(path, second)  # The name is valid, since the tokens are the same.
    with begin(tmp_path, load_format="synthetic", seed=2) as llm:
        (made,) = llm.generate([turn], GREEDY)
        assert made.num_cached_tokens == 0 and token_ids([made]) == expected
        assert llm.stats().num_file_errors == 18


def test_the_bound_holds_and_the_least_recently_used_files_go(tmp_path: Path) -> None:
    prompts = [prompt(seed, 300) for seed in range(6)]
    expected = expect(prompts)
    most = 60 * 81_988
    options = {"kv_offloading_path_size": most / 2**30, "kv_offloading_size": 0.003}
    with begin(tmp_path, **options) as llm:
        for _ in range(2):
            for turn, tokens in zip(prompts, expected, strict=True):
                assert generate_tokens(llm, [turn], GREEDY) == [tokens]
                llm.generate([prompts[0]], GREEDY)  # The engine keeps files of this prompt.
                assert count_bytes(tmp_path) <= most
        stats = llm.stats()
        assert stats.num_file_evictions > 60 and stats.num_used_file_blocks <= 60
        free_all(llm)
    with begin(tmp_path, **options) as llm:
        cached = [llm.generate([turn], GREEDY)[0].num_cached_tokens for turn in prompts[:2]]
        assert cached == [288, 0]
    # Another engine with a smaller bound deletes files of this engine.
    with begin(tmp_path, "nano-m3", kv_offloading_path_size=most / 2**31):
        assert count_bytes(tmp_path) <= most // 2


def test_a_reset_of_the_prefix_cache_deletes_the_files(tmp_path: Path) -> None:
    turn = prompt(1, 300)
    with begin(tmp_path) as llm:
        for _ in range(2):
            assert llm.generate([turn], GREEDY)[0].num_cached_tokens == 0
            llm._loop.reset_prefix_cache()
            assert llm.stats().num_used_file_blocks == 0
        free_all(llm)
    assert not list_files(tmp_path)


def fail_writes(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    class FullDisk:
        """Stand in for a file on a disk that is full after some bytes."""

        def __init__(self, path: Path, *_: object, **__: object) -> None:
            self.stream = Path(path).open("wb", buffering=0)  # noqa: SIM115

        def __enter__(self) -> FullDisk:
            return self

        def __exit__(self, *_: object) -> None:
            self.stream.close()

        def write(self, data: memoryview) -> int:
            if self.stream.tell() > 40_000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.stream.write(data[:30_000])

    monkeypatch.setattr(file_store, "open", FullDisk, raising=False)


def refuse_opening(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", refuse)  # `open` of this module writes files.
    monkeypatch.setattr(file_store, "open", refuse, raising=False)  # This function writes files.


def remove_folder(_: pytest.MonkeyPatch, folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (fail_writes, "No space left"),
        (refuse_opening, "Permission denied"),
        (remove_folder, "No such file"),
    ],
)
def test_an_error_switches_the_files_off_with_one_warning(
    trouble: Callable[[pytest.MonkeyPatch, Path], None],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = [prompt(seed, 300) for seed in range(4)]
    expected = expect(prompts)
    folder = tmp_path / "files"
    with begin(folder) as llm:
        assert generate_tokens(llm, prompts[:2], GREEDY) == expected[:2]
    with begin(folder) as llm:
        assert llm.stats().num_used_file_blocks > 0
        with monkeypatch.context() as patch:
            trouble(patch, folder)
            for turn, tokens in zip(prompts[::-1], expected[::-1], strict=True):
                assert generate_tokens(llm, [turn], GREEDY) == [tokens]
            free_all(llm)
        assert not list(tmp_path.glob("*/*/*.part"))
        stats = llm.stats()
        assert stats.num_file_blocks == stats.num_used_file_blocks == 0 < stats.num_file_errors
        assert not llm._loop.has_work
        again = llm.generate(prompts, GREEDY)  # Host memory still works.
        assert [one.num_cached_tokens for one in again] == [288] * 4
    warnings = [each for each in caplog.records if each.levelno == logging.WARNING]
    (warning,) = (each for each in warnings if "no longer kept in files" in each.getMessage())
    assert words in warning.getMessage()


def test_two_engines_share_a_folder(tmp_path: Path) -> None:
    """Run two engines that write equal names at once, and delete files that the other knows."""
    prompts = [prompt(seed, 300) for seed in range(5)]
    expected = expect(prompts)
    options = {"kv_offloading_path_size": 50 * 81_988 / 2**30, "kv_offloading_size": 0.003}
    with begin(tmp_path, **options) as one, begin(tmp_path, **options) as two:

        def serve(llm: LLM, order: list[int]) -> None:
            for at in order:
                made[id(llm)].append(generate_tokens(llm, [prompts[at]], GREEDY)[0] == expected[at])

        made: dict[int, list[bool]] = {id(one): [], id(two): []}
        orders = ([0, 1, 2, 3, 4] * 3, [4, 0, 3, 1, 2] * 3)
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(serve, (one, two), orders))
        assert made == {id(one): [True] * 15, id(two): [True] * 15}
        for llm in (one, two):
            free_all(llm)
            assert llm.stats().num_file_blocks > 0 == llm.stats().num_file_errors
            assert llm.stats().num_file_evictions > 0
    assert count_bytes(tmp_path) <= 52 * 81_988


@pytest.fixture
def opened() -> Iterator[list[FileStore]]:
    stores: list[FileStore] = []
    yield stores
    for store in stores:
        store.close()


def open_store(
    folder: Path, opened: list[FileStore], *, facts: str = "", **options: Any
) -> tuple[list[np.ndarray], FileStore]:
    host = [np.random.randint(0, 256, (6, size), np.uint8) for size in (5000, 64)]
    given = {"most_bytes": 1 << 20, "rank": 0, "sharing": 1, "cleans": True, **options}
    store = FileStore(folder, facts=[facts], host=host, **given)
    opened.append(store)
    return host, store


def name(number: int) -> bytes:
    return bytes([number] * 32)


def write(*copies: tuple[int, int], used: tuple[int, ...] = ()) -> FileCopies:
    places, names = [place for place, _ in copies], [name(number) for _, number in copies]
    return FileCopies(places, names, [], [], [name(number) for number in used])


def read(*copies: tuple[int, int]) -> FileCopies:
    return FileCopies([], [], [name(number) for number, _ in copies], [at for _, at in copies])


def finish(store: FileStore) -> FileProgress:
    deadline = time.monotonic() + 60
    missing: list[bytes] = []
    while time.monotonic() < deadline:
        progress = store.report()
        missing += progress.missing
        if not store.is_busy:
            return msgspec.structs.replace(progress, missing=missing)
        time.sleep(0.001)
    raise AssertionError("the copies did not end")


def test_copies_wait_for_the_device_in_plan_order(tmp_path: Path, opened: list[FileStore]) -> None:
    host, store = open_store(tmp_path, opened)
    first, second = threading.Event(), threading.Event()
    store.run(write((1, 7), (2, 8)), 3, first.wait)
    store.run(read((9, 4)), 4, second.wait)
    store.run(read((9, 5)), 5, ended)
    assert store.is_busy and not store.has_news
    assert store.report() == FileProgress(0)
    host[0][1] = 200  # The copy of the device ends here.
    first.set()
    second.set()
    progress = finish(store)
    assert (progress.written_step, progress.read_step) == (3, 5)
    assert progress.missing == [name(9)] * 2
    store.run(read((7, 0), (8, 3)), 6, ended)
    assert finish(store).missing == []
    for kind in host:
        assert (kind[0] == kind[1]).all() and (kind[3] == kind[2]).all()
    assert (host[0][0] == 200).all()


def test_copies_that_stall_switch_the_files_off(
    tmp_path: Path, opened: list[FileStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler stops waiting for files and keeps a host block that may still change."""
    _, store = open_store(tmp_path, opened)
    stalled = threading.Event()
    store.run(read((9, 4)), 4, stalled.wait)
    assert not store.report().is_off
    monkeypatch.setattr(file_store, "STALL_SECONDS", 0.0)
    assert store.report() == FileProgress(0, is_off=True, num_errors=1)
    store.run(write((1, 7)), 5, ended)
    store.run(read((7, 2)), 6, ended)
    stalled.set()
    assert finish(store) == FileProgress(0, 6, 5, [name(9), name(7)], is_off=True, num_errors=1)
    assert not list_files(tmp_path)


def test_nodes_may_use_different_folders_but_all_or_none_keep_files() -> None:
    facts = []
    for folder in ("/a", "/b", None):
        options = EngineOptions("nano", kv_offloading_size=1.0, kv_offloading_path=folder)
        facts.append(collect_facts(options, locate(options), device="cpu"))
    assert facts[0] == facts[1] != facts[2]


def test_a_store_for_other_facts_finds_nothing(tmp_path: Path, opened: list[FileStore]) -> None:
    _, store = open_store(tmp_path, opened, facts="a")
    store.run(write((1, 7)), 1, ended)
    finish(store)
    _, other = open_store(tmp_path, opened, facts="b")
    assert other.found == [] and open_store(tmp_path, opened, facts="a")[1].found == [name(7)]
    other.run(read((7, 0)), 1, ended)
    assert finish(other).missing == [name(7)]


def test_scan_deletes_its_files_by_last_use(tmp_path: Path, opened: list[FileStore]) -> None:
    _, store = open_store(tmp_path, opened)
    store.run(write(*((number % 6, number) for number in range(8))), 1, ended)
    finish(store)
    folder = store._folder
    for number in range(8):
        os.utime(folder / name(number).hex(), (number, number))
    store.run(write(used=(2,)), 2, ended)
    foreign = [tmp_path / "notes" / name(0).hex(), tmp_path / "readme", folder / "readme"]
    parts = [folder / "old.part", folder / "new.part"]
    for path in (*foreign, *parts):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(5000))
    os.utime(parts[0], (1, 1))
    store.close()
    _, again = open_store(tmp_path, opened, most_bytes=5 * store.file_bytes)
    # new.part counts too, and 1/16 of the limit stays free, so only three block files remain.
    assert again.found == [name(number) for number in (6, 7, 2)]
    assert all(path.exists() for path in foreign)
    assert not parts[0].exists() and parts[1].exists()
    assert again.report().num_evicted == 6
    _, watching = open_store(tmp_path, opened, most_bytes=5 * store.file_bytes, cleans=False)
    assert watching.found == again.found


def test_the_scan_leaves_the_files_of_other_users_alone(
    tmp_path: Path, opened: list[FileStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, store = open_store(tmp_path, opened, facts="mine")
    store.run(write((1, 7)), 1, ended)
    finish(store)
    scan = file_store._scan

    def refuse_own(folder: Path) -> Iterator[Any]:
        assert folder != store._folder
        return scan(folder)

    monkeypatch.setattr(file_store, "_scan", refuse_own)
    owner = os.getuid()
    with monkeypatch.context() as patch:
        patch.setattr(file_store, "_make_private", lambda folder: folder.mkdir())
        patch.setattr(os, "getuid", lambda: owner + 1)
        _, other = open_store(tmp_path, opened, facts="yours", most_bytes=5200)
        assert other.found == []
    with pytest.raises(AssertionError):
        open_store(tmp_path, opened, facts="yours", most_bytes=5200)
    assert len(list_files(tmp_path)) == 1


def test_ranks_that_share_a_folder_share_its_bound(tmp_path: Path, opened: list[FileStore]) -> None:
    _, store = open_store(tmp_path, opened, sharing=4, most_bytes=8 * 5200)
    assert store.num_blocks == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("size", "less than one KV block.*use [0-9.e-]+ or more"),
        ("file", "cannot be used: .*choose a folder"),
        ("owner", "belongs to another user"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(
    change: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "files"
    if change == "file":
        folder.touch()
    if change == "owner":
        uid = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(ConfigError, match=words):
        begin(folder, kv_offloading_path_size=1e-6 if change == "size" else 1.0)
    with pytest.raises(ConfigError, match="add --kv-offloading-size"):
        begin(folder, kv_offloading_size=None)


def test_files_are_private(tmp_path: Path) -> None:
    with begin(tmp_path) as llm:
        llm.generate([prompt(1, 300)], SamplingParams(max_tokens=1))
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_ranks_share_files_only_if_they_hold_the_same_shard() -> None:
    with start("nano") as llm:
        runner = llm._loop.executor._worker.runner  # type: ignore[attr-defined]

        def facts(dtype: str = "bfloat16", block_size: int = 16, **sizes: int) -> tuple[str, ...]:
            layout = replace(runner.config.layout, **sizes)
            config = replace(runner.config, layout=layout, block_size=block_size)
            return tuple(file_store._list_facts(config, runner.kernels, dtype=dtype))

        different = [facts(), facts(dtype="float16"), facts(block_size=32)]
        axes = product(("tp", "pp", "cp"), (0, 1))
        different += [facts(**{axis: 2}, rank=rank) for axis, rank in axes]
        different += [facts(dp=2), facts(dp=2, ep=2)]
        assert len(set(different)) == len(different)
        assert facts(dp=2) == facts(dp=2, rank=1) and facts(tp=2, dp=2) == facts(tp=2, dp=2, rank=2)
