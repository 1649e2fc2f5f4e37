"""Write a trained state as a MiniMax-M2 checkpoint: two FP8 shards, index and configuration.

python -m nano.export --state /tmp/nano_state.pt --out negamax/assets/nano
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nano.model import NanoConfig, NanoModel, block_scales, spread

SHARDS = 2
ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
EXPERT = ("w1", "w2", "w3")
NORMS = {
    "input_norm": "input_layernorm", "post_norm": "post_attention_layernorm", 
    "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
}  # fmt: skip


def config_json(config: NanoConfig) -> dict[str, Any]:
    """Return a config.json with all keys of a MiniMax-M2 checkpoint."""
    return {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "attention_dropout": 0.0,
        "attn_type_list": [1] * config.num_hidden_layers,
        "bos_token_id": 4130,
        "dtype": "bfloat16",
        "eos_token_id": 4116,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0,
        "max_position_embeddings": 4096,
        "mlp_intermediate_size": 2 * config.intermediate_size,
        "model_type": "minimax_m2",
        "mtp_transformer_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_experts_per_tok": config.num_experts_per_tok,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "num_local_experts": config.num_local_experts,
        "num_mtp_modules": 0,
        "output_router_logits": False,
        "partial_rotary_factor": config.rotary_dim / config.head_dim,
        "qk_norm_type": "per_layer",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "float8_e4m3fn",
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": int(config.rope_theta),
        "rotary_dim": config.rotary_dim,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid",
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.46.1",
        "use_cache": True,
        "use_mtp": False,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "vocab_size": config.vocab_size,
    }


GENERATION = {
    "bos_token_id": 4130,
    "do_sample": True,
    "eos_token_id": 4116,
    "temperature": 0.3,
    "top_k": 40,
    "top_p": 0.95,
    "transformers_version": "4.46.1",
}


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to (float8_e4m3fn weight, float32 block scales [rows/128, columns/128])."""
    scales = block_scales(weight.float())
    return (weight.float() / spread(scales)).to(torch.float8_e4m3fn), scales


def tensors_of(state: dict[str, Tensor], config: NanoConfig) -> dict[str, Tensor]:
    """Return the checkpoint's tensors by their published names, in file order."""
    found: dict[str, Tensor] = {"model.embed_tokens.weight": state["embed"].bfloat16()}

    def put(name: str, weight: Tensor) -> None:
        found[f"{name}.weight"], found[f"{name}.weight_scale_inv"] = quantise(weight)

    for index in range(config.num_hidden_layers):
        here, there = f"layers.{index}", f"model.layers.{index}"
        for short, name in NORMS.items():
            found[f"{there}.{name}.weight"] = state[f"{here}.{short}"].bfloat16()
        for short, name in ATTENTION.items():
            put(f"{there}.self_attn.{name}", state[f"{here}.{short}"])
        found[f"{there}.block_sparse_moe.gate.weight"] = state[f"{here}.gate"].float()
        found[f"{there}.block_sparse_moe.e_score_correction_bias"] = state[
            f"{here}.expert_bias"
        ].float()
        for expert in range(config.num_local_experts):
            for name in EXPERT:
                put(
                    f"{there}.block_sparse_moe.experts.{expert}.{name}",
                    state[f"{here}.{name}"][expert],
                )
    found["model.norm.weight"] = state["norm"].bfloat16()
    found["lm_head.weight"] = state["head"].bfloat16()
    return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}


def write(state: dict[str, Tensor], folder: Path, config: NanoConfig) -> None:
    """Write the checkpoint files, except those of the tokenizer, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tensors_of(state, config)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    shards: list[dict[str, Tensor]] = [{} for _ in range(SHARDS)]
    written = 0
    for name, tensor in tensors.items():
        shards[min(SHARDS - 1, written * SHARDS // total)][name] = tensor
        written += tensor.numel() * tensor.element_size()
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file_name = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        (folder / file_name).chmod(0o644)
        weight_map |= dict.fromkeys(shard, file_name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _dump(index, folder / "model.safetensors.index.json")
    _dump(config_json(config), folder / "config.json")
    _dump(GENERATION, folder / "generation_config.json")


def _dump(document: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def load(folder: Path, device: torch.device, dtype: torch.dtype) -> NanoModel:
    """Load a checkpoint folder with its FP8 weights dequantized to `dtype`."""
    config = NanoConfig()
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)

    def take(name: str) -> Tensor:
        weight = tensors[f"{name}.weight"]
        scales = tensors.get(f"{name}.weight_scale_inv")
        return (
            weight.float()
            if scales is None
            else (weight.float() * spread(scales)).to(dtype).float()
        )

    state = {
        "embed": take("model.embed_tokens"),
        "norm": take("model.norm"),
        "head": take("lm_head"),
    }
    for index in range(config.num_hidden_layers):
        here, there = f"layers.{index}", f"model.layers.{index}"
        state |= {f"{here}.{short}": take(f"{there}.{name}") for short, name in NORMS.items()}
        state |= {
            f"{here}.{short}": take(f"{there}.self_attn.{name}")
            for short, name in ATTENTION.items()
        }
        moe = f"{there}.block_sparse_moe"
        state[f"{here}.gate"], state[f"{here}.expert_bias"] = (
            take(f"{moe}.gate"),
            tensors[f"{moe}.e_score_correction_bias"],
        )
        for name in EXPERT:
            state[f"{here}.{name}"] = torch.stack(
                [
                    take(f"{moe}.experts.{expert}.{name}")
                    for expert in range(config.num_local_experts)
                ]
            )
    model = NanoModel(config)
    model.load_state_dict(state)
    return model.to(device).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--state", type=Path, help="file of nano.train")
    source.add_argument("--mean", type=Path, nargs=2, help="two checkpoints, to average")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.state is not None:
        state = torch.load(arguments.state, map_location="cpu", weights_only=True)["model"]
    else:
        cpu = torch.device("cpu")
        first, second = (load(path, cpu, torch.float32).state_dict() for path in arguments.mean)
        state = {name: (first[name] + second[name]) / 2 for name in first}
    write(state, arguments.out, NanoConfig())


if __name__ == "__main__":
    main()
