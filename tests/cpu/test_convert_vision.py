import json
from pathlib import Path

import pytest
import torch
from loading_support import conversion, stored_bytes

from negamax.convert.convert import convert
from negamax.convert.source import _OF_VISION
from tests import tiny, tiny_m3
from tests.m3_vision_support import Prompt, check, seeing_engine

SIZES = {
    "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 128, "head_dim": 32,
    "rotary_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 1, "index_n_heads": 1,
    "mlp_layer_types": ["dense", "sparse"], "layer_types": ["full_attention", "minimax_m3_sparse"],
    "dense_intermediate_size": 128, "shared_intermediate_size": 128,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ["bf16", "fp8-channel"])
def test_a_converted_model_reads_images(name: str, tmp_path: Path) -> None:
    model = tiny_m3.make_seeing_model(3, **tiny_m3.random_sizes(3, **SIZES))
    for parameter in model.parameters():
        parameter.data = parameter.bfloat16().float()  # so that bf16 is exact
    source, converted = tiny.save(model, tmp_path / "source"), tmp_path / "converted"
    convert(conversion(source, converted, name))
    before, after = stored_bytes(source), stored_bytes(converted)
    tower = [key for key in before if _OF_VISION.search(key)]
    assert len(tower) > 20 and all(before[key] == after[key] for key in tower)
    configs = [json.loads((each / "config.json").read_text()) for each in (source, converted)]
    assert configs[0]["vision_config"] == configs[1]["vision_config"]
    images = [tiny_m3.random_image(56, 84, torch.Generator().manual_seed(n)) for n in (1, 2)]
    first, second = (Prompt([[7, 8, 9], image, [10, 11]]) for image in images)
    with seeing_engine(converted) as engine:
        answers = engine.run(first, second, max_tokens=1)
    assert answers[0].logprobs != answers[1].logprobs and not answers[0].error
    if name == "bf16":
        check(model, first, answers[0])
