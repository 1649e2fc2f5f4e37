import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from foreign_family import names
from foreign_family.config import ForeignSpec
from tests.tiny import NANO, TOKENIZER_FILES

CONFIG = {
    "architectures": ["ForeignForCausalLM"], "model_type": "foreign", "vocab_size": 98,
    "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 12, "rotary_dim": 8, "rope_theta": 1e4, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256, "mlp_width": 56, "expert_width": 24, "num_experts": 8,
    "experts_per_token": 2, "index_width": 5, "index_top_k": 9, "dtype": "float32",
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def random_tensors(spec: ForeignSpec) -> dict[str, Tensor]:
    """Draw norms around 1, and matrices that preserve the magnitude of their inputs."""
    generator = torch.Generator().manual_seed(3)
    found = {}
    for weight in names.weights(spec):
        for name in weight.names():
            values = torch.randn(weight.shape, generator=generator)
            if len(weight.shape) == 1:
                values = 1 + 0.2 * values
            elif not weight.is_table:
                values *= weight.shape[-1] ** -0.5
            found[name] = values
    return found


def save(tensors: Mapping[str, Tensor], folder: Path) -> Path:
    save_file(dict(tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in TOKENIZER_FILES:
        shutil.copy(NANO / name, folder / name)
    return folder
