"""FP8 per output row and per matrix, as compressed-tensors stores it: the same model as its weights
stored plainly, on one rank and on several.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from negamax import LLM, SamplingParams
from negamax.base.errors import CheckpointError, ConfigError
from negamax.config.quantization import QuantizationSpec
from negamax.formats.floats import PLAIN, with_rounded_activations
from negamax.quantization.compressed_tensors import STRATEGIES
from negamax.quantization.detect import detect
from tests import tiny

CHANNEL = {
    "num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False,
    "group_size": None, "block_structure": None, "actorder": None, "observer": "minmax",
    "observer_kwargs": {},
}  # fmt: skip
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
PLAIN_MODULE = "model.layers.1.self_attn.o_proj"
CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "global_compression_ratio": None,
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": CHANNEL, "input_activations": TOKENS},
        "group_1": {
            "targets": [r"re:.*experts\.\d+\.w2"],
            "weights": {**CHANNEL, "strategy": "tensor"},
            "input_activations": TOKENS,
        },
    },
    "ignore": ["lm_head", "re:.*gate$", PLAIN_MODULE],
}


def quantize(name: str, weight: Tensor) -> dict[str, Tensor]:
    """`weight` as LLM Compressor stores it; its reader is not asked."""
    if name.endswith("w2.weight"):
        scale = (weight.abs().max() / 448).reshape(1)
    else:
        scale = (weight.abs().amax(dim=1, keepdim=True) / 448).bfloat16()
    values = (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {name: values, name.removesuffix("weight") + "weight_scale": scale}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One model: in FP8, and its dequantised weights in float32."""
    stored, plain = (tmp_path_factory.mktemp(name) for name in ("stored", "plain"))
    sizes = {**tiny.random_sizes(1), "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 96, "intermediate_size": 32, "num_hidden_layers": 2}
    tiny.save(tiny.make_model(1, **sizes), stored)
    tensors = load_file(stored / "model.safetensors")
    quantized: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        is_matrix = name.endswith("_proj.weight") or ".experts." in name
        if not is_matrix or name.startswith(PLAIN_MODULE):
            quantized[name] = tensor
            continue
        parts = quantize(name, tensor)
        quantized |= parts
        values, scale = parts.values()
        tensors[name] = values.float() * scale.float()
    shutil.copytree(stored, plain, dirs_exist_ok=True)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(quantized, stored / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIG}))
    return stored, plain


def logprobs(folder: Path, ranks: int) -> list[Any]:
    prompts = [
        torch.randint(3, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist()
        for n in (3, 17, 40)
    ]
    params = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=1
    )
    with LLM(
        str(folder), dtype="float32", tensor_parallel_size=ranks, num_threads=1, block_size=8
    ) as llm:
        return [
            (
                one.outputs[0].token_ids,
                [(entry.logprob, entry.top_logprobs) for entry in one.outputs[0].logprobs or ()],
                [entry and entry.logprob for entry in one.prompt_logprobs or ()],
            )
            for one in llm.generate(prompts, params)
        ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_logprobs_are_those_of_the_same_weights_stored_plainly(
    folders: tuple[Path, Path], ranks: int
) -> None:
    stored, plain = (logprobs(folder, ranks) for folder in folders)
    assert stored == plain and stored[0][1]


def test_a_scale_that_is_missing_misshapen_or_not_asked_for_is_refused(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "changed")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight_scale"
    for changed, message in (
        ({name: None}, rf"stored as fp8_e4m3_channel and {name} is missing"),
        ({name: torch.ones(1)}, rf"{name} has shape \[1\]; config.json asks for \[\d+, 1\]"),
        ({name: tensors[name].double()}, rf"{name} has dtype F64; fp8_e4m3_channel"),
        ({name: tensors[name] * torch.nan}, rf"infinite: {name}"),
        (
            {f"{PLAIN_MODULE}.weight_scale": torch.ones(1)},
            rf"not part of this model: {PLAIN_MODULE}.weight_scale .*stored plain",
        ),
    ):
        left = {key: tensor for key, tensor in {**tensors, **changed}.items() if tensor is not None}
        save_file(left, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises((CheckpointError, ConfigError), match=message):
            LLM(str(folder), dtype="float32", num_threads=1)


def changed(path: str, value: object) -> QuantizationSpec:
    fields = json.loads(json.dumps(CONFIG))
    *parents, last = path.split("/")
    inner = fields
    for name in parents:
        inner = inner[name]
    inner[last] = value
    return QuantizationSpec("compressed-tensors", fields)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format", "marlin-24"),
        ("kv_cache_scheme", {"num_bits": 4, "type": "int"}),
        ("config_groups", {}),
        ("config_groups/group_0", {"targets": ["Linear"]}),
        ("config_groups/group_0/weights/zero_points", "int8"),
        ("config_groups/group_0/inverse", True),
        ("rotation", "hadamard"),
        ("config_groups/group_0/weights/num_bits", 4),
        ("config_groups/group_0/weights/type", "int"),
        ("config_groups/group_0/weights/strategy", "group"),
        ("config_groups/group_0/weights/symmetric", False),
        ("config_groups/group_0/weights/group_size", 128),
        ("config_groups/group_1/input_activations", "static"),
        ("config_groups/group_0/output_activations", {"num_bits": 8}),
        ("config_groups/group_0/targets", "Linear"),
        ("ignore", "lm_head"),
    ],
)
def test_what_is_stored_in_another_way_is_refused_by_name(path: str, value: object) -> None:
    name = "num_bits" if path == "kv_cache_scheme" else path.split("/")[-1]
    with pytest.raises(ConfigError, match=rf"config: \S*{name} is .*; supported: "):
        detect(changed(path, value))


def test_each_module_has_the_format_of_its_group() -> None:
    scheme = detect(QuantizationSpec("compressed-tensors", CONFIG))
    formats = {name: with_rounded_activations(each) for name, each in STRATEGIES.items()}
    assert scheme is not None and scheme.formats == tuple(formats.values())
    layer = "model.layers.0"
    for module, expected in {
        f"{layer}.self_attn.q_proj": formats["channel"],
        f"{layer}.block_sparse_moe.experts.3.w1": formats["channel"],
        f"{layer}.block_sparse_moe.experts.3.w2": formats["tensor"],
        f"{layer}.block_sparse_moe.gate": PLAIN,
        PLAIN_MODULE: PLAIN,
        "lm_head": PLAIN,
    }.items():
        assert scheme.format_of(module) == expected, module
