import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from negamax.base.errors import ConfigError
from negamax.models.minimax_m3.vision import VisionTower
from negamax.models.registry import import_names, read_spec
from negamax.quantization.scheme import WeightFormat
from tests import tiny_m3

VISIONS: dict[str, dict[str, Any]] = {
    "heads of 80": tiny_m3.SEEING,
    "heads of 16": {**tiny_m3.SEEING, "hidden_size": 48, "num_attention_heads": 3},
}


def load_tower(folder: Path, dtype: torch.dtype) -> VisionTower:
    spec = read_spec(json.loads((folder / "config.json").read_text()))
    assert spec.vision is not None
    tower = VisionTower(spec.vision, WeightFormat(dtype, torch.device("cpu")))
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


def test_the_published_config_is_read(tmp_path: Path) -> None:
    text = {**tiny_m3.text_config(3), "vocab_size": 200_064, "tie_word_embeddings": None}
    tower = {
        "model_type": "clip_vision_model",
        "hidden_size": 1280,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "intermediate_size": 5120,
        "patch_size": 14,
        "image_size": 2016,
        "num_channels": 3,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "projection_dim": 6144,
        "position_embedding_type": "rope",
        "rope_mode": "3d",
        "rope_theta": 10_000.0,
        "vision_segment_max_frames": 4,
        "img_token_compression_config": {
            "image_token_compression_method": "patch_merge",
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }
    config: dict[str, Any] = {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "text_config": text,
        "vision_config": tower,
        "image_token_index": 200_025,
        "projector_hidden_size": 6144,
        "vision_feature_layer": -1,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
    }
    text["architectures"] = ["MiniMaxM3SparseForCausalLM"]
    vision = read_spec(config).vision
    assert vision is not None
    assert (vision.head_dim, vision.patch_values, vision.token_pixels) == (80, 1176, 28)
    assert (vision.image_token_id, vision.image_start_id, vision.image_end_id) == (
        200_025,
        200_029,
        200_030,
    )
    assert read_spec({**config, "vision_config": None}).vision is None
    assert read_spec({**config, "image_token_index": 200_064}).vision is None
    for field, value in (("rope_mode", "2d"), ("num_channels", 1), ("num_attention_heads", 7)):
        with pytest.raises(
            ConfigError, match=field if field != "num_attention_heads" else "heads|"
        ):
            read_spec({**config, "vision_config": {**tower, field: value}})
