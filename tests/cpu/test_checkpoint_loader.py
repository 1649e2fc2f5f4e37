import io
import json
import logging
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from m2_checkpoints import (
    FP8_CONFIG,
    TINY,
    SlotModel,
    from_fp8,
    load_weights,
    random_tensors,
    save_sharded,
    save_single,
    tiny_spec,
    to_fp8,
)
from model_support import build, checkpoint_tensors
from safetensors.torch import save_file
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.checkpoint import loader, stream
from negamax.checkpoint.loader import fill
from negamax.checkpoint.plan import plan_load
from negamax.checkpoint.reader import CheckpointReader, Span, read_entries
from negamax.layers.kv_scales import describe_kv_scales
from negamax.layers.weights import WeightSlot, slots_by_name
from negamax.models.decoder import Decoder
from negamax.models.minimax_m2.names import layer_of
from negamax.models.registry import read_spec
from negamax.parallel.layout import ParallelLayout
from negamax.worker.config import WorkerConfig
from negamax.worker.worker import Worker
from tests.speed import is_quick

SPEC = tiny_spec()
FP8_SPEC = tiny_spec(quantization_config=FP8_CONFIG)


def assert_same(model: SlotModel, expected: dict[str, Tensor]) -> None:
    assert model.parameters.keys() == expected.keys()
    for name, parameter in model.parameters.items():
        assert torch.equal(parameter, expected[name].to(parameter.dtype)), name


def save_transformers_model(
    folder: Path, *, shard_size: str, original: bool = True
) -> dict[str, Tensor]:
    from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

    torch.manual_seed(0)
    model = MiniMaxM2ForCausalLM(MiniMaxM2Config(**TINY)).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            assert "inv_freq" not in name
            tensor.normal_()
    model.save_pretrained(folder, max_shard_size=shard_size, save_original_format=original)
    return {name: tensor.clone() for name, tensor in checkpoint_tensors(model).items()}


@pytest.mark.parametrize(
    ("shard_size", "original", "num_files"),
    [("1GB", True, 1), ("30KB", True, 5), ("30KB", False, 5)],
)
def test_checkpoint_saved_by_transformers(
    tmp_path: Path, shard_size: str, original: bool, num_files: int
) -> None:
    """Load a checkpoint that transformers saved; its own format (not `original`) stacks experts."""
    expected = save_transformers_model(tmp_path, shard_size=shard_size, original=original)
    assert len(list(tmp_path.glob("*.safetensors"))) >= num_files
    spec = read_spec(json.loads((tmp_path / "config.json").read_text()))
    assert (spec.rotary_dim, spec.rope_theta, spec.dtype, spec.notes) == (8, 10000.0, "float32", ())
    model = SlotModel(spec)
    report = load_weights(model.weight_slots(), spec, tmp_path)
    assert_same(model, expected)
    assert report.num_tensors == len(expected) or not original
    assert report.num_bytes == 4 * sum(tensor.numel() for tensor in expected.values())
    assert report.skipped == {} and report.num_dequantized == 0


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
def test_plain_dtypes_are_cast(tmp_path: Path, stored: torch.dtype, compute: torch.dtype) -> None:
    tensors = random_tensors(SPEC, dtype=stored)
    model = SlotModel(SPEC, dtype=compute)
    load_weights(model.weight_slots(), SPEC, save_single(tmp_path, tensors))
    assert_same(model, tensors)


