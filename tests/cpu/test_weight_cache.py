import logging
import math
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from m2_checkpoints import (
    FP8_CONFIG,
    SlotModel,
    load_weights,
    random_tensors,
    save_single,
    shapes,
    tiny_spec,
    to_fp8,
)
from safetensors import safe_open
from torch import Tensor

from negamax.checkpoint import weight_cache
from negamax.checkpoint.weight_cache import load_cached
from negamax.config.model_spec import ModelSpec
from negamax.engine.llm import LLM
from negamax.layers.weights import WeightSlot, slots_by_name
from negamax.parallel.layout import ParallelLayout
from negamax.scheduler.request import SamplingParams
from tests.layouts import full

SPEC = tiny_spec()
TENSORS = random_tensors(SPEC)
ONE = ParallelLayout()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    # Chunks are small and ragged, and more than the cache reads ahead.
    monkeypatch.setattr(weight_cache, "CHUNK_BYTES", 1000)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return save_single(folder, TENSORS)


def start(
    cache: Path,
    checkpoint: Path,
    model: Any = None,
    *,
    spec: ModelSpec = SPEC,
    layout: ParallelLayout = ONE,
) -> tuple[bool, dict[str, Tensor]]:
    """Load with a cache. Return whether the cache was used, and the weights."""
    model = model or SlotModel(spec)
    slots = model.weight_slots()
    line = load_cached(
        cache, slots, checkpoint=checkpoint, layout=layout,
        load=lambda: load_weights(slots, spec, checkpoint).summary(),
    )  # fmt: skip
    assert all(slot.written for slot in slots.values() if not slot.optional)
    return line.startswith("loaded weight cache "), model.parameters


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name], expected[name]) for name in expected)


def assert_loads(is_hit: bool, *arguments: Any, **options: Any) -> None:
    found, weights = start(*arguments, **options)
    assert found is is_hit and same(weights, TENSORS)


def the_file(cache: Path) -> Path:
    (file,) = (path for path in cache.rglob("*") if path.is_file())
    return file


def test_next_start_reads_the_cache_and_writes_nothing(tmp_path: Path, checkpoint: Path) -> None:
    cache = tmp_path / "cache"
    assert_loads(False, cache, checkpoint)
    file = the_file(cache)
    before = file.stat().st_mtime_ns, file.stat().st_ino
    assert_loads(True, cache, checkpoint)
    assert the_file(cache) == file
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == before
    # The cache is a safetensors file in the order of the model's slots.
    with safe_open(file, framework="pt") as opened:
        assert list(opened.keys()) and set(opened.keys()) == set(TENSORS)
        name = "model.layers.1.self_attn.q_proj.weight"
        assert torch.equal(opened.get_tensor(name).view(torch.float32), TENSORS[name].flatten())


class Fused:
    """Make eight slots that write into one parameter with gaps. One slot has no tensor."""

    def __init__(self, spec: ModelSpec) -> None:
        self.parameters: dict[str, Tensor] = {}
        slots, at = [], 0
        for number, (name, shape) in enumerate(shapes(spec).items()):
            at = at if number % 8 else 0
            memory = self.parameters.setdefault(f"{number // 8}", torch.zeros(60_000))
            target = memory[at : at + math.prod(shape)].view(shape)
            slots.append(
                WeightSlot(name, shape, target=target, optional=name == "model.norm.weight")
            )
            at += math.prod(shape) + 3
        scale = self.parameters["scale"] = torch.full((1,), 3.0)
        slots.append(WeightSlot("model.scale", (1,), target=scale, optional=True))
        self._slots = slots_by_name(slots)

    def weight_slots(self) -> dict[str, WeightSlot]:
        return self._slots


def test_fused_parameters_gaps_and_absent_tensors(tmp_path: Path, checkpoint: Path) -> None:
    first, second = Fused(SPEC), Fused(SPEC)
    start(tmp_path / "cache", checkpoint, first)
    second.parameters["scale"].fill_(5.0)
    is_hit, weights = start(tmp_path / "cache", checkpoint, second)
    assert is_hit and same(weights, first.parameters)
    assert not second.weight_slots()["model.scale"].written and weights["scale"] == 3.0
    assert second.weight_slots()["model.norm.weight"].written


