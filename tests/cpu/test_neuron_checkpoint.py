import json
from pathlib import Path

import pytest
import torch
from loading_support import assert_holds, conversion, load
from m2_checkpoints import FP8_CONFIG, random_tensors, tiny_spec, to_fp8, write_index
from safetensors.torch import save_file
from test_stored_formats import CONFIG, LAYOUTS
from torch import Tensor

from negamax.base.errors import CheckpointError, ConfigError
from negamax.convert.convert import convert
from negamax.convert.source import Source
from negamax.convert.verify import compare
from negamax.parallel.layout import ParallelLayout

SIZES = {**CONFIG, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
RATIO = 448 / 240


def spread(values: Tensor, scale: Tensor) -> Tensor:
    rows = scale.repeat_interleave(128, 0)[: values.shape[0]]
    return values.float() * rows.repeat_interleave(128, 1)[:, : values.shape[1]]


def preprocessed(stored: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    made: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in stored.items():
        scale, own = stored.get(f"{name}_scale_inv"), name.removeprefix("model.")
        if name.endswith("_scale_inv"):
            continue
        if ".experts." in name and scale is not None:
            layer, _, part = own.replace(".experts.", "|").partition("|")
            smaller = (tensor.bfloat16() / RATIO).to(torch.float8_e4m3fn)
            larger = scale * RATIO
            plain[name] = spread(smaller, larger)
            key = f"{layer}.expert_mlps.mlp_op.{part.split('.')[1]}"
            stacks.setdefault(f"{key}.weight", []).append(smaller.view(torch.uint8).T)
            stacks.setdefault(f"{key}.scale", []).append(larger.T)
        elif name.endswith("o_proj.weight") and scale is not None:
            made[own] = spread(tensor, scale).bfloat16()
            plain[name] = made[own].float()
        elif scale is not None:
            matrix = spread(tensor, scale)
            rows = (matrix.abs().amax(1, keepdim=True) / 240).clamp_min(1e-10)
            made[own] = (matrix / rows).to(torch.float8_e4m3fn)
            made[own.replace(".weight", ".scale")] = rows
            plain[name] = made[own].float() * rows
        else:
            other = own.replace("moe.gate.", "moe.router.linear_router.")
            made[other.replace("moe.e_score", "moe.router.e_score")] = plain[name] = tensor
    for key in [key for key in stacks if ".w1." in key]:
        gate, up, down = (
            torch.stack(stacks[key.replace(".w1.", f".{part}.")]) for part in ("w1", "w3", "w2")
        )
        made[key.replace(".w1.", ".gate_up_proj.")] = torch.cat([gate, up], 2)
        made[key.replace(".w1.", ".down_proj.")] = down.contiguous()
    fp8 = {name for name in made if ".mlp_op." in name and name.endswith(".weight")}
    return {n: t.view(torch.float8_e4m3fn) if n in fp8 else t for n, t in made.items()}, plain


def write_preprocessed(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    folder.mkdir(exist_ok=True)
    spec = tiny_spec(**SIZES, quantization_config=FP8_CONFIG)
    made, plain = preprocessed(to_fp8(random_tensors(spec)))
    (folder / "config.json").write_text(json.dumps({**SIZES, "quantization_config": FP8_CONFIG}))
    save_file(made, folder / "model_layer0.safetensors")
    write_index(folder, dict.fromkeys(made, "model_layer0.safetensors"))
    return made, plain


def test_neuron_checkpoint_is_split_joined_and_converted(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_preprocessed(source)
    for name, first, to, tp in (
        ("split", "source", None, 2), ("joined", "split", None, 1),
        ("neuron", "joined", "fp8-neuron", 1), ("split again", "neuron", None, 4),
    ):  # fmt: skip
        convert(conversion(tmp_path / first, tmp_path / name, to, tp=tp))
        assert not any(one.error for one in compare(Source(source), tmp_path / name)), name
    with pytest.raises(ConfigError, match="convert the result once more, without --to"):
        convert(conversion(source, tmp_path / "no", "fp8-neuron", tp=2))


def test_neuron_checkpoint_loads_as_its_stored_values(tmp_path: Path) -> None:
    spec = tiny_spec(**SIZES, quantization_config=FP8_CONFIG)
    made, plain = write_preprocessed(tmp_path)
    for layout in LAYOUTS:
        model, found, report = load(tmp_path, layout)
        assert report.num_dequantized == 3 + 3 * spec.num_experts // layout.ep
        assert_holds(model, found, plain)
    scale = "layers.0.block_sparse_moe.expert_mlps.mlp_op.gate_up_proj.scale"
    made[scale] = torch.ones(spec.num_experts, 2 * spec.expert_width)  # mode per_row
    save_file(made, tmp_path / "model_layer0.safetensors")
    with pytest.raises(CheckpointError, match=rf"{scale} has shape \[4, 512\]"):
        load(tmp_path, ParallelLayout())


def test_experts_may_have_a_scale_per_row(tmp_path: Path) -> None:
    """In mode per_row the stack of scales has two dimensions, gate before up."""
    source, split = tmp_path / "source", tmp_path / "split"
    made, plain = write_preprocessed(source)
    rows = torch.rand(2, 4, 2 * SIZES["intermediate_size"], generator=torch.Generator()) + 0.5
    for number, stack in enumerate(("gate_up_proj", "down_proj")):
        name = f"layers.0.block_sparse_moe.expert_mlps.mlp_op.{stack}"
        made[f"{name}.scale"] = rows[number, :, : made[f"{name}.weight"].shape[-1]].clone()
        for expert, (weight, scale) in enumerate(
            zip(made[f"{name}.weight"].float(), made[f"{name}.scale"], strict=True)
        ):
            parts = (weight.T * scale[:, None]).split(SIZES["intermediate_size"])
            for part, matrix in zip(("w1", "w3") if number == 0 else ("w2",), parts, strict=True):
                key = f"model.layers.0.block_sparse_moe.experts.{expert}.{part}.weight"
                plain[key] = matrix
    save_file(made, source / "model_layer0.safetensors")
    convert(conversion(source, split, tp=2))
    for folder, layouts in ((source, LAYOUTS), (split, [ParallelLayout(rank=1, tp=2)])):
        for layout in layouts:
            model, found, _ = load(folder, layout, is_split=folder is split)
            assert_holds(model, found, plain)
