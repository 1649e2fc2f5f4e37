import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import m2_checkpoints
import pytest
import torch
from loading_support import assert_equal, assert_holds, conversion, edited, greedy, load, part_of
from m2_checkpoints import random_tensors, save_sharded, tiny_spec
from model_support import build
from safetensors.torch import load_file, save_file
from stored_formats import (
    EXPORT_PLAIN,
    EXPORTS,
    FORMATS,
    LEFT_OUT,
    auto_round_floats,
    export_of_modelopt,
    export_of_quark,
    is_matrix,
    sample,
    write,
)
from stored_kernels import KEEPING
from torch import Tensor

from negamax.base.errors import CheckpointError, ConfigError
from negamax.config.model_spec import ModelSpec
from negamax.convert.convert import convert
from negamax.kernels.registry import KernelTable
from negamax.models.memory import dequantized, weight_bytes
from negamax.models.registry import import_names, read_spec
from negamax.parallel.layout import ParallelLayout
from negamax.quantization.names import quantized
from tests import quantization_descriptions as described
from tests.tables import read_table

CONFIG = {**m2_checkpoints.CONFIG, "hidden_size": 64, "intermediate_size": 64}
TENSORS = random_tensors(tiny_spec(**CONFIG))
PROMPT = [5, 17, 60, 3]
DEQ_SCALES = ("modelslim-static", "modelslim-static-fp16")
MODULE = "model.layers.0.self_attn.q_proj"
# the layouts of the two inner ranks of four
LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(rank=1, tp=2, ep=2),
    ParallelLayout(rank=1, tp=4, ep=2),
    ParallelLayout(rank=2, tp=4, ep=2),
]


@pytest.mark.parametrize("name", [*FORMATS, *EXPORTS])
def test_stored_values_are_loaded(name: str, tmp_path: Path) -> None:
    stored = {**FORMATS, **EXPORTS}[name]
    plain = write(tmp_path, CONFIG, TENSORS, stored)
    head = {"lm_head.weight"} if stored.with_head else set()
    quantized = {key for key in plain if is_matrix(key) and not key.startswith(LEFT_OUT)} | head
    for key in quantized:  # The stored values differ from the original values.
        assert 0 < (plain[key] - TENSORS[key]).norm() / TENSORS[key].norm() < 0.5, key
    model, found, report = load(tmp_path, ParallelLayout(rank=1, tp=2))
    assert report.num_dequantized == len(quantized & found.keys()) == 31 + len(head)
    for key, values in found.items():
        expected = part_of(model.weight_slots()[key], plain[key])
        torch.testing.assert_close(values, expected, rtol=1e-6 * (name in EXPORTS), atol=0)


M3_FORMATS = (
    "mxfp8", "minimax-m3.1", "fp8-block", "modelopt-mixed", "modelopt-nvfp4", "quark-mxfp4",
    "modelslim-dynamic", "compressed-mxfp8", "packed-int4", "awq",
)  # fmt: skip
CASES = [("m2", each) for each in sample(FORMATS, 3, 10)]
CASES += [("m3", each) for each in sample(M3_FORMATS, 2, 5)]


@pytest.mark.parametrize(
    ("family", "name"),
    [pytest.param(family, *each.values, marks=each.marks) for family, each in CASES],
)
def test_model_computes_with_the_stored_matrices(family: str, name: str, tmp_path: Path) -> None:
    config, tensors = (CONFIG, TENSORS) if family == "m2" else (M3_CONFIG, M3_TENSORS)
    plain = write(tmp_path, config, tensors, FORMATS[name])
    if family == "m3":
        add_wrapper(tmp_path)
    prompt = PROMPT if family == "m2" else M3_PROMPT
    expected = greedy(build(read_spec(config), plain), prompt, 12)
    assert len(set(expected)) > 2
    for layout in LAYOUTS:
        model, found, report = load(tmp_path, layout)
        assert sum(map(len, report.skipped.values())) == (len(VISION) if family == "m3" else 0)
        assert_holds(model, found, plain)
        held = sum(values.nbytes for values in found.values())
        assert held == weight_bytes(model.spec, dtype="float32", kept=dequantized, layout=layout)
        if layout.tp > 1:
            continue
        model.finish_loading()
        assert greedy(model, prompt, 12) == expected
        if name == "fp8-fnuz-dtype":  # The config.json of this format declares OCP FP8.
            continue
        kept, _, report = load(tmp_path, layout, kernels=KEEPING)
        not_kept = "act-order" in name or name in DEQ_SCALES
        assert (report.num_kept == 0) is not_kept
        # The matrices of an expert have scale_bias of different shapes, so they are dequantized.
        assert report.num_dequantized == 0 or name != "modelslim-int4"
        kept.finish_loading()
        assert greedy(kept, prompt, 12) == expected


