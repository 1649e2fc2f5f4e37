"""Make small random MiniMax-M3 checkpoints by transformers' vision-language class, the oracle."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from tests import tiny

if TYPE_CHECKING:
    from transformers import MiniMaxM3SparseForConditionalGeneration

VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
    "patch_size": 2, "image_size": 4,
}  # fmt: skip


def random_sizes(seed: int, **fixed: Any) -> dict[str, Any]:
    """Draw a text configuration: 1-4 KV heads, top-1 to top-4 blocks of 16 or 32 tokens."""
    rng = random.Random(seed)
    num_layers, num_experts = rng.randint(2, 4), rng.randint(2, 9)
    kv_heads = rng.choice([1, 2, 3, 4])
    head_dim = rng.choice([8, 12, 16, 24])
    rotary_dim = rng.choice([n for n in (4, 8, 12) if n <= head_dim])
    width = rng.choice([13, 24, 32])
    sparse = [rng.random() < 0.7 for _ in range(num_layers)]
    sparse[rng.randrange(num_layers)] = True
    moe = [rng.random() < 0.7 for _ in range(num_layers)]
    topk = rng.randint(1, 4)
    return {
        "vocab_size": rng.choice([97, 256, 331]), "hidden_size": rng.choice([24, 37, 56, 64]),
        "intermediate_size": width, "dense_intermediate_size": rng.choice([20, 33, 48]),
        "shared_intermediate_size": rng.choice([width, width, 2 * width, 9]),
        "num_hidden_layers": num_layers, "num_attention_heads": kv_heads * rng.randint(1, 4),
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "rotary_dim": rotary_dim,
        "num_local_experts": num_experts,
        "num_experts_per_tok": rng.randint(1, min(4, num_experts)),
        "routed_scaling_factor": rng.choice([1.0, 2.0]),
        "rope_parameters": {
            "rope_type": "default", "rope_theta": rng.choice([1e4, 5e6]),
            "partial_rotary_factor": rotary_dim / head_dim,
        },
        "mlp_layer_types": ["sparse" if on else "dense" for on in moe],
        "layer_types": ["minimax_m3_sparse" if on else "full_attention" for on in sparse],
        "index_n_heads": kv_heads,
        "index_head_dim": rng.choice([n for n in (12, 16, 24) if n >= rotary_dim]),
        "index_block_size": rng.choice([16, 32]), "index_topk_blocks": topk,
        "index_local_blocks": rng.choice([1, 1, min(2, topk)]), "max_position_embeddings": 1024,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **fixed,
    }  # fmt: skip


def make_model(seed: int, **sizes: Any) -> MiniMaxM3SparseForConditionalGeneration:
    # The import takes a second, and sizes alone do not need it.
    from transformers import MiniMaxM3SparseForConditionalGeneration, MiniMaxM3VLConfig

    config = MiniMaxM3VLConfig(text_config=sizes, vision_config=VISION, projector_hidden_size=16)
    # Gemma's norms are near 0.
    return tiny.randomize(MiniMaxM3SparseForConditionalGeneration(config), seed, norm=0.0)


def text_config(seed: int, **fixed: Any) -> dict[str, Any]:
    """Return a config.json of transformers' text class, with `random_sizes`."""
    return {
        "architectures": ["MiniMaxM3VLForCausalLM"], "model_type": "minimax_m3_vl_text",
        "dtype": "float32", "rms_norm_eps": 1e-6, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, **random_sizes(seed, **fixed),
    }  # fmt: skip


SEEING = {
    "hidden_size": 160,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
IMAGE_TOKEN = 5


def make_seeing_model(
    seed: int, *, vision: dict[str, Any] | None = None, image_token: int = IMAGE_TOKEN, **sizes: Any
) -> MiniMaxM3SparseForConditionalGeneration:
    """Make a model that reads images. The default vision tower has heads of 80 columns."""
    import torch
    from transformers import MiniMaxM3SparseForConditionalGeneration, MiniMaxM3VLConfig, __version__

    if tuple(map(int, __version__.split(".")[:2])) < (5, 23):
        pytest.skip(f"the vision tower of transformers {__version__} has another rotary embedding")

    config = MiniMaxM3VLConfig(
        text_config=sizes,
        vision_config=vision or SEEING,
        projector_hidden_size=24,
        image_token_index=image_token,
    )
    model = tiny.randomize(MiniMaxM3SparseForConditionalGeneration(config), seed, norm=0.0)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        is_vision = "vision_tower" in name or "multi_modal_projector" in name
        if is_vision and name.endswith("bias"):
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return model


def random_image(height: int, width: int, generator: Any) -> Any:
    import torch

    return torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)


def pixel_values(images: list[Any]) -> dict[str, Any]:
    """Return the arguments of transformers' model for images without resizing, patch by patch."""
    import torch

    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073], dtype=torch.float64)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711], dtype=torch.float64)
    patches, grids = [], []
    for image in images:
        pixels = ((image.double() / 255 - mean) / std).float().permute(2, 0, 1)
        height, width = image.shape[:2]
        grids.append([1, height // 14, width // 14])
        for top, left in (
            (y + dy, x + dx)
            for y in range(0, height, 28)
            for x in range(0, width, 28)
            for dy in (0, 14)
            for dx in (0, 14)
        ):
            patch = pixels[:, top : top + 14, left : left + 14]
            patches.append(torch.stack([patch, patch], dim=1).flatten())
    return {"pixel_values": torch.stack(patches), "image_grid_thw": torch.tensor(grids)}
