import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from negamax.formats.platform import CPU
from negamax.kernels.registry import KernelTable, resolve
from negamax.models.minimax_m3.vision import VisionTower
from negamax.models.registry import import_names, read_spec
from negamax.quantization.scheme import WeightFormat
from tests import tiny_m3

VISIONS: dict[str, dict[str, Any]] = {
    "heads of 80": tiny_m3.SEEING,
    "heads of 16": {**tiny_m3.SEEING, "hidden_size": 48, "num_attention_heads": 3},
}


def load_tower(folder: Path, dtype: torch.dtype, kernels: KernelTable | None = None) -> VisionTower:
    spec = read_spec(json.loads((folder / "config.json").read_text()))
    assert spec.vision is not None
    kernels = kernels or resolve(platform=CPU, dtype=dtype)
    tower = VisionTower(spec.vision, WeightFormat(dtype, torch.device("cpu")), kernels)
    stored = load_file(folder / "model.safetensors")
    for slot in tower.slots:
        slot.write(stored[slot.name])
    listed = [one for one in import_names(spec).weights(spec) if one.is_vision]
    assert {one.name: one.shape for one in listed} == {one.name: one.shape for one in tower.slots}
    return tower


@pytest.mark.parametrize("vision", VISIONS.values(), ids=VISIONS)
def test_the_tower_equals_transformers(vision: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_m3.make_seeing_model(3, vision=vision, **tiny_m3.random_sizes(3))
    model.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(4)
    sizes = ((56, 84), (28, 28), (140, 28), (28, 56))
    images = [tiny_m3.random_image(*size, generator) for size in sizes]
    with torch.inference_mode():
        features = model.get_image_features(**tiny_m3.pixel_values(images))
        expected = torch.cat(list(features.pooler_output))
        tower = load_tower(tmp_path, torch.float32)
        together, alone = tower(images), torch.cat([tower([image]) for image in images])
        rounded = load_tower(tmp_path, torch.bfloat16)(images)
    torch.testing.assert_close(together, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(alone, expected, atol=1e-5, rtol=1e-5)
    assert (rounded.float() - expected).norm() < 0.02 * expected.norm()
    turned = tower([images[0].transpose(0, 1).contiguous()])
    assert (turned - together[:6]).abs().max() > 0.1  # Rows and columns have different positions.
