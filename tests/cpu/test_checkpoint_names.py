import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from m2_checkpoints import (
    CONFIG,
    FP8_CONFIG,
    SlotModel,
    load_weights,
    random_tensors,
    save_single,
    tiny_spec,
    to_fp8,
)
from model_support import build
from safetensors.torch import load_file
from stored_formats import FORMATS, write
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.checkpoint.plan import plan_load
from negamax.config.model_spec import ModelSpec
from negamax.formats.platform import nvidia
from negamax.kernels.registry import resolve
from negamax.models.build import build_empty_slots
from negamax.models.registry import read_spec
from negamax.parallel.layout import ParallelLayout
from negamax.quantization import online
from tests.layouts import full

SPEC = tiny_spec()
# Each part of a fused matrix has a whole number of blocks.
FP8_SPEC = tiny_spec(
    quantization_config=FP8_CONFIG, hidden_size=128, intermediate_size=128, num_key_value_heads=4,
    num_attention_heads=8, head_dim=32,
)  # fmt: skip

ONLINE_SPEC = replace(SPEC, quantization=online.spec("int8"))

Tensors = dict[str, Tensor]
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(w[123])\.(\w+)$")


def checkpoint(spec: ModelSpec) -> Tensors:
    tensors = random_tensors(spec)
    return to_fp8(tensors) if spec.quantization == FP8_SPEC.quantization else tensors


def respelled(pattern: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {re.sub(pattern, new, name): each for name, each in tensors.items()}


# These tensors are joined along their second dimension. A scalar per matrix becomes a list of two.
TRANSPOSED = ("qweight", "qzeros", "scales")


def joined(suffix: str, one: Tensor, two: Tensor) -> Tensor:
    if suffix == "g_idx":
        return one
    if suffix == "weight_shape":
        return torch.stack([one[0] + two[0], one[1]])
    if one.dim() < 2 and one.numel() == 1:
        return torch.stack([one.reshape(()), two.reshape(())])
    return torch.cat([one, two], dim=int(suffix in TRANSPOSED))


def fused_experts(name: str) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        changed = {}
        for key, tensor in tensors.items():
            match = _EXPERT.match(key)
            if match and match[3] == "w1":
                up = tensors[key.replace(".w1.", ".w3.")]
                changed[key.replace(".w1.", f".{name}.")] = joined(match[4], tensor, up)
            elif not match or match[3] == "w2":
                changed[key] = tensor
        return changed

    return change


def stacked_experts(gate_up: str, down: str) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        changed, stacks = {}, dict[str, list[Tensor]]()
        for key, tensor in fused_experts("w13")(tensors).items():
            match = re.match(r"(.*\.experts\.)(\d+)\.(w13|w2)\.(\w+)$", key)
            if match is None:
                changed[key] = tensor
                continue
            name = (gate_up if match[3] == "w13" else down).format(match[4])
            # transformers omits "weight" from the parameter names of its module.
            name = name.replace("_proj_weight", "_proj")
            stacks.setdefault(match[1] + name, []).insert(int(match[2]), tensor)
        return changed | {name: torch.stack(stack) for name, stack in stacks.items()}

    return change


def fused_attention(tensors: Tensors) -> Tensors:
    changed = {}
    for key, tensor in tensors.items():
        if ".q_proj." in key:
            others = [tensors[key.replace("q_proj", part)] for part in ("k_proj", "v_proj")]
            changed[key.replace("q_proj", "qkv_proj")] = torch.cat([tensor, *others])
        elif not re.search(r"\.[kv]_proj\.", key):
            changed[key] = tensor
    return changed


CHANGES = {
    "w13": fused_experts("w13"),
    "gate_up_proj": fused_experts("gate_up_proj"),
    "stacked as transformers saves them": stacked_experts("gate_up_proj_{}", "down_proj_{}"),
    "stacked, dots": stacked_experts("gate_up_proj.{}", "down_proj.{}"),
    "stacked, w13": stacked_experts("w13_{}", "w2_{}"),
    "qkv_proj": fused_attention,
    "experts' projections": lambda tensors: respelled(r"\.w1\.", ".gate_proj.")(
        respelled(r"\.w2\.", ".down_proj.")(respelled(r"\.w3\.", ".up_proj.")(tensors))
    ),
    "mlp, the other scale": lambda tensors: respelled("weight_scale_inv$", "weight_scale")(
        respelled("block_sparse_moe", "mlp")(tensors)
    ),
    "bias of the gate": respelled(r"block_sparse_moe\.e_score", "mlp.gate.e_score"),
    "bias beside the gate": respelled(r"block_sparse_moe\.e_score", "mlp.e_score"),
    "language_model.": respelled("^", "language_model."),
    "model.language_model.": respelled(r"^model\.", "model.language_model."),
    "no prefix": respelled(r"^model\.", ""),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "spec",
    [SPEC, FP8_SPEC, pytest.param(ONLINE_SPEC, marks=pytest.mark.full)],
    ids=["plain", "fp8", "online"],
)
def test_other_names_and_fusions_give_weights(tmp_path: Path, spec: ModelSpec, change: str) -> None:
    tensors, (one, two) = checkpoint(spec), (tmp_path / "one", tmp_path / "two")
    changed = {name: tensor.contiguous() for name, tensor in CHANGES[change](tensors).items()}
    assert changed.keys() != tensors.keys()
    one.mkdir()
    two.mkdir()
    save_single(one, tensors)
    save_single(two, changed)
    for rank in range(2):
        expected, model = (SlotModel(spec, rank=rank, size=2) for _ in range(2))
        report = load_weights(expected.weight_slots(), spec, one)
        other = load_weights(model.weight_slots(), spec, two)
        for name, parameter in model.parameters.items():
            assert torch.equal(parameter, expected.parameters[name]), name
        assert (other.num_tensors, other.num_bytes) == (len(changed), report.num_bytes)


STACK = "model.layers.1.block_sparse_moe.experts.w13_weight_scale_inv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[:3], rf"{STACK} has shape \[3, 2, 1\]; config.json requires \[4, 2, 1\]"),
        (lambda t: torch.cat([t, t]), r"has shape \[8, 2, 1\]"),
        (lambda t: t[:, :1], r"has shape \[4, 1, 1\]"),
        (lambda t: t.transpose(1, 2), r"has shape \[4, 1, 2\]"),
        (lambda t: t.byte(), rf"{STACK} has dtype U8; fp8\S+ is stored in F32, BF16, F16 "),
        (
            lambda t: None,
            r"w13_weight has the format fp8\S+, but \S+experts.0.w1.weight_scale_inv is missing",
        ),
    ],
)
def test_misshaped_stacks_are_refused_by_name(
    tmp_path: Path, change: Callable[[Tensor], Tensor | None], message: str
) -> None:
    tensors = CHANGES["stacked, w13"](checkpoint(FP8_SPEC))
    changed = change(tensors.pop(STACK))
    if changed is not None:
        tensors[STACK] = changed.contiguous()
    save_single(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=message):
        load_weights(SlotModel(FP8_SPEC).weight_slots(), FP8_SPEC, tmp_path)