@pytest.mark.parametrize("with_index", [True, False])
def test_modelslim_file_names_are_found(tmp_path: Path, with_index: bool) -> None:
    plain = write(tmp_path, CONFIG, TENSORS, FORMATS["modelslim-dynamic"])
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files = [f"quant_model_weights-0000{number}-of-00002.safetensors" for number in (1, 2)]
    save_sharded(tmp_path, stored, names=files, with_index=with_index)
    if with_index:
        index = tmp_path / "model.safetensors.index.json"
        index.rename(tmp_path / "quant_model_weights.safetensors.index.json")
    model, found, _ = load(tmp_path)
    assert_holds(model, found, plain)


def test_bf16_described_as_fp4_is_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = write(tmp_path, CONFIG, TENSORS, FORMATS["modelopt-nvfp4"])
    with edited(tmp_path) as stored:
        stored[f"{MODULE}.weight"] = plain[f"{MODULE}.weight"].bfloat16()
    with pytest.raises(CheckpointError, match=rf"{MODULE}.weight has dtype BF16; nvfp4 is stored"):
        load(tmp_path)
    with edited(tmp_path) as stored:
        for name in ("weight_scale", "weight_scale_2", "input_scale"):
            del stored[f"{MODULE}.{name}"]
    with caplog.at_level(logging.INFO, logger="negamax"):
        _, found, _ = load(tmp_path)
    assert "30 activation scales are not used" in caplog.text
    assert torch.equal(found[f"{MODULE}.weight"], stored[f"{MODULE}.weight"].float())
    with edited(tmp_path) as stored:
        stored[f"{MODULE}.weight"] = stored[f"{MODULE}.weight"].view(torch.uint8)
    with pytest.raises(CheckpointError, match=rf"{MODULE}.weight .*nvfp4.*missing|shape"):
        load(tmp_path)


def test_rank_keeps_experts_if_another_rank_has_one_in_bf16(tmp_path: Path) -> None:
    plain = write(tmp_path, CONFIG, TENSORS, FORMATS["modelopt-nvfp4"])
    expert = "model.layers.0.block_sparse_moe.experts.0"
    own = {key: plain[key].bfloat16() for key in plain if key.startswith(f"{expert}.")}
    with edited(tmp_path) as stored:
        for key in [key for key in stored if key.startswith(f"{expert}.")]:
            del stored[key]
        stored |= own
    path = tmp_path / "hf_quant_config.json"
    description = json.loads(path.read_text())
    description["quantization"]["exclude_modules"].append(f"{expert}*")
    path.write_text(json.dumps(description))
    kept = []
    for rank in range(2):
        layout = ParallelLayout(rank=rank, tp=2, ep=2)
        model, found, report = load(tmp_path, layout, kernels=KEEPING)
        name = f"{expert}.w1.weight"
        assert model.weight_slots()[name].needed is (rank == 0)
        if rank == 0:
            assert torch.equal(found[name], own[name].float())
        kept.append(report.num_kept)
    # Rank 0 dequantizes one of the two layers, and each layer has two experts.
    assert kept[1] - kept[0] == 2 * 3


@pytest.mark.parametrize(
    ("name", "part", "message"), read_table("stored_formats.tensors_with_known_content_are_checked")
)
@pytest.mark.parametrize("kernels", [None, KEEPING], ids=["dequantized", "kept"])
def test_tensors_with_known_content_are_checked(
    tmp_path: Path, name: str, part: str, message: str, kernels: KernelTable | None
) -> None:
    write(tmp_path, CONFIG, TENSORS, FORMATS[name])
    with edited(tmp_path) as stored:
        changed = stored[f"model.layers.0.block_sparse_moe.experts.1.w3.{part}"]
        changed[changed == changed.max()] += 1
        if name == "gptq-sym":
            changed[:] = 1
    with pytest.raises(CheckpointError, match=rf"experts\.1\.w3\.{message}"):
        load(tmp_path, kernels=kernels)


