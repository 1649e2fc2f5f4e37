"""A rotated model: its draft head's weights give what they gave before the rotation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from negamax.base.errors import CheckpointError
from negamax.checkpoint.quarot import read_rotation, rotate_back, rotate_inputs
from negamax.config.quantization import QuantizationSpec

HIDDEN = 24
GENERATOR = torch.Generator().manual_seed(0)
ROTATION = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=GENERATOR))[0].contiguous()


def described(path: str) -> QuantizationSpec:
    fields = {"optional": {"quarot": {"rotation_map": {"global_rotation": path}}}}
    return QuantizationSpec("modelslim", fields, "quant_model_description.json")


def test_a_draft_head_sees_what_it_saw_before_the_rotation() -> None:
    streams = [torch.randn(5, HIDDEN) for _ in range(3)]
    fc, embedding = torch.randn(HIDDEN, 3 * HIDDEN), torch.randn(40, HIDDEN)
    rotated = [stream @ ROTATION for stream in streams]
    before, after = torch.cat(streams, 1) @ fc.T, torch.cat(rotated, 1)
    torch.testing.assert_close(after @ rotate_inputs(fc, ROTATION).T, before, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        rotate_back(embedding @ ROTATION, ROTATION), embedding, atol=1e-5, rtol=1e-4
    )


def test_the_rotation_is_read_from_the_file_that_the_description_names(tmp_path: Path) -> None:
    (tmp_path / "optional").mkdir()
    file = tmp_path / "optional" / "quarot.safetensors"
    spec = described("optional/quarot.safetensors")
    assert read_rotation(None, tmp_path) is None
    assert read_rotation(QuantizationSpec("modelslim", {"optional": {}}), tmp_path) is None
    with pytest.raises(CheckpointError, match=r"quarot.safetensors: global_rotation cannot be"):
        read_rotation(spec, tmp_path)
    save_file({"global_rotation": ROTATION.bfloat16()}, file)
    found = read_rotation(spec, tmp_path)
    assert found is not None and torch.equal(found, ROTATION.bfloat16().float())
    with pytest.raises(CheckpointError, match="outside the folder"):
        read_rotation(described("../quarot.safetensors"), tmp_path)
    for broken in (2 * ROTATION, ROTATION[:5]):
        save_file({"global_rotation": broken.contiguous()}, file)
        with pytest.raises(CheckpointError, match=r"global_rotation \[\d+, 24\] is no rotation"):
            read_rotation(spec, tmp_path)
