import json
from pathlib import Path
from typing import Any

import torch
from m2_checkpoints import TINY, random_tensors, save_sharded, tiny_spec
from safetensors.torch import load_file
from torch import Tensor

from negamax.checkpoint.loader import fill
from negamax.checkpoint.plan import plan_load
from negamax.config.json_file import read_json_object
from negamax.convert.convert import Conversion
from negamax.convert.targets import find_target
from negamax.formats.platform import CPU
from negamax.kernels.registry import resolve
from negamax.models.build import build_model
from negamax.models.registry import read_spec
from negamax.parallel.collectives import SingleRank
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout

SIZES = {
    **TINY, "hidden_size": 256, "intermediate_size": 128, "head_dim": 64, "num_local_experts": 2,
    "vocab_size": 64,
}  # fmt: skip
FILES = ["model-00000-of-00009.safetensors", "model-00001-of-00009.safetensors"]
KV_SCALE = "model.layers.1.self_attn.k_proj.k_scale"


def write_source(folder: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {**SIZES, **changes}
    spec = tiny_spec(**sizes)
    tensors = random_tensors(spec, dtype=dtype)
    for name in tensors:
        if name.endswith(("gate.weight", "correction_bias")):
            tensors[name] = tensors[name].float()
    tensors[KV_SCALE] = torch.tensor(0.25)
    tensors["model.layers.1.self_attn.q_scale"] = torch.tensor(0.5)
    save_sharded(folder, tensors, names=FILES)
    names = {"architectures": [spec.architecture], "model_type": "minimax_m2", "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps({**names, **sizes}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("x")
    (folder / "hf_quant_config.json.bak").write_text("")
    return folder


def conversion(source: Path, destination: Path, to: str, **options: Any) -> Conversion:
    options = {"allow_lossy": True, **options}
    return Conversion(str(source), source, destination, find_target(to), **options)


def loaded(
    folder: Path,
    layout: ParallelLayout,
    *,
    split: bool = False,
    sharded_index: bool = False,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    one = SingleRank()
    spec = read_spec(read_json_object(folder / "config.json"), folder)
    if sharded_index:
        spec = spec.shard_index()
    model = build_model(
        spec,
        context=ParallelContext(layout, attention_group=one, expert_group=one, world=one),
        dtype=dtype,
        device=torch.device("cpu"),
        kernels=resolve(platform=CPU, dtype=dtype),
    )
    slots = model.weight_slots()
    targets = {name: slot.target for name, slot in slots.items() if slot.target is not None}
    fill(slots, plan_load(slots, spec, folder, layout if split else None))
    return targets


def stored(folder: Path) -> dict[str, bytes]:
    return {
        name: tensor.flatten().view(torch.uint8).numpy().tobytes()
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
