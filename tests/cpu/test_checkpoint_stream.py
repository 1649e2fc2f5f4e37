from itertools import pairwise
from pathlib import Path

import pytest
import torch
from m2_checkpoints import (
    FP8_CONFIG,
    SlotModel,
    load_weights,
    random_tensors,
    save_single,
    tiny_spec,
    to_fp8,
)
from safetensors.torch import save_file

from negamax.base.errors import CheckpointError
from negamax.checkpoint import stream
from negamax.checkpoint.plan import plan_load
from negamax.checkpoint.reader import CheckpointReader, Span, read_entries

SPEC = tiny_spec()


@pytest.mark.parametrize(
    ("region", "num_bytes"),
    [
        ((range(6), range(10), range(4)), 960),
        ((range(2, 5), range(10), range(4)), 3 * 160),
        ((range(3, 4), range(10), range(4)), 160),
        ((range(3, 4), range(2, 7), range(4)), 5 * 16),
        ((range(3, 4), range(7, 8), range(1, 3)), 2 * 4),
        # Narrowed rows are read in all their columns.
        ((range(3, 4), range(2, 7), range(1, 3)), 5 * 16),
        ((range(2), range(2, 7), range(1, 3)), 2 * 160),
        ((range(6), range(10), range(2, 2)), 960),
        ((range(2, 2), range(10), range(4)), 0),
    ],
)
def test_span_of_a_region_is_minimal(
    tmp_path: Path, region: tuple[range, ...], num_bytes: int
) -> None:
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
    header = data[8 : 8 + length].rstrip()  # padded, so data starts at a multiple of 8
    header += b" " * (3 - len(header) % 8)
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    model = SlotModel(SPEC)
    load_weights(model.weight_slots(), SPEC, tmp_path)
    assert all(torch.equal(model.parameters[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("fp8", [False, True])
def test_pieces_are_large_and_few_and_read_every_byte_once(tmp_path: Path, fp8: bool) -> None:
    spec = tiny_spec(quantization_config=FP8_CONFIG) if fp8 else SPEC
    tensors = to_fp8(random_tensors(spec)) if fp8 else random_tensors(spec)
    plan = plan_load(SlotModel(spec).weight_slots(), spec, save_single(tmp_path, tensors))
    pieces = list(stream._pieces(plan.needed))
    # A layer's scales precede its values, whose dequantization needs them.
    assert len(pieces) <= (6 if fp8 else 3)
    spans = sorted((w.span.start, w.span.num_bytes) for p in pieces for w in p.wanted)
    assert sum(size for _, size in spans) == sum(tensor.nbytes for tensor in tensors.values())
    assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))


@pytest.mark.parametrize("piece_bytes", [64, 1000, 10_000])
def test_large_tensors_are_split_by_rows(
    tmp_path: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from negamax.checkpoint import loader

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
        assert all(piece.num_bytes <= max(piece_bytes, row) for piece in stream._pieces(split))
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
    assert sum(1 for _ in stream._pieces(plan.needed)) > 4 * stream.BUFFERS
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
        pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: it ends at byte"),
        CheckpointReader() as reader,
    ):
        list(stream.read_parts(reader, plan.needed, pinned=False))
