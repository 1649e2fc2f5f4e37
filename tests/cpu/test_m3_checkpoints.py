import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loading_support import assert_equal, conversion, greedy, load, part_of
from model_support import build
from safetensors.torch import load_file, save_file
from stored_formats import FORMATS, LEFT_OUT, is_matrix, write
from stored_kernels import keeping_stored
from torch import Tensor

from negamax.config.model_spec import ModelSpec
from negamax.convert.convert import convert
from negamax.formats.platform import CPU
from negamax.kernels.registry import resolve
from negamax.models.memory import weight_bytes
from negamax.models.registry import import_names, read_spec
from negamax.parallel.layout import ParallelLayout
from negamax.quantization.names import quantized

PATTERN = [0, 1, 1]
TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "dense_intermediate_size": 96,
    "shared_intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.0, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 512, "rotary_dim": 16,
    "partial_rotary_factor": 0.5, "moe_layer_freq": PATTERN,
    "sparse_attention_config": {
        "sparse_index_dim": 32, "sparse_num_index_heads": 2, "sparse_topk_blocks": 2,
        "sparse_block_size": 16, "sparse_attention_freq": PATTERN, "sparse_local_block": 1,
    },
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl",
    "dtype": "float32", "text_config": TEXT,
}  # fmt: skip
SPEC = read_spec(CONFIG)
PROMPT = [5, 17, 60, 3] * 11  # The prompt is longer than the two selected blocks of 16 tokens.
VISION = ("vision_tower.vision_model.pre_layrnorm.weight", "patch_merge_mlp.linear_1.bias")
MTP = "language_model.model.mtp.layers.0.eh_proj.weight"


def random_tensors(spec: ModelSpec) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5
        for weight in import_names(spec).weights(spec)
        for name in weight.names()
    }


TENSORS = random_tensors(SPEC)


def test_both_transformers_classes_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as hub
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import (
        MiniMaxM3VLConfig,
        MiniMaxM3VLTextConfig,
        MiniMaxM3VLVisionConfig,
    )

    torch.manual_seed(0)
    text = MiniMaxM3VLTextConfig(**TEXT)
    vision = MiniMaxM3VLVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    whole = hub.MiniMaxM3SparseForConditionalGeneration(
        MiniMaxM3VLConfig(text_config=text, vision_config=vision, projector_hidden_size=64)
    )
    alone = hub.MiniMaxM3VLForCausalLM(text)
    alone.model.load_state_dict(whole.model.language_model.state_dict())
    alone.lm_head.load_state_dict(whole.lm_head.state_dict())
    found = []
    for name, saved in (("whole", whole), ("alone", alone)):
        saved.save_pretrained(tmp_path / name)
        with caplog.at_level(logging.WARNING, logger="negamax"):
            model, tensors, _ = load(tmp_path / name)
        found.append(tensors)
        assert tensors.keys() == {n for n, s in model.weight_slots().items() if not s.optional}
        assert weight_bytes(model.spec, dtype="float32") == sum(t.nbytes for t in tensors.values())
    assert_equal(found[0], found[1])
    skips = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert len(skips) == 1
    assert re.match(r"skipped 27 tensors: vision tensors, because the model is served", skips[0])


@pytest.mark.parametrize(
    "prefix", ["language_model.model.", "model.language_model.", "model.", "language_model.", ""]
)
def test_names_load_with_every_prefix(tmp_path: Path, prefix: str) -> None:
    renamed = {re.sub(r"^model\.", prefix, name): tensor for name, tensor in TENSORS.items()}
    mtp = f"{prefix}layers.3.eh_proj.weight"
    others = {name: torch.ones(2) for name in (*VISION, f"model.{VISION[0]}", MTP, mtp)}
    save_file({**renamed, **others}, tmp_path / "model.safetensors")
    _, found, report = load(tmp_path, spec=SPEC)
    assert_equal(found, TENSORS)
    assert {len(names) for names in report.skipped.values()} == {2, 3}
    assert report.num_tensors == len(TENSORS)