def test_each_rank_has_its_own_file(tmp_path: Path, checkpoint: Path) -> None:
    for is_again in (False, True):
        for rank in (0, 1):
            model, layout = SlotModel(SPEC, rank=rank, size=2), ParallelLayout(rank=rank, tp=2)
            is_hit, weights = start(tmp_path / "cache", checkpoint, model, layout=layout)
            assert is_hit is is_again
            halves = {name: tensor.tensor_split(2)[rank] for name, tensor in TENSORS.items()}
            assert same(weights, halves)


def shared_memory() -> SlotModel:
    model = SlotModel(SPEC)
    slots = model.weight_slots()
    memory = torch.zeros(2, SPEC.hidden_size)
    for number, name in enumerate(n for n in slots if n.endswith("layernorm.weight")):
        if number < 2:
            slots[name] = WeightSlot(name, slots[name].shape, target=memory[number])
            model.parameters[name] = memory[number]
    return model


Change = Callable[[Path, pytest.MonkeyPatch], object]
CHANGES: dict[str, tuple[Change, Callable[[ModelSpec], SlotModel], str]] = {
    "time": (
        lambda folder, _: os.utime(folder / "model.safetensors", ns=(1, 1)), SlotModel, "checkpoint"
    ),
    "config": (
        lambda folder, _: (folder / "config.json").write_text('{"a": 1}'), SlotModel, "checkpoint"
    ),
    "description": (
        lambda folder, _: (folder / "hf_quant_config.json").write_text("{}"), SlotModel,
        "checkpoint",
    ),
    "version": (
        lambda _, patch: patch.setattr(weight_cache.env, "installed_version", lambda name: "0.0.1"),
        SlotModel, "version of Negamax",
    ),
    "dtype": (
        lambda *_: None, lambda spec: SlotModel(spec, dtype=torch.bfloat16), "dtype, model"
    ),
    "memory": (lambda *_: None, lambda spec: shared_memory(), "model"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_stale_file_is_replaced(
    tmp_path: Path,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    change, model, words = CHANGES[name]
    start(tmp_path / "cache", checkpoint)
    change(checkpoint, monkeypatch)
    caplog.clear()
    is_hit, weights = start(tmp_path / "cache", checkpoint, model(SPEC))
    assert not is_hit
    (line,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert line.endswith(f"the file was written for another {words}; loading the checkpoint")
    is_hit, again = start(tmp_path / "cache", checkpoint, model(SPEC))
    assert is_hit and same(again, weights)
    the_file(tmp_path / "cache")


def test_other_is_stale(tmp_path: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(tmp_path / "cache", checkpoint)
    fp8 = tiny_spec(quantization_config=FP8_CONFIG)
    save_single(checkpoint, to_fp8(TENSORS))
    assert not start(tmp_path / "cache", checkpoint, spec=fp8)[0]
    assert "the file was written for another checkpoint, format, model; loading" in caplog.text
    file = the_file(tmp_path / "cache")
    model = SlotModel(fp8, rank=1, size=2)
    file.rename(file.with_name(file.name.replace("rank0-tp1", "rank1-tp2")))
    layout = ParallelLayout(rank=1, tp=2)
    assert not start(tmp_path / "cache", checkpoint, model, spec=fp8, layout=layout)[0]
    assert "the file was written for another layout, model; loading" in caplog.text


def test_hub_snapshot_is_identified_by_its_commit(tmp_path: Path, checkpoint: Path) -> None:
    folder = tmp_path / "models--lab--model" / "snapshots" / ("0123456789" * 4)
    folder.parent.mkdir(parents=True)
    checkpoint.rename(folder)
    start(tmp_path / "cache", folder)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert start(tmp_path / "cache", folder)[0]
    assert the_file(tmp_path / "cache").parent.name == "lab--model"
    folder = folder.rename(folder.with_name("1234567890" * 4))
    assert not start(tmp_path / "cache", folder)[0]


@pytest.mark.parametrize(
    "damage",
    ["flip 0", "flip 200", "flip data", "flip gap", "cut 1", "keep 0", "keep 7", "longer",
     *map(full, ("flip 9", "flip 30", "flip 700", "flip 3000", "flip end", "cut 5000")),
     full("keep 100")],
)  # fmt: skip
def test_damaged_file_is_not_used(
    tmp_path: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    start(tmp_path / "cache", checkpoint)
    file = the_file(tmp_path / "cache")
    content = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    match damage.split():
        case ["flip", place]:
            at = {"data": begin, "gap": begin - 1, "end": len(content) - 1}.get(place)
            content[int(place) if at is None else at] ^= 1
        case ["cut", count]:
            del content[-int(count) :]
        case ["keep", count]:
            del content[int(count) :]
        case _:
            content += b"x"
    file.write_bytes(content)
    assert_loads(False, tmp_path / "cache", checkpoint)
    assert re.search("damaged|truncated|the checksum of|for another", caplog.text)
    assert_loads(True, tmp_path / "cache", checkpoint)


WRITE_AND_HANG = """
import sys, time
sys.path[:0] = sys.argv[1:2]
from pathlib import Path
from test_weight_cache import SPEC, SlotModel, start
from negamax.base.progress import Progress
def hang(self, done, total):
    if self._what.startswith("writing") and done > total // 2:
        print("half", flush=True)
        time.sleep(600)
Progress.__call__ = hang
start(Path(sys.argv[2]), Path(sys.argv[3]))
"""


def test_file_of_a_killed_writer_is_not_used(tmp_path: Path, checkpoint: Path) -> None:
    cache = tmp_path / "cache"
    folder = str(Path(__file__).parent)
    command = [sys.executable, "-c", WRITE_AND_HANG, folder, str(cache), str(checkpoint)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "half\n"
        part = the_file(cache)
        # A second process tries to write the same file while the first writer lives.
        assert not start(cache, checkpoint)[0]
        assert part.exists() and start(cache, checkpoint)[0]
        writer.send_signal(signal.SIGKILL)
    assert part.name.endswith(".part") and part.exists()
    os.utime(checkpoint / "model.safetensors")
    assert not start(cache, checkpoint)[0]
    assert not part.exists() and start(cache, checkpoint)[0]


def test_concurrent_writers_leave_one_valid_file(tmp_path: Path, checkpoint: Path) -> None:
    models, barrier = [SlotModel(SPEC) for _ in range(4)], threading.Barrier(4)

    def run(model: SlotModel) -> bool:
        barrier.wait(120)
        return same(start(tmp_path / "cache", checkpoint, model)[1], TENSORS)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(run, models))
    the_file(tmp_path / "cache")
    assert_loads(True, tmp_path / "cache", checkpoint)


def test_unwritable_or_full_disk_costs_a_warning(
    tmp_path: Path,
    checkpoint: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert_loads(False, tmp_path / "file", checkpoint)
    assert "cannot be written: [Errno 20] Not a directory" in caplog.text
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        assert_loads(False, tmp_path / "cache", checkpoint)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot be written: [Errno 27] File too large" in caplog.text
    usage = weight_cache.shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(weight_cache.shutil, "disk_usage", lambda path: usage)
    assert_loads(False, tmp_path / "cache", checkpoint)
    assert re.search(r"cannot be written: .* MiB are needed, 0.0 MiB are free", caplog.text)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_engine_with_a_cache_gives_the_same_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_cache, "CHUNK_BYTES", 100_000)
    greedy = SamplingParams(temperature=0.0, max_tokens=16)
    texts = []
    with caplog.at_level(logging.INFO, logger="negamax"):
        for cache in (str(tmp_path), str(tmp_path)):
            options = {"device": "cpu", "num_threads": 1, "max_model_len": 256}
            with LLM("nano", weight_cache=cache, **options) as llm:
                texts.append(llm.generate("Once", greedy)[0].outputs[0].token_ids)
    assert texts[0] == texts[1]
    assert f"loaded weight cache {the_file(tmp_path)}" in caplog.text
