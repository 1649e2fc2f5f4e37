import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from negamax.base.progress import ShowProgress
from negamax.checkpoint.loader import CheckpointReport, fill
from negamax.checkpoint.plan import plan_load
from negamax.config.model_spec import ModelSpec
from negamax.formats.floats import E4M3_MAX, PLAIN
from negamax.kernels.quantize.cpu import dequantize_block
from negamax.layers.weights import WeightSlot, slots_by_name
from negamax.models.registry import read_spec
from negamax.quantization.detect import detect
from negamax.quantization.scheme import WeightFormat
from tests import quantization_descriptions

TINY: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "rope_type": "default",
    },
}  # fmt: skip

CONFIG: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "dtype": "float32",
    **TINY,
}  # fmt: skip
FP8_CONFIG = quantization_descriptions.FP8


def tiny_spec(**changes: Any) -> ModelSpec:
    return read_spec({**CONFIG, **changes})


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden = spec.hidden_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    table: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (spec.vocab_size, hidden),
    }
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        attention, moe = f"{prefix}self_attn.", f"{prefix}block_sparse_moe."
        table |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            attention + "q_proj.weight": (q, hidden), attention + "k_proj.weight": (kv, hidden),
            attention + "v_proj.weight": (kv, hidden), attention + "o_proj.weight": (hidden, q),
            attention + "q_norm.weight": (q,), attention + "k_norm.weight": (kv,),
            moe + "gate.weight": (spec.num_experts, hidden),
            moe + "e_score_correction_bias": (spec.num_experts,),
        }  # fmt: skip
        for expert in range(spec.num_experts):
            table[f"{moe}experts.{expert}.w1.weight"] = (spec.expert_width, hidden)
            table[f"{moe}experts.{expert}.w2.weight"] = (hidden, spec.expert_width)
            table[f"{moe}experts.{expert}.w3.weight"] = (spec.expert_width, hidden)
    return table


class SlotModel:
    """Hold weight slots that write to `parameters`. A rank keeps a slice of dimension 0."""

    def __init__(
        self, spec: ModelSpec, *, dtype: torch.dtype = torch.float32, rank: int = 0, size: int = 1
    ) -> None:
        self.parameters: dict[str, Tensor] = {}
        weights = WeightFormat(dtype, torch.device("cpu"), detect(spec.quantization))
        slots = []
        for name, shape in shapes(spec).items():
            rows = range(shape[0] * rank // size, shape[0] * (rank + 1) // size)
            self.parameters[name] = torch.full((len(rows), *shape[1:]), torch.nan, dtype=dtype)
            region = (rows, *(range(extent) for extent in shape[1:]))
            is_matrix = name.endswith("_proj.weight") or ".experts." in name
            source = weights.stored(name.removesuffix(".weight")) if is_matrix else PLAIN
            slots.append(
                WeightSlot(name, shape, target=self.parameters[name], region=region, source=source)
            )
        self._slots = slots_by_name(slots)

    def weight_slots(self) -> dict[str, WeightSlot]:
        return self._slots


def load_weights(
    slots: Mapping[str, WeightSlot],
    spec: ModelSpec,
    folder: Path,
    *,
    progress: ShowProgress | None = None,
) -> CheckpointReport:
    return fill(slots, plan_load(slots, spec, folder), progress=progress)


def random_tensors(
    spec: ModelSpec, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in shapes(spec).items()
    }


def scale_shape(rows: int, columns: int, *, block: tuple[int, int] = (128, 128)) -> tuple[int, int]:
    return -(-rows // block[0]), -(-columns // block[1])


def quantize_block(
    weight: Tensor,  # [N, K] any float dtype
    *,
    block: tuple[int, int] = (128, 128),
    # [N, K] float8_e4m3fn, [ceil(N / block rows), ceil(K / block columns)] fp32
) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    grid = scale_shape(rows, columns, block=block)
    padding = (0, grid[1] * block[1] - columns, 0, grid[0] * block[0] - rows)
    padded = torch.nn.functional.pad(weight.float(), padding)
    largest = padded.view(grid[0], block[0], grid[1], block[1]).abs().amax(dim=(1, 3))
    # A scale that underflows to 0 would turn zeros into NaN.
    scale = (largest / E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny).where(largest != 0, 1.0)
    spread = scale.repeat_interleave(block[0], dim=0).repeat_interleave(block[1], dim=1)
    return (weight.float() / spread[:rows, :columns]).to(torch.float8_e4m3fn), scale


def from_fp8(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: dequantize_block(tensor, stored[name + "_scale_inv"])
        if tensor.dtype == torch.float8_e4m3fn
        else tensor
        for name, tensor in stored.items()
        if not name.endswith("_scale_inv")
    }


def to_fp8(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight") or ".experts." in name:
            stored[name], stored[name + "_scale_inv"] = quantize_block(tensor)
        else:
            stored[name] = tensor
    return stored


def save_single(folder: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


def save_sharded(
    folder: Path, tensors: dict[str, Tensor], *, names: list[str], with_index: bool = True
) -> Path:
    parts: dict[str, dict[str, Tensor]] = {file: {} for file in names}
    weight_map = {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        file = names[number % len(names)]
        parts[file][name] = tensor
        weight_map[name] = file
    for file, part in parts.items():
        save_file(part, folder / file)
    if with_index:
        write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