def add_wrapper(folder: Path) -> None:
    """Rename the tensors as in the multimodal checkpoint, and add its other tensors."""
    tensors = load_file(folder / "model.safetensors")
    whole = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    whole |= {name: torch.ones(2) for name in VISION}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})


def test_plain_indexer_does_not_dequantize_the_attention(tmp_path: Path) -> None:
    plain = write(tmp_path, CONFIG, TENSORS, FORMATS["modelslim-dynamic"])
    file = tmp_path / "quant_model_description.json"
    stored, said = load_file(tmp_path / "model.safetensors"), json.loads(file.read_text())
    index = {name for name in TENSORS if re.search(r"\.index_[qk]_proj\.", name)}
    for name in index:
        module = name.removesuffix(".weight")
        stored = {key: each for key, each in stored.items() if not key.startswith(module)}
        stored[name] = plain[name] = TENSORS[name]
        said = {key: each for key, each in said.items() if not key.startswith(module)}
        said[name] = "FLOAT"
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    file.write_text(json.dumps(said))
    keeping = keeping_stored(resolve(platform=CPU, dtype=torch.float32))
    model, _, report = load(tmp_path, kernels=keeping)
    assert len(index) == 4 and report.num_dequantized == 0
    model.finish_loading()
    assert greedy(model, PROMPT, 8) == greedy(build(SPEC, plain), PROMPT, 8)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("keeps", [True, False])
def test_mxfp8_becomes_blocks_with_the_same_values(tmp_path: Path, tp: int, keeps: bool) -> None:
    """The smallest values may differ."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "shared_intermediate_size": 256}
    config = {**CONFIG, "text_config": {**TEXT, **sizes}}
    spec = read_spec(config)
    plain = write(tmp_path, config, random_tensors(spec), FORMATS["mxfp8"])
    stored = read_spec(json.loads((tmp_path / "config.json").read_text())).quantization
    spec = replace(spec, quantization=quantized("fp8", stored)[0])
    kernels = keeping_stored(resolve(platform=CPU, dtype=torch.float32)) if keeps else None
    layout = ParallelLayout(rank=tp - 1, tp=tp)
    model, targets, report = load(tmp_path, layout, spec=spec, kernels=kernels)
    assert (report.num_kept > 0) is keeps
    worst, num_exact, num_checked = 0.0, 0, 0
    for name, slot in model.weight_slots().items():
        is_value = is_matrix(name) and name.endswith(".weight") and name in targets
        if not is_value or name.startswith(LEFT_OUT):
            continue
        module, values = name.removesuffix(".weight"), targets[name].float()
        if keeps and slot.stored is not None:
            scale = targets[f"{module}.weight_scale_inv"].repeat_interleave(128, 0)
            values = values * scale.repeat_interleave(128, 1)[: len(values), : values.shape[1]]
        expected = part_of(slot, plain[name])
        worst = max(worst, float((values - expected).norm() / expected.norm()))
        num_exact += int((values == expected).sum())
        num_checked += values.numel()
    assert num_checked > 10**5 and num_exact / num_checked > 0.999 and worst < 1e-6
    assert report.change is not None and 0 < report.change < 1e-6 and "at most" in report.summary()


def test_conversion_keeps_only_the_text_model(tmp_path: Path) -> None:
    source, made = tmp_path / "source", tmp_path / "made"
    source.mkdir()
    plain = write(source, CONFIG, TENSORS, FORMATS["mxfp8"])
    add_wrapper(source)
    convert(conversion(source, made, "bf16", tp=2, allow_lossy=False))
    config = json.loads((made / "config.json").read_text())
    assert config["architectures"] == ["MiniMaxM3SparseForCausalLM"] and "text_config" not in config
    assert read_spec(config) == replace(
        SPEC, architecture=config["architectures"][0], dtype="bfloat16"
    )
    for rank in range(2):
        model, found, _ = load(made, ParallelLayout(rank=rank, tp=2), is_split=True)
        for key, values in found.items():
            expected = part_of(model.weight_slots()[key], plain[key])
            assert torch.allclose(values, expected, rtol=2**-8, atol=0.0), key
