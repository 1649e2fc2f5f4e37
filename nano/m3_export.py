"""Write a trained state as a MiniMax-M3 checkpoint without a vision part.

    python -m nano.m3_export --state DIR --out DIR [--random-index]

The folder has FP8 weights in one safetensors file, index, configuration, tokenizer and chat
template. `--random-index` replaces the index projections by random ones, as the control experiment
for block selection.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nano import m3_tokenizer
from nano.export import _dump, quantise
from nano.m3_model import M3Config, M3Model
from nano.m3_train import load_state
from nano.model import spread

TEMPLATE = Path(__file__).with_name("m3_chat_template.jinja")
ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
INDEX = {"index_q": "index_q_proj", "index_k": "index_k_proj"}
MLP = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
NORMS = {
    "input_norm": "input_layernorm", "post_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
}  # fmt: skip
INDEX_NORMS = {"index_q_norm": "self_attn.index_q_norm", "index_k_norm": "self_attn.index_k_norm"}


def config_json(config: M3Config, *, fp8: bool = True) -> dict[str, Any]:
    """Return the config.json of MiniMax-M3 without a vision configuration."""
    dense, sparse = config.num_dense_layers, config.num_hidden_layers - config.num_dense_layers
    per_layer = [0] * dense + [1] * sparse
    text = {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "attention_dropout": 0.0,
        "attention_output_gate": False,
        "bos_token_id": m3_tokenizer.BOS_ID,
        "dense_intermediate_size": config.dense_intermediate_size,
        "dtype": "bfloat16",
        "eos_token_id": m3_tokenizer.EOS_ID,
        "head_dim": config.head_dim,
        "hidden_act": "swigluoai",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "model_type": "minimax_m3_vl_text",
        "moe_layer_freq": per_layer,
        "n_shared_experts": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_experts_per_tok": config.num_experts_per_tok,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "num_local_experts": config.num_local_experts,
        "num_mtp_modules": 0,
        "partial_rotary_factor": config.rotary_dim / config.head_dim,
        "qk_norm_type": "per_head",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": int(config.rope_theta),
        "rotary_dim": config.rotary_dim,
        "routed_scaling_factor": config.routed_scaling_factor,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": config.intermediate_size,
        "sparse_attention_config": {
            "sparse_attention_freq": per_layer,
            "sparse_block_size": config.block_size,
            "sparse_disable_index_value": per_layer,
            "sparse_index_dim": config.index_dim,
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_num_index_heads": config.num_key_value_heads,
            "sparse_score_type": "max",
            "sparse_topk_blocks": config.topk_blocks,
            "use_sparse_attention": True,
        },
        "swiglu_alpha": config.swiglu_alpha,
        "swiglu_limit": config.swiglu_limit,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "vocab_size": config.vocab_size,
    }
    found: dict[str, Any] = {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "bos_token_id": m3_tokenizer.BOS_ID,
        "dtype": "bfloat16",
        "eos_token_id": m3_tokenizer.EOS_ID,
        "model_type": "minimax_m3_vl",
        "text_config": text,
        "tie_word_embeddings": False,
        "transformers_version": "5.23.0",
    }
    if fp8:
        found["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "float8_e4m3fn",
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        }
    return found


GENERATION = {
    "bos_token_id": m3_tokenizer.BOS_ID,
    "do_sample": True,
    "eos_token_id": m3_tokenizer.EOS_ID,
    "temperature": 0.3,
    "top_k": 40,
    "top_p": 0.95,
    "transformers_version": "5.23.0",
}


def tensors_of(
    state: dict[str, Tensor], config: M3Config, *, fp8: bool = True
) -> dict[str, Tensor]:
    """Return the tensors by published names in file order. If not `fp8`, all are float32."""
    found: dict[str, Tensor] = {}
    high = torch.bfloat16 if fp8 else torch.float32

    def put(name: str, weight: Tensor) -> None:
        if fp8:
            found[f"{name}.weight"], found[f"{name}.weight_scale_inv"] = quantise(weight)
        else:
            found[f"{name}.weight"] = weight.float()

    found["language_model.model.embed_tokens.weight"] = state["embed"].to(high)
    for index in range(config.num_hidden_layers):
        is_sparse = index >= config.num_dense_layers
        here, there = f"layers.{index}", f"language_model.model.layers.{index}"
        for short, name in (NORMS | (INDEX_NORMS if is_sparse else {})).items():
            found[f"{there}.{name}.weight"] = state[f"{here}.{short}"].to(high)
        for short, name in (ATTENTION | (INDEX if is_sparse else {})).items():
            put(f"{there}.self_attn.{name}", state[f"{here}.{short}"])
        if not is_sparse:
            for short, name in MLP.items():
                put(f"{there}.mlp.{name}", state[f"{here}.{short}"][0])
            continue
        moe = f"{there}.block_sparse_moe"
        found[f"{moe}.gate.weight"] = state[f"{here}.gate"].float()
        found[f"{moe}.e_score_correction_bias"] = state[f"{here}.expert_bias"].float()
        for expert in range(config.num_local_experts):
            for short in MLP:
                put(f"{moe}.experts.{expert}.{short}", state[f"{here}.{short}"][expert])
        for short, name in MLP.items():
            put(f"{moe}.shared_experts.{name}", state[f"{here}.{short}"][-1])
    found["language_model.model.norm.weight"] = state["norm"].to(high)
    found["language_model.lm_head.weight"] = state["head"].to(high)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}


def with_random_index(state: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Return the state with random index projections of the same size."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(value.shape, generator=generator) * value.float().std().cpu()
        if name.endswith((".index_q", ".index_k"))
        else value
        for name, value in state.items()
    }


def write(state: dict[str, Tensor], folder: Path, config: M3Config, *, fp8: bool = True) -> None:
    """Write the whole checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tensors_of(state, config, fp8=fp8)
    file_name = "model-00001-of-00001.safetensors"
    save_file(tensors, folder / file_name, metadata={"format": "pt"})
    (folder / file_name).chmod(0o644)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    weight_map = dict.fromkeys(sorted(tensors), file_name)
    _dump(
        {"metadata": {"total_size": total}, "weight_map": weight_map},
        folder / "model.safetensors.index.json",
    )
    _dump(config_json(config, fp8=fp8), folder / "config.json")
    _dump(GENERATION, folder / "generation_config.json")
    m3_tokenizer.write(folder)
    shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")


