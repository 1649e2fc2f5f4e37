import logging
from dataclasses import replace
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
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.config.model_spec import ModelSpec
from negamax.formats.floats import PLAIN
from negamax.kernels.quantize.stored import dequantize, encode
from negamax.layers.weights import MatrixWeight, slots_by_name
from negamax.quantization import online
from negamax.quantization.detect import detect
from negamax.quantization.scheme import WeightFormat
from tests.layouts import full

SIZES = {"hidden_size": 200, "intermediate_size": 136}  # ragged blocks and groups
NAME = "model.layers.0.block_sparse_moe.experts.0.w2.weight"


def online_spec(name: str, **sizes: int) -> ModelSpec:
    return replace(tiny_spec(**sizes), quantization=online.spec(name))


def test_without_a_kernel_values_equal_a_stored_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fp8 = tiny_spec(quantization_config=FP8_CONFIG, **SIZES)
    tensors = random_tensors(fp8, dtype=torch.bfloat16)
    for folder, stored in (("plain", tensors), ("stored", to_fp8(tensors))):
        (tmp_path / folder).mkdir()
        save_single(tmp_path / folder, stored)
    expected, found = SlotModel(fp8), SlotModel(online_spec("fp8", **SIZES))
    load_weights(expected.weight_slots(), fp8, tmp_path / "stored")
    with caplog.at_level(logging.INFO, logger="negamax"):
        load_weights(found.weight_slots(), online_spec("fp8", **SIZES), tmp_path / "plain")
    assert "32 weights are quantized to fp8_e4m3_block_128x128 while they are read" in caplog.text
    for name, parameter in expected.parameters.items():
        assert torch.equal(found.parameters[name], parameter), name
    assert not torch.equal(found.parameters[NAME], tensors[NAME].float())


@pytest.mark.parametrize("name", online.NAMES)
@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [(range(256), range(128, 256)), (range(128, 256), range(384)),
     full(range(256), range(384)), full(range(128, 256), range(128, 256))],
)  # fmt: skip
def test_each_part_equals_the_whole_quantized(
    tmp_path: Path, name: str, is_held: bool, rows: range, columns: range
) -> None:
    scheme = detect(online.spec(name))
    assert scheme is not None
    (stored,) = scheme.formats
    plain = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
    whole = encode(stored, plain)
    save_file({NAME: plain}, tmp_path / "model.safetensors")
    spec = tiny_spec()
    weights = WeightFormat(torch.float32, torch.device("cpu"), scheme)
    size, region = (len(rows), len(columns)), (rows, columns)
    held = MatrixWeight(size, stored if is_held else PLAIN, weights=weights)
    load_weights(slots_by_name(held.slots(NAME, (256, 384), region=region)), spec, tmp_path)
    found = held.take().tensors
    if not is_held:
        part = tuple(slice(each.start, each.stop) for each in region)
        assert torch.equal(found["weight"], dequantize(stored, whole)[part])
        return
    for tensor in stored.tensors:
        if tensor.is_kept:
            part = tuple(slice(each.start, each.stop) for each in tensor.part(region))
            expected = whole[tensor.name][part]
            if not tensor.is_number:  # stored once, held once per row
                expected = expected.view(found[tensor.name].shape)
            assert _same(found[tensor.name], expected), tensor.name


def _same(found: Tensor, expected: Tensor) -> bool:
    if found.dtype is torch.uint8:
        expected = expected.view(torch.uint8)
    return torch.equal(found.float(), expected.float().expand(found.shape))


def test_missing_and_broken_tensors_are_named_once(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_spec())
    spec = online_spec("int8")
    save_single(tmp_path, {name: tensor for name, tensor in tensors.items() if name != NAME})
    with pytest.raises(CheckpointError, match=f"^1 tensor is missing from the checkpoint: {NAME}"):
        load_weights(SlotModel(spec).weight_slots(), spec, tmp_path)
    tensors[NAME][2, 1] = torch.nan
    save_single(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=rf"{NAME} in 1 of 48 x 24 .*first at \[2, 1\]"):
        load_weights(SlotModel(spec).weight_slots(), spec, tmp_path)
    save_single(tmp_path, to_fp8(random_tensors(tiny_spec())))
    with pytest.raises(CheckpointError, match="has dtype F8_E4M3; supported: BF16"):
        load_weights(SlotModel(spec).weight_slots(), spec, tmp_path)


@pytest.mark.parametrize("name", online.NAMES)
def test_nan_is_refused_before_it_is_quantized(tmp_path: Path, name: str) -> None:
    spec = online_spec(name, **SIZES)
    tensors = random_tensors(spec)
    tensors[NAME][3, 5] = torch.nan
    save_single(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=rf"{NAME} in 1 of 200 x 136 .*first at \[3, 5\]"):
        load_weights(SlotModel(spec).weight_slots(), spec, tmp_path)
