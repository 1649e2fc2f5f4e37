"""The training form of nano-m3's vision tower and projector, and their part of the checkpoint.

`negamax/models/minimax_m3/vision.py` has the formulas. The names of the parameters are those of
MiniMax-M3's checkpoints.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nano.export import _dump

ASSETS = Path(__file__).parents[1] / "negamax" / "assets" / "nano-m3"
TEMPLATE = Path(__file__).with_name("m3_chat_template.jinja")
IMAGE_ID = 4121
START_ID, END_ID = IMAGE_ID + 4, IMAGE_ID + 5
SIDE, PATCH, MERGE, FRAMES = 28, 14, 2, 2
# CLIP's mean and standard deviation
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
FILE = "vision.safetensors"
# the fields of config.json that describe the tower and projector
FIELDS: dict[str, Any] = json.loads(
    Path(__file__).with_name("m3_vision_config.json").read_text(encoding="utf-8")
)
SIZES = FIELDS["vision_config"]


def _linear(module: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, module.weight.to(x.dtype), module.bias.to(x.dtype))


def _norm(module: nn.LayerNorm, x: Tensor) -> Tensor:
    weight, bias = module.weight.to(x.dtype), module.bias.to(x.dtype)
    return F.layer_norm(x, module.normalized_shape, weight, bias, module.eps)


def _new_norm() -> nn.LayerNorm:
    return nn.LayerNorm(SIZES["hidden_size"], eps=SIZES["layer_norm_eps"])


def _mlp(width: int, inner: int, outputs: int, names: tuple[str, str]) -> nn.ModuleDict:
    return nn.ModuleDict({names[0]: nn.Linear(width, inner), names[1]: nn.Linear(inner, outputs)})


def _run_mlp(module: nn.ModuleDict, x: Tensor) -> Tensor:
    first, second = module.values()
    return _linear(second, F.gelu(_linear(first, x)))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + half) of x [B, heads, N, head_dim] by angles [N, half]."""
    half = cos.shape[-1]
    a, b = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
    return torch.cat((turned, x[..., 2 * half :]), -1)


class TowerLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = SIZES["hidden_size"]
        self.heads = SIZES["num_attention_heads"]
        self.layer_norm1, self.layer_norm2 = _new_norm(), _new_norm()
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        self.self_attn = nn.ModuleDict({name: nn.Linear(width, width) for name in names})
        self.mlp = _mlp(width, SIZES["intermediate_size"], width, ("fc1", "fc2"))

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """h [B, N, hidden] -> the same shape."""
        x, own = _norm(self.layer_norm1, h), self.self_attn
        q, k, v = (
            _linear(own[name], x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v)
        h = h + _linear(own["out_proj"], mixed.transpose(1, 2).flatten(2))
        return h + _run_mlp(self.mlp, _norm(self.layer_norm2, h))


class Tower(nn.Module):
    """Map images uint8 [B, height, width, 3] to embeddings [B, image tokens, text hidden]."""

    def __init__(self) -> None:
        super().__init__()
        width, text, num_layers = (
            SIZES[name] for name in ("hidden_size", "projection_dim", "num_hidden_layers")
        )
        body = nn.Module()
        body.embeddings, body.encoder = nn.Module(), nn.Module()
        body.embeddings.patch_embedding = nn.Linear(3 * FRAMES * PATCH**2, width, bias=False)
        body.pre_layrnorm = _new_norm()
        body.encoder.layers = nn.ModuleList(TowerLayer() for _ in range(num_layers))
        self.vision_tower = nn.Module()
        self.vision_tower.vision_model = body
        names, inner = ("linear_1", "linear_2"), FIELDS["projector_hidden_size"]
        self.multi_modal_projector = _mlp(width, inner, text, names)
        self.patch_merge_mlp = _mlp(text * MERGE**2, inner, text, names)
        residual = (2 * num_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = residual if ".out_proj." in name or ".fc2." in name else 1.0
                nn.init.normal_(parameter, std=scale * parameter.shape[1] ** -0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        nn.init.normal_(self.patch_merge_mlp["linear_2"].weight, std=inner**-0.5)

    def forward(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        body = self.vision_tower.vision_model
        patches = cut(images).to(dtype)
        h = F.linear(patches, body.embeddings.patch_embedding.weight.to(dtype))
        h = _norm(body.pre_layrnorm, h)
        angles = make_angles(images.shape[1] // PATCH, images.shape[2] // PATCH, images.device)
        for layer in body.encoder.layers:
            h = layer(h, angles.cos(), angles.sin())
        h = _run_mlp(self.multi_modal_projector, h)
        return _run_mlp(self.patch_merge_mlp, h.unflatten(1, (-1, MERGE**2)).flatten(2))

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights in bfloat16 in the shapes of the checkpoint."""
        found = {name: value.detach().bfloat16() for name, value in self.state_dict().items()}
        patches = "vision_tower.vision_model.embeddings.patch_embedding.weight"
        found[patches] = found[patches].unflatten(1, (3, FRAMES, PATCH, PATCH))
        return {name: value.cpu().contiguous() for name, value in found.items()}


def load_tower(folder: Path) -> Tower:
    """Load the tower of a checkpoint."""
    tower, saved = Tower(), load_file(folder / FILE)
    state = {name: saved[name].view(value.shape) for name, value in tower.state_dict().items()}
    tower.load_state_dict(state)
    return tower


def make_angles(rows: int, columns: int, device: torch.device) -> Tensor:
    """Return the angles of all patches, float32 [patches, time + row + column]."""
    size = 2 * (SIZES["hidden_size"] // SIZES["num_attention_heads"] // 3 // 2)
    frequencies = SIZES["rope_theta"] ** -(torch.arange(0, size, 2, device=device) / size)
    places = (torch.arange(count, device=device) for count in (rows, columns))
    grid = torch.stack(torch.meshgrid(*places, indexing="ij"))
    squares = grid.view(2, rows // MERGE, MERGE, columns // MERGE, MERGE)
    row, column = squares.transpose(2, 3).flatten(1)[..., None] * frequencies
    return torch.cat((torch.zeros_like(row), row, column), -1)


def cut(images: Tensor) -> Tensor:
    """Normalize images [B, height, width, 3], and cut them into patches [B, N, values]."""
    mean, std = (torch.tensor(each, device=images.device) for each in (MEAN, STD))
    pixels = (images.float() / 255 - mean) / std
    rows, columns = images.shape[1] // SIDE, images.shape[2] // SIDE
    parts = pixels.view(-1, rows, MERGE, PATCH, columns, MERGE, PATCH, 3)
    parts = parts.permute(0, 1, 4, 2, 5, 7, 3, 6).flatten(1, 4)  # [B, N, 3, 14, 14]
    return parts.unsqueeze(3).expand(-1, -1, -1, FRAMES, -1, -1).flatten(2)


def add_tower(tower: Tower, folder: Path) -> None:
    """Add the tower to the checkpoint of a text model in `folder`, with its chat template."""
    tensors = tower.tensors()
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    (folder / FILE).chmod(0o644)
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    if FILE not in index["weight_map"].values():
        index["metadata"]["total_size"] += sum(each.nbytes for each in tensors.values())
    index["weight_map"] = dict(sorted((index["weight_map"] | dict.fromkeys(tensors, FILE)).items()))
    _dump(index, folder / "model.safetensors.index.json")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "quantization_config" in config:
        modules = config["quantization_config"]["modules_to_not_convert"]
        towers = ("vision_tower", "multi_modal_projector", "patch_merge_mlp")
        modules += [module for module in towers if module not in modules]
    _dump(config | FIELDS, folder / "config.json")
    shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")