@pytest.mark.parametrize("name", ["w13.bias", "gate_up_proj_bias", "0.w13.bias"])
def test_unknown_fused_tensors_are_refused(tmp_path: Path, name: str) -> None:
    name = "model.layers.1.block_sparse_moe.experts." + name
    save_single(tmp_path, random_tensors(SPEC) | {name: torch.zeros(4, 48)})
    with pytest.raises(CheckpointError, match=f"1 tensor is not part of this model: {name}"):
        load_weights(SlotModel(SPEC).weight_slots(), SPEC, tmp_path)


def test_matrix_stored_alone_and_fused_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(SPEC)
    save_single(tmp_path, tensors | CHANGES["w13"](tensors))
    with pytest.raises(CheckpointError, match=r"experts\.0\.w1.weight and .*\.w13\.\S+ both hold"):
        load_weights(SlotModel(SPEC).weight_slots(), SPEC, tmp_path)


@pytest.mark.parametrize(
    ("name", "stacked"),
    [("awq", False), ("gptq-v2", True), ("quark-int8", False), ("modelopt-nvfp4", True),
     ("compressed-nvfp4", False), ("packed-int4-asym", True), full("awq", True),
     full("gptq-v2", False), full("quark-int8", True), full("modelopt-nvfp4", False),
     full("compressed-nvfp4", True), ("packed-int4-asym", False)],
)  # fmt: skip
def test_fused_side_tensors_load(tmp_path: Path, name: str, stacked: bool) -> None:
    config = {**CONFIG, "hidden_size": 64, "intermediate_size": 96}
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        write(folder, config, random_tensors(tiny_spec(**config)), FORMATS[name])
    changed = CHANGES["stacked, w13" if stacked else "w13"](load_file(two / "model.safetensors"))
    save_single(two, {name: tensor.contiguous() for name, tensor in changed.items()})
    spec = read_spec(json.loads((one / "config.json").read_text()), one)
    h200 = nvidia((9, 0), name="NVIDIA H200", shared_memory=233472)
    kernels = resolve(platform=h200, dtype=torch.bfloat16)
    held = build_empty_slots(spec, ParallelLayout(), kernels=kernels)
    moves = [plan_load(held, spec, folder).needed for folder in (one, two)]
    assert len(moves[0]) == len(moves[1])
    assert sum(move.num_bytes for move in moves[0]) == sum(move.num_bytes for move in moves[1])
    found = []
    for folder in (one, two):
        slots = build(spec, loaded=False).weight_slots()
        targets = {key: slot.target for key, slot in slots.items()}
        load_weights(slots, spec, folder)
        found.append(targets)
    for key, target in found[0].items():
        if target is not None and not key.endswith("_scale"):
            assert torch.equal(target, found[1][key]), key
    if name.startswith("packed"):
        wrong = min(key for key in changed if re.search(r"w13.weight_shape$", key))
        changed[wrong] = changed[wrong] // 2  # The row belongs to one of the joined matrices.
        save_single(two, {name: tensor.contiguous() for name, tensor in changed.items()})
        message = rf"{wrong} contains \[96, .* of 192 x 64 must be \[192, 64"
        with pytest.raises(CheckpointError, match=message):
            load_weights(build(spec, loaded=False).weight_slots(), spec, two)