def load(folder: Path) -> M3Model:
    """Load a checkpoint folder with its FP8 weights dequantized."""
    config, tensors = M3Config(), dict[str, Tensor]()
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)

    def take(name: str) -> Tensor:
        weight, scales = tensors[f"{name}.weight"].float(), tensors.get(f"{name}.weight_scale_inv")
        return weight if scales is None else weight * spread(scales)

    root = "language_model"
    state = {
        "embed": take(f"{root}.model.embed_tokens"),
        "norm": take(f"{root}.model.norm"),
        "head": take(f"{root}.lm_head"),
    }
    for index in range(config.num_hidden_layers):
        is_sparse = index >= config.num_dense_layers
        here, there = f"layers.{index}", f"{root}.model.layers.{index}"
        for short, name in (NORMS | (INDEX_NORMS if is_sparse else {})).items():
            state[f"{here}.{short}"] = take(f"{there}.{name}")
        for short, name in (ATTENTION | (INDEX if is_sparse else {})).items():
            state[f"{here}.{short}"] = take(f"{there}.self_attn.{name}")
        moe = f"{there}.block_sparse_moe"
        places = [f"{there}.mlp.{{}}"]
        state[f"{here}.expert_bias"] = torch.zeros(0)
        if is_sparse:
            state[f"{here}.gate"] = take(f"{moe}.gate")
            state[f"{here}.expert_bias"] = tensors[f"{moe}.e_score_correction_bias"]
            experts = range(config.num_local_experts)
            places = [f"{moe}.experts.{expert}.{{}}" for expert in experts]
        for short, name in MLP.items():
            parts = [take(place.format(short if is_sparse else name)) for place in places]
            if is_sparse:
                parts.append(take(f"{moe}.shared_experts.{name}"))
            state[f"{here}.{short}"] = torch.stack(parts)
    net = M3Model(config)
    net.load_state_dict(state)
    return net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--random-index", action="store_true")
    arguments = parser.parse_args()
    found = load_state(arguments.state)
    state = {name[6:]: value for name, value in found.items() if name.startswith("model.")}
    if arguments.random_index:
        state = with_random_index(state)
    write(state, arguments.out, M3Config())
    size = sum(path.stat().st_size for path in arguments.out.iterdir())
    print(f"{arguments.out}: {size / 1e6:.2f} MB", flush=True)


if __name__ == "__main__":
    main()
