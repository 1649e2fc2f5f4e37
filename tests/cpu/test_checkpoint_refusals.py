"""What the loader refuses, with the names of tensors and files: before anything is read where names
and shapes say it already.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from m2_checkpoints import (
    FP8_CONFIG,
    SlotModel,
    random_tensors,
    save_sharded,
    save_single,
    tiny_spec,
    to_fp8,
    write_index,
)
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.checkpoint.loader import load_weights
from negamax.checkpoint.reader import CheckpointReader, read_entries, read_header
from negamax.config.json_file import read_json_object
from negamax.config.model_spec import ModelSpec
from negamax.formats.floats import E4M3_BLOCKS
from negamax.layers.weights import WeightSlot, slots_by_name

SPEC = tiny_spec()
FP8_SPEC = tiny_spec(quantization_config=FP8_CONFIG)


def load(folder: Path, spec: ModelSpec = SPEC) -> None:
    load_weights(SlotModel(spec).weight_slots(), spec, folder)


def refused(
    folder: Path, tensors: dict[str, Tensor], message: str, *, spec: ModelSpec = SPEC
) -> None:
    save_single(folder, tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(folder, spec)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


def test_missing_tensors_are_named_and_counted(tmp_path: Path) -> None:
    tensors = random_tensors(SPEC)
    del tensors["model.norm.weight"]
    refused(tmp_path, tensors, r"^1 tensor is missing from the checkpoint: model\.norm\.weight \(")
    kept = {name: tensor for name, tensor in tensors.items() if "layers.1" not in name}
    refused(
        tmp_path,
        kept,
        r"23 tensors are missing from the checkpoint: model\.norm\.weight, .* and 13 more",
    )


def test_unknown_tensors_are_named(tmp_path: Path) -> None:
    tensors = {**random_tensors(SPEC), "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    refused(
        tmp_path,
        tensors,
        r"1 tensor is not part of this model: model\.layers\.0\.self_attn\.q_proj\.bias",
    )


def test_two_spellings_of_one_tensor_are_refused(tmp_path: Path) -> None:
    tensors = random_tensors(SPEC)
    name = "model.layers.0.block_sparse_moe.gate.weight"
    tensors[name.replace("block_sparse_moe", "mlp")] = tensors[name].clone()
    refused(tmp_path, tensors, "are the same weight, " + name)


def test_wrong_shape_is_refused_with_both_shapes(tmp_path: Path) -> None:
    tensors = random_tensors(SPEC)
    tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(48, 32)
    refused(
        tmp_path,
        tensors,
        r"1\.self_attn\.k_proj\.weight has shape \[48, 32\]; config.json asks for \[32, 48\]",
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e5m2])
def test_wrong_dtype_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = random_tensors(SPEC)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(dtype)
    refused(tmp_path, tensors, r"lm_head\.weight has dtype .*; supported: BF16, F16, F32")


def test_fp8_that_config_does_not_declare_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, to_fp8(random_tensors(SPEC)), "has dtype F8_E4M3; .*no quantization_config")


def test_broken_scales_are_refused_by_name(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    stored = to_fp8(random_tensors(SPEC))
    for change, message in [
        (
            {name + "_scale_inv": None},
            rf"{name} is stored as fp8_e4m3_block_128x128 and {name}_scale_inv is missing",
        ),
        (
            {name: torch.zeros(64, 48)},
            rf"{name} has dtype F32; fp8_e4m3_block_128x128 is stored in F8_E4M3",
        ),
        (
            {name + "_scale_inv": torch.ones(2, 1)},
            r"scale_inv has shape \[2, 1\]; config.json asks for \[1, 1\]",
        ),
        (
            {name + "_scale_inv": torch.ones(1, 1, dtype=torch.uint8)},
            r"scale_inv has dtype U8; fp8_e4m3_block_128x128 is stored in F32",
        ),
        (
            {name + "_scale_inv": torch.full((1, 1), torch.nan)},
            rf"infinite: {name}_scale_inv in 1 of 1 x 1 \(F32\), first at \[0, 0\]: nan",
        ),
        (
            {name + "_scale_inv": torch.zeros(1, 1)},
            rf"scales that are 0, .*: {name}_scale_inv in 1 of .*: 0 ",
        ),
        (
            {name + "_scale_inv": torch.full((1, 1), -2.0)},
            rf"scales that are .*negative.*: {name}_scale_inv in 1 of .*: -2 ",
        ),
        (
            {"lm_head.weight_scale_inv": torch.ones(1, 1)},
            r"not part of this model: lm_head\.weight_scale_inv .config.json says .* stored plain",
        ),
        (
            {"model.norm.bias_scale_inv": torch.ones(1)},
            r"not part of this model: model\.norm\.bias_scale_inv",
        ),
    ]:
        changed = {
            key: tensor for key, tensor in {**stored, **change}.items() if tensor is not None
        }
        refused(tmp_path, changed, message, spec=FP8_SPEC)


def test_checkpoint_with_more_layers_than_its_config_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_spec(num_hidden_layers=4))
    message = r"num_hidden_layers in config.json is 2; the checkpoint has 2 more, up to layer 3 "
    refused(tmp_path, tensors, message + r"\(44 tensors, model\.layers\.[23]\.")
    tensors["model.layers.2.enorm.weight"] = torch.ones(48)  # layer 2 is for multi-token prediction
    refused(
        tmp_path, tensors, r"has 1 more, up to layer 3 \(22 tensors, .*set num_hidden_layers to 4"
    )
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(48, 96)
    load(save_single(tmp_path, tensors))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_not_finite_are_named_counted_and_located(
    tmp_path: Path, dtype: torch.dtype, value: float
) -> None:
    for name, where in [
        ("model.embed_tokens.weight", (95, 47)),
        ("model.layers.1.self_attn.k_norm.weight", (31,)),
        ("model.layers.0.block_sparse_moe.e_score_correction_bias", (2,)),
        ("model.layers.1.block_sparse_moe.gate.weight", (1, 0)),
        ("model.layers.1.block_sparse_moe.experts.3.w2.weight", (4, 5)),
    ]:
        tensors = random_tensors(SPEC, dtype=dtype)
        tensors[name][where] = value
        size = " x ".join(map(str, tensors[name].shape))
        refused(
            tmp_path,
            tensors,
            rf"{name} in 1 of {size} \(\w+\), first at {list(where)}".replace("[", r"\["),
        )


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_fp8_bytes_that_are_no_number_are_found_in_weights_that_are_dequantised_and_in_those_kept(
    tmp_path: Path, code: int
) -> None:
    stored = to_fp8(random_tensors(SPEC))
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    stored[name].view(torch.uint8)[[3, 7], [40, 1]] = code
    message = rf"{name} in 2 of 24 x 48 \(F8_E4M3\), first at \[3, 40\]"
    refused(tmp_path, stored, message, spec=FP8_SPEC)

    class Kept(SlotModel):
        def weight_slots(self) -> dict[str, WeightSlot]:
            slots = super().weight_slots()
            return slots | slots_by_name(
                WeightSlot(
                    key,
                    tuple(tensor.shape),
                    target=torch.empty_like(tensor),
                    source=E4M3_BLOCKS,
                    stored=E4M3_BLOCKS.tensors[key.endswith("_scale_inv")],
                )
                for key, tensor in stored.items()
                if key.removesuffix("_scale_inv") + "_scale_inv" in stored
            )

    with pytest.raises(CheckpointError, match=message):
        load_weights(Kept(FP8_SPEC).weight_slots(), FP8_SPEC, tmp_path)


LARGE = tiny_spec(vocab_size=96, hidden_size=256, intermediate_size=64)


@pytest.mark.parametrize(("first", "last"), [(0.5, 1.0), (0.3, 0.6), (0.0, 0.4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_with_a_hole_is_refused(
    tmp_path: Path, first: float, last: float, dtype: torch.dtype
) -> None:
    save_single(tmp_path, random_tensors(LARGE, dtype=dtype))
    load(tmp_path, LARGE)
    file = tmp_path / "model.safetensors"
    data, begin = bytearray(file.read_bytes()), min(each.offset for each in read_header(file))
    size = len(data) - begin
    start, stop = begin + int(first * size), begin + int(last * size)
    data[start:stop] = bytes(stop - start)
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"safetensors has a hole: .*weight is zeros alone"):
        load(tmp_path, LARGE)


def test_zeros_that_may_be_meant_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = random_tensors(LARGE)
    experts = [name for name in tensors if ".layers.1." in name and ".experts.2." in name]
    for name in (*experts, "model.layers.0.self_attn.q_norm.weight"):
        tensors[name].zero_()
    tensors["model.embed_tokens.weight"][40:] = 0
    tensors["model.layers.0.block_sparse_moe.e_score_correction_bias"].zero_()
    load(save_single(tmp_path, tensors), LARGE)
    (line,) = (record.getMessage() for record in caplog.records if "zeros" in record.msg)
    assert line.startswith("3 matrices are zeros alone: ") and all(name in line for name in experts)


def test_every_broken_tensor_is_reported_at_once_and_a_flood_is_cut(tmp_path: Path) -> None:
    tensors = random_tensors(SPEC)
    for expert in range(4):
        for kind in ("w1", "w3"):
            tensors[f"model.layers.0.block_sparse_moe.experts.{expert}.{kind}.weight"].fill_(
                torch.nan
            )
    refused(
        tmp_path,
        tensors,
        r"(experts\.\d\.w[13]\.weight in 1152 of 24 x 48.*){5}; and 3 more tensors",
    )


def test_values_that_the_compute_dtype_cannot_hold_are_refused(tmp_path: Path) -> None:
    tensors = random_tensors(SPEC)
    tensors["model.norm.weight"][3] = 1e5
    save_single(tmp_path, tensors)
    load(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"model\.norm\.weight, whose values are too large for the dtype"
    ):
        load_weights(SlotModel(SPEC, dtype=torch.float16).weight_slots(), SPEC, tmp_path)


def test_nothing_is_read_before_every_name_and_shape_is_checked(tmp_path: Path) -> None:
    tensors = random_tensors(SPEC)
    tensors["zzz.unknown"] = torch.zeros(1)
    model = SlotModel(SPEC)
    with pytest.raises(CheckpointError):
        load_weights(model.weight_slots(), SPEC, save_single(tmp_path, tensors))
    assert all(torch.isnan(parameter).all() for parameter in model.parameters.values())


# Files


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (0, "no safetensors file, or cut off: 0 bytes"),
        (5, "cut off"),
        (100, "cut off"),
        (-1, "cut off or damaged"),
    ],
)
def test_truncated_file_is_refused_by_path(tmp_path: Path, keep: int, message: str) -> None:
    path = save_single(tmp_path, random_tensors(SPEC)) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=rf"model\.safetensors .*{message}"):
        load(tmp_path)


def header_file(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff" * 64, "cut off"),
        (header_file(b"not json"), "header"),
        (header_file(b"[1,2]"), "header"),
        (header_file(b'{"x": 3}'), "header"),
        (header_file(b'{"x": {"dtype": "F32"}}'), "header"),
        (
            header_file(b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', b"1234"),
            "header",
        ),
        (
            header_file(b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', b"1234"),
            "cannot have 4 bytes",
        ),
        (
            header_file(b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', b"12345"),
            "cut off or damaged",
        ),
        (
            header_file(
                b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
                b' "y": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
                b"1234",
            ),
            "y begins at byte 0 of the data and what stands before it ends at 4",
        ),
        (
            header_file(
                b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', b"12345678"
            ),
            "x begins at byte 4 ",
        ),
        (
            header_file(b'{"x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "x": {}}'),
            "x is there twice",
        ),
        (header_file(b"[" * 90_000 + b"]" * 90_000), "header"),
        (
            header_file(b'{"x\\u001b[2J": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}'),
            r"name of a tensor is 'x.{1,2}x1b\[2J'",
        ),
    ],
)
def test_garbage_instead_of_tensors_is_refused_by_path(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors .*{message}"):
        load(tmp_path)


def test_folders_without_weights_are_refused_with_what_they_hold(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere is not a folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no model\.safetensors, .*--load-format synthetic"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"it has pytorch_model\.bin \(only safetensors"):
        load(tmp_path)


def test_index_and_files_must_agree(tmp_path: Path) -> None:
    tensors = random_tensors(SPEC)
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    save_sharded(tmp_path, tensors, names=[one, two])
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    moved = {**weight_map, "lm_head.weight": two if weight_map["lm_head.weight"] == one else one}
    partial = {name: file for name, file in weight_map.items() if name != "lm_head.weight"}
    for changed, message in [
        ({**weight_map, "ghost": one}, "1 tensors are not in the file .*ghost"),
        (moved, r"not in the file .*lm_head\.weight"),
        (partial, r"not in model\.safetensors\.index\.json: lm_head\.weight"),
        (
            {**weight_map, "x": "model-00003.safetensors"},
            r"1 are missing: model-00003\.safetensors .finish",
        ),
        ({**weight_map, "x": "../secret.safetensors"}, r"of another folder: '\.\./secret"),
        ({**weight_map, "x": "sub/a.safetensors"}, r"'sub/a\.safetensors' \(weights are read"),
        ({**weight_map, "x": 3}, "no weight_map"),
        ({}, "no weight_map"),
    ]:
        write_index(tmp_path, changed)
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path)
    write_index(tmp_path, weight_map)
    (tmp_path / "model-00003-of-00002.safetensors").write_bytes((tmp_path / one).read_bytes())
    with pytest.raises(CheckpointError, match=r"there are 1 more: model-00003-of-00002\.safe"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        load(tmp_path)


def test_an_index_may_say_that_files_are_beside_it(tmp_path: Path) -> None:
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    tensors = random_tensors(SPEC)
    save_sharded(tmp_path, tensors, names=files)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    write_index(tmp_path, {name: f"./{file}" for name, file in index.items()})
    assert read_entries(tmp_path).keys() == tensors.keys()
    load(tmp_path)


def test_shards_without_an_index_that_are_not_all_there_are_counted(tmp_path: Path) -> None:
    files = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    save_sharded(tmp_path, random_tensors(SPEC), names=files, with_index=False)
    load(tmp_path)
    (tmp_path / files[1]).unlink()
    with pytest.raises(CheckpointError, match=r"are missing from .* \(there are 2 of the 3 files"):
        load(tmp_path)


def test_shards_of_other_names_need_an_index(tmp_path: Path) -> None:
    save_sharded(
        tmp_path, random_tensors(SPEC), names=["a.safetensors", "b.safetensors"], with_index=False
    )
    with pytest.raises(
        CheckpointError,
        match=r"it has a\.safetensors, b\.safetensors \(copy model\.safetensors\.in",
    ):
        load(tmp_path)


def test_files_that_may_not_be_read_need_no_download() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        save_single(Path(folder), random_tensors(SPEC))
        weights, config = Path(folder) / "model.safetensors", Path(folder) / "config.json"
        config.write_text("{}")
        (entry, *_) = read_header(weights)
        reads: list[Callable[[], object]] = [
            lambda: read_header(weights),
            lambda: CheckpointReader().read(entry),
            lambda: read_json_object(config),
        ]
        for read in reads:
            read()
        weights.chmod(0)
        config.chmod(0)
        with _as_another_user():
            for read in reads:
                with pytest.raises(CheckpointError) as caught:
                    read()
                assert "cannot be read: Permission denied" in caught.value.message
                assert "chmod" in str(caught.value) and "download" not in str(caught.value)


@contextmanager
def _as_another_user() -> Iterator[None]:
    """Where this is root, who may read everything."""
    if is_root := os.geteuid() == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(SPEC)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    save_sharded(tmp_path, tensors, names=files, with_index=False)
    (tmp_path / "model-extra.safetensors").write_bytes((tmp_path / files[0]).read_bytes())
    with pytest.raises(
        CheckpointError, match=r"is in two files: model-00001-of-00002.* and model-extra"
    ):
        load(tmp_path)