def test_dequantized_blocks_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Store ragged blocks, a layer in bf16, and weights and scales in different files."""
    spec = tiny_spec(quantization_config=FP8_CONFIG, hidden_size=200, intermediate_size=136)
    tensors = random_tensors(spec)
    stored, name = to_fp8(tensors), "model.layers.1.self_attn.o_proj.weight"
    stored[name] = tensors[name].to(torch.bfloat16)
    del stored[name + "_scale_inv"]
    files = [f"model-{number:05}-of-00130.safetensors" for number in range(3)]
    model = SlotModel(spec, dtype=torch.bfloat16)
    with caplog.at_level(logging.INFO, logger="negamax"):
        save_sharded(tmp_path, stored, names=files)
        report = load_weights(model.weight_slots(), spec, tmp_path)
    assert_same(model, from_fp8(stored))
    assert report.num_tensors == len(stored)
    assert report.num_dequantized == 2 * (4 + 3 * 4) - 1
    assert "to the compute dtype (fp8_e4m3_block_128x128)" in report.summary()
    assert any("31 weights" in each and "dequantized" in each for each in caplog.messages)


@pytest.mark.parametrize("with_index", [True, False])
def test_shards_load_with_and_without_an_index(tmp_path: Path, with_index: bool) -> None:
    """Check that a file which the index does not name is not read."""
    tensors, model = random_tensors(SPEC), SlotModel(SPEC)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    save_sharded(tmp_path, tensors, names=files, with_index=with_index)
    (tmp_path / "consolidated.safetensors").write_bytes(b"not a tensor file")
    load_weights(model.weight_slots(), SPEC, tmp_path)
    assert_same(model, tensors)


def test_unneeded_tensor_is_not_read_but_must_exist(tmp_path: Path) -> None:
    class Partial(SlotModel):
        def weight_slots(self) -> dict[str, WeightSlot]:
            slots = super().weight_slots()
            return slots_by_name(
                WeightSlot(name, slot.shape, target=None) if ".experts.3." in name else slot
                for name, slot in slots.items()
            )

    tensors = random_tensors(SPEC)
    report = load_weights(Partial(SPEC).weight_slots(), SPEC, save_single(tmp_path, tensors))
    unread = sum(4 * tensor.numel() for name, tensor in tensors.items() if ".experts.3." in name)
    assert report.num_bytes == sum(4 * tensor.numel() for tensor in tensors.values()) - unread
    del tensors["model.layers.0.block_sparse_moe.experts.3.w2.weight"]
    with pytest.raises(CheckpointError, match=r"missing .*experts\.3\.w2"):
        load_weights(Partial(SPEC).weight_slots(), SPEC, save_single(tmp_path, tensors))


def test_extra_tensors_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = random_tensors(SPEC)
    extra = [
        "model.layers.2.self_attn.q_proj.weight", "model.layers.2.eh_proj.weight",
        "model.mtp.0.proj.weight", "mtp.layers.0.norm.weight",
        "model.layers.0.self_attn.k_proj.k_scale", "model.layers.1.self_attn.v_cache.scale",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    ]  # fmt: skip
    model = SlotModel(SPEC)
    save_single(tmp_path, {**tensors, **{name: torch.ones(3) for name in extra}})
    with caplog.at_level(logging.WARNING, logger="negamax"):
        report = load_weights(model.weight_slots(), SPEC, tmp_path)
    assert_same(model, tensors)
    assert sorted(name for names in report.skipped.values() for name in names) == sorted(extra)
    assert len(report.skipped) == 3
    logged = "\n".join(record.message for record in caplog.records)
    assert all(name in logged for name in extra)
    assert "skipped 4 (multi-token prediction, not used)" in report.summary()


def test_progress_rises_layer_by_layer_to_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    stored = to_fp8(random_tensors(SPEC))
    save_sharded(tmp_path, stored, names=["model-1.safetensors", "model-2.safetensors"])
    slots = SlotModel(FP8_SPEC).weight_slots()
    report = load_weights(slots, FP8_SPEC, tmp_path, progress=lambda *each: seen.append(each))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert {total for _, total in seen} == {report.num_bytes} == {seen[-1][0]}
    assert report.num_bytes == sum(tensor.nbytes for tensor in stored.values())


def test_layers_are_filled_in_order(tmp_path: Path) -> None:
    order: list[int] = []

    class Recording(SlotModel):
        def weight_slots(self) -> dict[str, WeightSlot]:
            slots = super().weight_slots()
            for name, slot in slots.items():
                write = slot.write_part

                def recorded(*part: Any, name: str = name, write: Any = write) -> Any:
                    order.append(layer_of(name) or 0)
                    return write(*part)

                slot.write_part = recorded  # type: ignore[method-assign]
            return dict(reversed(slots.items()))

    files = [f"model-{number}.safetensors" for number in range(7)]
    save_sharded(tmp_path, random_tensors(SPEC), names=files)
    load_weights(Recording(SPEC).weight_slots(), SPEC, tmp_path)
    assert order == sorted(order) and set(order) == {0, 1}


def test_checkpoint_of_the_size_of_nano_loads_within_a_second(tmp_path: Path) -> None:
    spec = tiny_spec(
        vocab_size=4096, hidden_size=256, intermediate_size=256, num_hidden_layers=5,
        num_local_experts=12, quantization_config=FP8_CONFIG,
    )  # fmt: skip
    stored = to_fp8(random_tensors(spec))
    save_single(tmp_path, stored)
    assert len(stored) > 150 and sum(tensor.nbytes for tensor in stored.values()) > 12e6
    model = SlotModel(spec, dtype=torch.bfloat16)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert is_quick(lambda: load_weights(model.weight_slots(), spec, tmp_path), 1.0)
    torch.set_num_threads(num_threads)


def test_model_loads_checkpoints_of_transformers_and_minimax(tmp_path: Path) -> None:
    model = build(SPEC, loaded=False)
    save_transformers_model(tmp_path, shard_size="30KB")
    seen: list[tuple[int, int]] = []
    plan = plan_load(model.weight_slots(), SPEC, tmp_path, progress=lambda *done: seen.append(done))
    count = len(list(tmp_path.glob("*.safetensors")))
    assert count > 2 and seen == [(number, count) for number in range(1, count + 1)]
    fill(model.weight_slots(), plan)
    seen.clear()
    model.finish_loading(lambda *done: seen.append(done))
    assert seen == [(1, 2), (2, 2)]
    model, folder = build(FP8_SPEC, loaded=False), tmp_path / "fp8"
    folder.mkdir()
    load_weights(
        model.weight_slots(), FP8_SPEC, save_single(folder, to_fp8(random_tensors(FP8_SPEC)))
    )
    model.finish_loading()
    with pytest.raises(CheckpointError, match="is in the checkpoint twice"):
        load_weights(model.weight_slots(), FP8_SPEC, folder)


def scales(model: Decoder) -> list[tuple[float, float]]:
    assert isinstance(model, Decoder)
    return [layer.attention.kv_scales.values for layer in model.layers]


KV_NAMES = (
    "{}_scale", "attn.{}_scale", "{}_proj.{}_scale", "qkv_proj.{}_scale", "qkqkv_proj.{}_scale",
    "{}_cache.scale", "{}_proj.output_scale", "kv_scale", "attn.kv_scale",
)  # fmt: skip


@pytest.mark.parametrize("name", KV_NAMES)
def test_scales_of_an_fp8_cache_are_read_under_every_name(tmp_path: Path, name: str) -> None:
    tensors, attention = random_tensors(SPEC), "model.layers.1.self_attn."
    names = [attention + name.replace("{}", kind) for kind in "kv"]
    extra = {names[0]: torch.tensor(0.5)} | {names[1]: torch.tensor([0.25])}
    values = tuple(float(extra[key]) for key in names)
    save_single(tmp_path, {**tensors, **extra})
    model = build(SPEC, loaded=False)
    report = load_weights(model.weight_slots(), SPEC, tmp_path)
    model.finish_loading()
    assert report.skipped == {} and scales(model) == [(1.0, 1.0), values]
    half = "; FP8 keys and values of 1 of 2 layers have scale 1, because the checkpoint has none"
    assert describe_kv_scales(model.layers, torch.float8_e4m3fn) == half
    unused = describe_kv_scales(model.layers, torch.bfloat16)
    assert "KV scales (1 layers) are not used with a bfloat16 cache (--kv-cache-dtype fp8" in unused
    for changed, message in (
        ({names[0]: torch.tensor(-1.0)}, r"layers\.1\.\S+v_scale are -1\.0 and "),
        ({names[1]: None}, r"has model\.layers\.1\.self_attn\.k_scale but not model\S+v_scale"),
    ):
        if names[0] == names[1] and None in changed.values():
            continue
        found = {**tensors, **extra, **changed}
        save_single(tmp_path, {key: value for key, value in found.items() if value is not None})
        model = build(SPEC, loaded=False)
        load_weights(model.weight_slots(), SPEC, tmp_path)
        with pytest.raises(CheckpointError, match=message):
            model.finish_loading()


def test_unused_cache_scales_are_reported(tmp_path: Path) -> None:
    attention = "model.layers.1.self_attn."
    extra = {
        "q_proj.q_scale": "queries", "attn.q_scale": "queries", "q.scale": "queries",
        "q_proj.output_scale": "queries", "prob_output_scale": "queries",
        "attn.k_zero_point": "zero points", "qkv_proj.q_zero_point": "zero points",
        "k_proj.kv_cache_scale": "int8", "v_proj.kv_cache_offset": "int8",
    }  # fmt: skip
    model = build(SPEC, loaded=False)
    assert describe_kv_scales(model.layers, torch.bfloat16) == ""
    tensors = {attention + name: torch.ones(32) for name in extra}
    save_single(tmp_path, {**random_tensors(SPEC), **tensors})
    report = load_weights(model.weight_slots(), SPEC, tmp_path)
    found = {name: reason for reason, names in report.skipped.items() for name in names}
    assert found.keys() == tensors.keys()
    assert all(word in found[attention + name] for name, word in extra.items())


def test_resolving_a_model_imports_no_torch() -> None:
    code = (
        "import sys, negamax.checkpoint.hub, negamax.models.minimax_m2.names, "
        "negamax.config.generation, negamax.config.model_spec;"
        "sys.exit('torch' in sys.modules or 'huggingface_hub' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_worker_refuses_a_checkpoint_before_its_weights_take_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("negamax.base.progress.LOG_SECONDS", -1.0)
    monkeypatch.setattr("sys.stderr", io.StringIO())  # no terminal
    tensors = random_tensors(SPEC)
    head = tensors.pop("lm_head.weight")
    config = WorkerConfig(
        spec=SPEC, eos_token_ids=(2,), folder=str(save_single(tmp_path, tensors)),
        layout=ParallelLayout(), device="cpu", dtype="float32", kv_cache_dtype="auto",
        max_model_len=64, max_num_seqs=1, max_num_batched_tokens=64, block_size=16,
        num_kv_blocks=8, kv_cache_memory=None, gpu_memory_utilization=0.9, cudagraph_size=0,
        num_threads=torch.get_num_threads(), seed=0, show_progress=True, addresses=None,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"missing .*lm_head\.weight") as caught:
        Worker(config)
    raised_in = [entry.name for entry in caught.traceback]
    assert "plan_load" in raised_in and "_load" not in raised_in
    save_single(tmp_path, {**tensors, "lm_head.weight": head})
    with caplog.at_level("INFO", logger="negamax"):
        Worker(config).close()
    phases = [line.partition(":")[0] for line in caplog.messages if "s left" in line]
    expected = ["checking files", "loading weights", "packing weights of layers"]
    assert list(dict.fromkeys(phases)) == expected


# --- stream of pieces -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("region", "num_bytes"),
    [
        ((range(6), range(10), range(4)), 960),
        ((range(2, 5), range(10), range(4)), 3 * 160),
        ((range(3, 4), range(10), range(4)), 160),
        ((range(3, 4), range(2, 7), range(4)), 5 * 16),
        ((range(3, 4), range(7, 8), range(1, 3)), 2 * 4),
        # Rows of a narrowed range are read in full width.
        ((range(3, 4), range(2, 7), range(1, 3)), 5 * 16),
        ((range(2), range(2, 7), range(1, 3)), 2 * 160),
        ((range(6), range(10), range(2, 2)), 960),
        ((range(2, 2), range(10), range(4)), 0),
    ],
)
def test_span_of_region_is_least(tmp_path: Path, region: tuple[range, ...], num_bytes: int) -> None:
    tensors = {"a": torch.arange(3.0), "b": torch.arange(240.0).reshape(6, 10, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    entry = read_entries(tmp_path)["b"]
    assert Span.of(entry, region).num_bytes == num_bytes
    expected = tensors["b"][tuple(slice(part.start, part.stop) for part in region)]
    with CheckpointReader() as reader:
        assert torch.equal(reader.read(entry, region), expected)


def test_data_that_is_not_aligned_is_read(tmp_path: Path) -> None:
    tensors = random_tensors(SPEC)
    file = save_single(tmp_path, tensors) / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip()  # Padding aligns the data to 8 bytes.
    header += b" " * (3 - len(header) % 8)
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    model = SlotModel(SPEC)
    load_weights(model.weight_slots(), SPEC, tmp_path)
    assert all(torch.equal(model.parameters[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("fp8", [False, True])
def test_pieces_are_large_and_few_and_read_every_byte_once(tmp_path: Path, fp8: bool) -> None:
    spec = FP8_SPEC if fp8 else SPEC
    tensors = to_fp8(random_tensors(spec)) if fp8 else random_tensors(spec)
    plan = plan_load(SlotModel(spec).weight_slots(), spec, save_single(tmp_path, tensors))
    pieces = list(stream._plan_pieces(plan.needed))
    # Scales of a layer come before its values, which need the scales for dequantization.
    assert len(pieces) <= (6 if fp8 else 3)
    spans = sorted((w.span.start, w.span.num_bytes) for p in pieces for w in p.wanted)
    assert sum(size for _, size in spans) == sum(tensor.nbytes for tensor in tensors.values())
    assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))


@pytest.mark.parametrize("piece_bytes", [64, 1000, 10_000])
def test_large_tensors(tmp_path: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (stream, loader):
        monkeypatch.setattr(module, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(stream, "GAP_BYTES", 0)
    tensors = random_tensors(SPEC)
    save_single(tmp_path, tensors)
    for rank in range(2):
        model = SlotModel(SPEC, rank=rank, size=2)
        plan = plan_load(model.weight_slots(), SPEC, tmp_path)
        split = [part for move in plan.needed for part in move.split(piece_bytes)]
        row = max(48, 24, 64) * 4
        assert all(piece.num_bytes <= max(piece_bytes, row) for piece in stream._plan_pieces(split))
        model = SlotModel(SPEC, rank=rank, size=2)
        report = load_weights(model.weight_slots(), SPEC, tmp_path)
        assert report.num_bytes == sum(tensor.nbytes for tensor in tensors.values()) // 2
        assert all(slot.written for slot in model.weight_slots().values())
        for name, tensor in tensors.items():
            assert torch.equal(model.parameters[name], tensor.chunk(2)[rank]), name


def test_number_of_buffers_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PIECE_BYTES", 4096)
    monkeypatch.setattr(stream, "GAP_BYTES", 0)
    spec = tiny_spec(num_hidden_layers=6)
    save_single(tmp_path, random_tensors(spec))
    plan = plan_load(SlotModel(spec).weight_slots(), spec, tmp_path)
    assert sum(1 for _ in stream._plan_pieces(plan.needed)) > 4 * stream.BUFFERS
    read: list[int] = []

    class Counting(CheckpointReader):
        def read_into(self, data: torch.Tensor, file: Path, start: int) -> None:
            read.append(len(data))
            super().read_into(data, file, start)

    taken = 0
    with Counting() as reader:
        for part in stream.read_parts(reader, plan.needed, pinned=False):
            taken += part.tensor.nbytes
            assert sum(read) <= taken + (stream.BUFFERS + 1) * (4096 + max(read))
    assert taken == sum(read)


def test_threads_have_one_file_open_each(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.full((2,), float(number)) for number in range(20)}
    for name, tensor in tensors.items():
        save_file({name: tensor}, tmp_path / f"model-{name}.safetensors")
    entries = read_entries(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with CheckpointReader() as reader:
        for name, tensor in tensors.items():
            assert torch.equal(reader.read(entries[name]), tensor)
        assert len(list(Path("/proc/self/fd").iterdir())) == before + 1
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_file_truncated_after_the_check_is_refused(tmp_path: Path) -> None:
    file = save_single(tmp_path, random_tensors(SPEC)) / "model.safetensors"
    model = SlotModel(SPEC)
    plan = plan_load(model.weight_slots(), SPEC, tmp_path)
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 9)
    with (
        pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: the file ends"),
        CheckpointReader() as reader,
    ):
        list(stream.read_parts(reader, plan.needed, pinned=False))