def test_fnuz_nan_is_named(tmp_path: Path) -> None:
    write(tmp_path, CONFIG, TENSORS, FORMATS["fp8-fnuz"])
    with edited(tmp_path) as stored:
        stored[f"{MODULE}.weight"].view(torch.uint8)[3, 5] = 0x80
    with pytest.raises(CheckpointError, match=rf"{MODULE}\S+ in 1 of 64 x 64 .*first at \[3, 5\]"):
        load(tmp_path)


# --- exports --------------------------------------------------------------------------------------

CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "observer": "mse"}


def describe(folder: Path, description: dict[str, Any]) -> None:
    config = {**CONFIG, "quantization_config": description}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "description",
    [
        described.compressed("dense", ignore=EXPORT_PLAIN, kv_cache_scheme=CACHE),
        export_of_modelopt(None, kv_cache_scheme=CACHE),
    ],
    ids=["llm-compressor", "modelopt"],
)
def test_only_the_cache_has_scales(tmp_path: Path, description: dict[str, Any]) -> None:
    name = "model.layers.0.self_attn.k_scale"
    describe(tmp_path, description)
    save_file({**TENSORS, name: torch.tensor([0.25]).bfloat16()}, tmp_path / "model.safetensors")
    _, found, report = load(tmp_path)
    assert float(found[name]) == 0.25 and report.num_dequantized == 0


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (
            described.spin_quant(EXPORT_PLAIN, "input"),
            "R1.location is 'input'; supported: weight_input, weight_output",
        ),
        (
            export_of_modelopt("NVFP4", kv_cache_scheme="NVFP4"),
            "kv_cache_scheme is 'NVFP4'; supported: an FP8 object",
        ),
        (
            export_of_modelopt(
                "W4A16_NVFP4", config_groups={"group_0": {"weights": {"group_size": 32}}}
            ),
            "group_size is 32; supported: 16",
        ),
        (export_of_quark({"dtype": "int4"}), "weight.dtype is 'int4'; supported: fp8_e4m3, fp4, i"),
        (auto_round_floats("fp", 8, 64), "group_size is 64; supported: -1"),
        (auto_round_floats("mx_fp", 4, 16), "group_size is 16; supported: 32"),
        (auto_round_floats("mx_int", 4, 32), "act_bits is 4; supported: 16"),
    ],
)
def test_unsupported_exports(description: dict[str, Any], message: str, tmp_path: Path) -> None:
    describe(tmp_path, description)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(tmp_path)


def test_experts_missing_from_an_export_are_named(tmp_path: Path) -> None:
    """Name the missing experts: GPTQModel omits all experts of transformers 5 except the first."""
    write(tmp_path, CONFIG, TENSORS, EXPORTS["modelopt, W8A16"])
    with edited(tmp_path) as stored:
        for name in [name for name in stored if re.search(r"experts\.[1-9]", name)]:
            del stored[name]
    with pytest.raises(CheckpointError, match=r"36 tensors are missing .*experts\.1\.w1") as failed:
        load(tmp_path)
    assert "the tool that wrote the checkpoint left them out" in (failed.value.hint or "")


PATTERN = [0, 1, 1]
M3_TEXT: dict[str, Any] = {
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
M3_CONFIG: dict[str, Any] = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl",
    "dtype": "float32", "text_config": M3_TEXT,
}  # fmt: skip
M3_SPEC = read_spec(M3_CONFIG)
M3_PROMPT = PROMPT * 11  # The prompt is longer than the two selected blocks of 16 tokens.
VISION = ("vision_tower.vision_model.pre_layrnorm.weight", "patch_merge_mlp.linear_1.bias")
MTP = "language_model.model.mtp.layers.0.eh_proj.weight"


def random_m3_tensors(spec: ModelSpec) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5
        for weight in import_names(spec).weights(spec)
        for name in weight.names()
    }


M3_TENSORS = random_m3_tensors(M3_SPEC)


