"""Make small MiniMax-M2 checkpoints with random weights by transformers, which is the oracle."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import MiniMaxM2ForCausalLM

NANO = Path(__file__).parents[1] / "negamax" / "assets" / "nano"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def small_sizes(**changes: Any) -> dict[str, Any]:
    """Return an M2 configuration of two layers that runs in milliseconds."""
    return {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8,
        "num_local_experts": 6, "num_experts_per_tok": 2, "max_position_embeddings": 80, **changes,
    }  # fmt: skip


def random_sizes(seed: int) -> dict[str, Any]:
    """Draw an M2 configuration: 2-12 heads, 1-4 KV heads, 4-32 experts, top-1 to top-8."""
    rng = random.Random(seed)
    num_kv_heads = rng.choice([1, 2, 3, 4])
    num_heads = num_kv_heads * rng.randint(-(-2 // num_kv_heads), 12 // num_kv_heads)
    head_dim = rng.choice([8, 12, 16, 24, 30])
    num_experts = rng.randint(4, 32)
    return {
        "vocab_size": rng.choice([97, 256, 331]), "hidden_size": rng.choice([24, 37, 56, 64, 75]),
        "intermediate_size": rng.choice([13, 32, 41]), "num_hidden_layers": rng.randint(1, 3),
        "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim,
        "rotary_dim": rng.choice([n for n in (4, 8, 12, 16) if n <= head_dim]),
        "num_local_experts": num_experts,
        "num_experts_per_tok": rng.randint(1, min(8, num_experts)),
        "rope_theta": rng.choice([1e4, 5e6]), "max_position_embeddings": 512,
    }  # fmt: skip


def make_model(seed: int, **sizes: Any) -> MiniMaxM2ForCausalLM:
    from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

    factor = sizes.pop("rotary_dim") / sizes["head_dim"]
    theta = sizes.pop("rope_theta", 5e6)
    rope = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": factor}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = MiniMaxM2Config(**sizes, **special, rope_parameters=rope, tie_word_embeddings=False)
    return randomize(MiniMaxM2ForCausalLM(config), seed, norm=1.0)


def randomize(model: Any, seed: int, *, norm: float) -> Any:
    """Draw float32 weights: norms near `norm`, router bias 4-10, and separated logits."""
    model = model.float().eval()
    model.set_experts_implementation("eager")  # Other implementations refuse odd sizes.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "e_score_correction_bias" in name:
                sign = torch.randint(0, 2, (), generator=generator) * 2 - 1
                tensor.copy_(sign * (4 + 6 * torch.rand(tensor.shape, generator=generator)))
            elif "norm" in name:
                tensor.copy_(norm + 0.2 * torch.randn(tensor.shape, generator=generator))
            elif tensor.is_floating_point() and tensor.dim() >= 2:
                gain = 1.0 if "lm_head" in name or "embed" in name else tensor.shape[-1] ** -0.5
                tensor.copy_(gain * torch.randn(tensor.shape, generator=generator))
    return model


def save(model: MiniMaxM2ForCausalLM, folder: Path) -> Path:
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(NANO / name, folder / name)
    return folder
