import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from negamax import LLM, SamplingParams
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
    """Store `weight` as LLM Compressor does, independent of the product's code."""
    if name.endswith("w2.weight"):
        scale = (weight.abs().max() / 448).reshape(1)
    else:
        scale = (weight.abs().amax(dim=1, keepdim=True) / 448).bfloat16()
    values = (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {name: values, name.removesuffix("weight") + "weight_scale": scale}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
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
def test_logprobs_equal_those_of_plain_weights(folders: tuple[Path, Path], ranks: int) -> None:
    stored, plain = (logprobs(folder, ranks) for folder in folders)
    assert stored == plain and stored[0][1]