def test_both_transformers_classes_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as hub
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import (
        MiniMaxM3VLConfig,
        MiniMaxM3VLTextConfig,
        MiniMaxM3VLVisionConfig,
    )

    torch.manual_seed(0)
    text = MiniMaxM3VLTextConfig(**M3_TEXT)
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
    for name, saved in (("whole", whole), ("alone", alone), ("by 5.17 to 5.21", whole)):
        saved.save_pretrained(tmp_path / name)
        if name.startswith("by"):
            file = tmp_path / name / "model.safetensors"
            named = load_file(file).items()
            save_file({n.replace(".mlp.", ".block_sparse_moe."): t for n, t in named}, file)
        with caplog.at_level(logging.WARNING, logger="negamax"):
            model, tensors, _ = load(tmp_path / name)
        found.append(tensors)
        assert tensors.keys() == {n for n, s in model.weight_slots().items() if not s.optional}
        assert weight_bytes(model.spec, dtype="float32") == sum(t.nbytes for t in tensors.values())
    assert_equal(found[0], found[1])
    assert_equal(found[0], found[2])
    skips = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert len(skips) == 2
    assert re.match(r"skipped 27 tensors: vision tensors, because the model is served", skips[0])


@pytest.mark.parametrize(
    "prefix", ["language_model.model.", "model.language_model.", "model.", "language_model.", ""]
)
def test_names_load_with_every_prefix(tmp_path: Path, prefix: str) -> None:
    renamed = {re.sub(r"^model\.", prefix, name): tensor for name, tensor in M3_TENSORS.items()}
    mtp = f"{prefix}layers.3.eh_proj.weight"
    others = {name: torch.ones(2) for name in (*VISION, f"model.{VISION[0]}", MTP, mtp)}
    save_file({**renamed, **others}, tmp_path / "model.safetensors")
    _, found, report = load(tmp_path, spec=M3_SPEC)
    assert_equal(found, M3_TENSORS)
    assert {len(names) for names in report.skipped.values()} == {2, 3}
    assert report.num_tensors == len(M3_TENSORS)


def add_wrapper(folder: Path) -> None:
    """Rename the tensors as in the multimodal checkpoint, and add its other tensors."""
    with edited(folder) as tensors:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors |= {name: torch.ones(2) for name in VISION}


def test_plain_indexer_does_not_dequantize_the_attention(tmp_path: Path) -> None:
    plain = write(tmp_path, M3_CONFIG, M3_TENSORS, FORMATS["modelslim-dynamic"])
    file = tmp_path / "quant_model_description.json"
    said, index_names = json.loads(file.read_text()), re.compile(r"\.index_[qk]_proj\.")
    index = {name for name in M3_TENSORS if index_names.search(name)}
    with edited(tmp_path) as stored:
        for key in filter(index_names.search, list(stored)):
            del stored[key], said[key]
        for name in index:
            stored[name] = plain[name] = M3_TENSORS[name]
            said[name] = "FLOAT"
    file.write_text(json.dumps(said))
    model, _, report = load(tmp_path, kernels=KEEPING)
    assert len(index) == 4 and report.num_dequantized == 0
    model.finish_loading()
    assert greedy(model, M3_PROMPT, 8) == greedy(build(M3_SPEC, plain), M3_PROMPT, 8)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("keeps", [True, False])
def test_mxfp8_becomes_blocks_with_the_same_values(tmp_path: Path, tp: int, keeps: bool) -> None:
    """The smallest values may differ."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "shared_intermediate_size": 256}
    config = {**M3_CONFIG, "text_config": {**M3_TEXT, **sizes}}
    spec = read_spec(config)
    plain = write(tmp_path, config, random_m3_tensors(spec), FORMATS["mxfp8"])
    stored = read_spec(json.loads((tmp_path / "config.json").read_text())).quantization
    spec = replace(spec, quantization=quantized("fp8", stored)[0])
    layout = ParallelLayout(rank=tp - 1, tp=tp)
    kernels = KEEPING if keeps else None
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
    plain = write(source, M3_CONFIG, M3_TENSORS, FORMATS["mxfp8"])
    add_wrapper(source)
    convert(conversion(source, made, "bf16", tp=2, allow_lossy=False))
    config = json.loads((made / "config.json").read_text())
    assert config["architectures"] == ["MiniMaxM3SparseForCausalLM"] and "text_config" not in config
    assert read_spec(config) == replace(
        M3_SPEC, architecture=config["architectures"][0], dtype="bfloat16"
    )
    for rank in range(2):
        model, found, _ = load(made, ParallelLayout(rank=rank, tp=2), is_split=True)
        for key, values in found.items():
            expected = part_of(model.weight_slots()[key], plain[key])
            assert torch.allclose(values, expected, rtol=2**-8, atol=0.0), key
