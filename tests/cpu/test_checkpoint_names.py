import json
import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import loading_support
import pytest
import torch
from loading_support import assert_equal, build_rank, part_of
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
from model_support import H200, build
from safetensors.torch import load_file, save_file
from stored_formats import FORMATS, write
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.checkpoint.plan import plan_load
from negamax.checkpoint.synthetic import fill_synthetic
from negamax.config.model_spec import ModelSpec
from negamax.formats.floats import E4M3_GROUPS, PLAIN
from negamax.formats.platform import CPU
from negamax.formats.readable import reads_e4m3_blocks
from negamax.kernels.quantize.cpu import dequantize_block
from negamax.kernels.quantize.stored import dequantize, encode
from negamax.kernels.registry import KernelTable, resolve
from negamax.layers.moe import mixtures
from negamax.layers.weights import MatrixWeight, slots_by_name
from negamax.models.build import build_empty_slots, build_model
from negamax.models.decoder import Decoder
from negamax.models.registry import bundled_spec, read_spec
from negamax.parallel.context import ParallelContext
from negamax.parallel.layout import ParallelLayout
from negamax.quantization import online
from negamax.quantization.detect import detect
from negamax.quantization.scheme import WeightFormat
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
    kernels = resolve(platform=H200, dtype=torch.bfloat16)
    held = build_empty_slots(spec, ParallelLayout(), kernels=kernels)
    moves = [plan_load(held, spec, folder).needed for folder in (one, two)]
    assert len(moves[0]) == len(moves[1])
    assert sum(move.num_bytes for move in moves[0]) == sum(move.num_bytes for move in moves[1])
    first, second = (loading_support.load(folder, spec=spec)[1] for folder in (one, two))
    assert_equal(first, second)
    if name.startswith("packed"):
        wrong = min(key for key in changed if re.search(r"w13.weight_shape$", key))
        changed[wrong] = changed[wrong] // 2  # The row belongs to one of the joined matrices.
        save_single(two, {name: tensor.contiguous() for name, tensor in changed.items()})
        message = rf"{wrong} contains \[96, .* of 192 x 64 must be \[192, 64"
        with pytest.raises(CheckpointError, match=message):
            load_weights(build(spec, loaded=False).weight_slots(), spec, two)


FP8 = torch.float8_e4m3fn
# Every shard of TP4 has at least one block.
STORED_SPEC = tiny_spec(
    hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=8,
    num_key_value_heads=4, head_dim=128, num_local_experts=4, quantization_config=FP8_CONFIG,
)  # fmt: skip
QUANTIZED = tuple(
    f"{name}.weight" for name in ["q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3"]
)
ONE = ParallelLayout()
ATTENTION = "model.layers.0.self_attn"


def _keeping_kernels() -> KernelTable:
    """Return CPU kernels some of which claim to read FP8 blocks; they are used only for loading."""
    table = resolve(platform=CPU, dtype=torch.float32)
    changed = {
        op: (table[op], replace(table[op], reads=reads_e4m3_blocks))
        for op in ("gemm.linear", "moe.experts")
    }
    return replace(table, candidates={**table.candidates, **changed})


KEEPING = _keeping_kernels()


def on_h200(spec: ModelSpec, layout: ParallelLayout = ONE) -> Decoder:
    kernels, context = resolve(platform=H200, dtype=torch.bfloat16), ParallelContext(layout)
    return build_model(spec, context=context, device=torch.device("meta"), kernels=kernels)


def ranks(tp: int, ep: int = 1) -> list[ParallelLayout]:
    return [ParallelLayout(rank=rank, tp=tp, ep=ep) for rank in range(tp)]


def load(folder: Path, stored: dict[str, Tensor], layout: Any = ONE, **more: Any) -> Any:
    options = {"spec": STORED_SPEC, "kernels": KEEPING, **more}
    return loading_support.load(save_single(folder, stored), layout, **options)


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 1), (4, 2), (4, 4)])
def test_kept_weights_dequantize_to_the_plain_ones(tmp_path: Path, tp: int, ep: int) -> None:
    stored = to_fp8(random_tensors(STORED_SPEC))
    for layout in ranks(tp, ep):
        _, kept, report = load(tmp_path, stored, layout)
        _, plain, plain_report = load(tmp_path, stored, layout, kernels=None)
        count = 4 + 3 * STORED_SPEC.num_experts // ep
        assert (report.num_kept, report.num_dequantized) == (count, 0)
        assert (plain_report.num_kept, plain_report.num_dequantized) == (0, count)
        assert f"kept {count} weights as stored (fp8_e4m3_block_128x128)" in report.summary()
        assert sum(values.dtype == FP8 for values in kept.values()) == count
        for name, expected in plain.items():
            values, scale = kept[name], kept.get(f"{name}_scale_inv")
            if scale is not None:
                assert values.dtype == FP8 and scale.dtype == torch.float32
                values = dequantize_block(values, scale)
            assert torch.equal(values, expected), (name, layout)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_rank_reads_the_bytes_of_its_slices_only(tmp_path: Path, ep: int) -> None:
    stored = to_fp8(random_tensors(STORED_SPEC))

    def count(*ends: str) -> int:
        found = (name for name in stored if name.removesuffix("_scale_inv").endswith(ends))
        return sum(stored[name].nbytes for name in found)

    embeddings = ("embed_tokens.weight", "lm_head.weight")
    split = count(*QUANTIZED, "q_norm.weight", "k_norm.weight", *embeddings)
    replicated = count("gate.weight", "bias", "layernorm.weight", "model.norm.weight")
    for layout in ranks(4, ep):
        assert load(tmp_path, stored, layout)[2].num_bytes == split // 4 + replicated


@pytest.mark.parametrize(
    ("tp", "ep"), [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (16, 1), (16, 2), (16, 16)]
)
def test_ranks_tile_the_blocks_of_minimax_m2(tp: int, ep: int) -> None:
    spec = replace(bundled_spec("minimax-m2"), num_layers=1, num_experts=16)
    slots = [build_empty_slots(spec, layout, kernels=KEEPING) for layout in ranks(tp, ep)]
    quantized = [name for name in slots[0] if name.endswith(QUANTIZED)]
    assert len(quantized) == 4 + 3 * 16
    for name in quantized:
        copies = max(1, tp // 8) if name.endswith(("k_proj.weight", "v_proj.weight")) else 1
        for key, unit in ((name, 1), (name + "_scale_inv", 128)):
            shape = slots[0][key].shape
            assert shape == tuple(size // unit for size in slots[0][name].shape)
            cells = Counter(
                cell
                for each in slots
                if each[key].needed
                for cell in product(*(part[:: 128 // unit] for part in each[key].region))
            )
            every = product(*(range(0, size, 128 // unit) for size in shape))
            assert cells == dict.fromkeys(every, copies)


@pytest.mark.parametrize(("head_dim", "kept"), [(128, True), (64, True), (16, False)])
def test_heads_smaller_than_blocks_are_dequantized(head_dim: int, kept: bool) -> None:
    """Give each of 4 ranks four query heads and one KV head."""
    spec = replace(STORED_SPEC, num_heads=16, head_dim=head_dim, rotary_dim=16)
    for layout in ranks(4):
        model = on_h200(spec, layout)
        slots, qkv = model.weight_slots(), kept and head_dim == 128
        assert (model.layers[0].attention.activation is not None) is qkv
        for part, is_held in (("o", kept), ("q", qkv)):
            name = f"{ATTENTION}.{part}_proj.weight"
            assert (f"{name}_scale_inv" in slots) is is_held
            assert ("cuts blocks or groups with one scale" in slots[name].reason) is not is_held


def test_excluded_modules_stay_plain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Check that the FP8 parts of a matrix are dequantized if other parts are unquantized."""

    def excluding(*modules: str) -> Any:
        config = {**FP8_CONFIG, "modules_to_not_convert": ["gate", *modules]}
        return replace(STORED_SPEC, quantization=tiny_spec(quantization_config=config).quantization)

    spec = excluding(f"{ATTENTION}.o_proj", "q_proj")
    stored, tensors = to_fp8(random_tensors(spec)), random_tensors(spec)
    for part in ("o_proj", "q_proj"):
        name = f"{ATTENTION}.{part}.weight"
        stored[name] = tensors[name]
        del stored[name + "_scale_inv"]
    with caplog.at_level("INFO", logger="negamax"):
        _, found, report = load(tmp_path, stored, spec=spec)
    layers = on_h200(spec).layers
    assert layers[0].attention.activation is None
    assert mixtures(layers)[0].activation == E4M3_GROUPS
    assert report.num_dequantized == 2
    assert "dequantized 2 weights to the compute dtype (fp8_e4m3_block_128x128)" in report.summary()
    (line,) = [text for text in caplog.messages if "are dequantized" in text]
    assert re.fullmatch(
        r"2 weights \(fp8_e4m3_block_128x128, .* MiB\) are dequantized to the compute dtype, one "
        "at a time: fused with weights in another format",
        line,
    )
    assert torch.equal(found[name], stored[name])
    assert not any(key.startswith(ATTENTION) and "scale_inv" in key for key in found)
    with pytest.raises(CheckpointError, match=r"q_proj.weight has dtype F8_E4M3; supported: BF16"):
        load(tmp_path, to_fp8(tensors), spec=spec)
    attention = on_h200(excluding(f"{ATTENTION}.o_proj")).layers[0].attention
    assert attention.activation == E4M3_GROUPS and not attention.gives_quantized


@pytest.mark.parametrize(
    "spec", [STORED_SPEC, replace(STORED_SPEC, quantization=None)], ids=["fp8", "plain"]
)
def test_synthetic_weights_do_not_depend_on_the_split(spec: ModelSpec) -> None:
    whole, expected = build_rank(spec, kernels=KEEPING)
    fill_synthetic(whole.weight_slots(), spec, 5)
    for layout in ranks(4):
        model, found = build_rank(spec, layout, kernels=KEEPING)
        slots = model.weight_slots()
        fill_synthetic(slots, spec, 5)
        for name, values in found.items():
            if slots[name].written and values is not None:
                part = part_of(slots[name], expected[name])
                assert torch.equal(values.float(), part.float()), name


# --- quantized while they are read ----------------------------------------------------------------

RAGGED = {"hidden_size": 200, "intermediate_size": 136}  # sizes for ragged blocks and groups
NAME = "model.layers.0.block_sparse_moe.experts.0.w2.weight"


def online_spec(name: str, **sizes: int) -> ModelSpec:
    return replace(tiny_spec(**sizes), quantization=online.spec(name))


def test_values_without_kernel_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fp8 = tiny_spec(quantization_config=FP8_CONFIG, **RAGGED)
    tensors = random_tensors(fp8, dtype=torch.bfloat16)
    for folder, stored in (("plain", tensors), ("stored", to_fp8(tensors))):
        (tmp_path / folder).mkdir()
        save_single(tmp_path / folder, stored)
    expected, found = SlotModel(fp8), SlotModel(online_spec("fp8", **RAGGED))
    load_weights(expected.weight_slots(), fp8, tmp_path / "stored")
    with caplog.at_level(logging.INFO, logger="negamax"):
        load_weights(found.weight_slots(), online_spec("fp8", **RAGGED), tmp_path / "plain")
    assert "32 weights are quantized to fp8_e4m3_block_128x128 while they are read" in caplog.text
    for name, parameter in expected.parameters.items():
        assert torch.equal(found.parameters[name], parameter), name
    assert not torch.equal(found.parameters[NAME], tensors[NAME].float())


@pytest.mark.parametrize("name", online.NAMES)
@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [(range(256), range(128, 256)), (range(128, 256), range(384)),
     full(range(256), range(384)), full(range(128, 256), range(128, 256))],
)  # fmt: skip
def test_each_part_equals_the_whole_quantized(
    tmp_path: Path, name: str, is_held: bool, rows: range, columns: range
) -> None:
    scheme = detect(online.spec(name))
    assert scheme is not None
    (stored,) = scheme.formats
    plain = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
    whole = encode(stored, plain)
    save_file({NAME: plain}, tmp_path / "model.safetensors")
    spec = tiny_spec()
    weights = WeightFormat(torch.float32, torch.device("cpu"), scheme)
    size, region = (len(rows), len(columns)), (rows, columns)
    held = MatrixWeight(size, stored if is_held else PLAIN, weights=weights)
    load_weights(slots_by_name(held.slots(NAME, (256, 384), region=region)), spec, tmp_path)
    found = held.take().tensors
    if not is_held:
        part = tuple(slice(each.start, each.stop) for each in region)
        assert torch.equal(found["weight"], dequantize(stored, whole)[part])
        return
    for tensor in stored.tensors:
        if tensor.is_kept:
            part = tuple(slice(each.start, each.stop) for each in tensor.part(region))
            expected = whole[tensor.name][part]
            held = found[tensor.name]
            # The file stores a number once, and the slot has a copy per row.
            expected = expected if tensor.is_number else expected.view(held.shape)
            expected = expected.view(torch.uint8) if held.dtype is torch.uint8 else expected
            assert torch.equal(held.float(), expected.float().expand(held.shape)), tensor.name


def test_missing_and_broken_tensors_are_named_once(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_spec())
    spec = online_spec("int8")
    save_single(tmp_path, {name: tensor for name, tensor in tensors.items() if name != NAME})
    with pytest.raises(CheckpointError, match=f"^1 tensor is missing from the checkpoint: {NAME}"):
        load_weights(SlotModel(spec).weight_slots(), spec, tmp_path)
    save_single(tmp_path, to_fp8(random_tensors(tiny_spec())))
    with pytest.raises(CheckpointError, match="has dtype F8_E4M3; supported: BF16"):
        load_weights(SlotModel(spec).weight_slots(), spec, tmp_path)


@pytest.mark.parametrize("name", online.NAMES)
def test_nan_is_refused_before_it_is_quantized(tmp_path: Path, name: str) -> None:
    spec = online_spec(name, **RAGGED)
    tensors = random_tensors(spec)
    tensors[NAME][3, 5] = torch.nan
    save_single(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=rf"{NAME} in 1 of 200 x 136 .*first at \[3, 5\]"):
        load_weights(SlotModel(spec).weight_slots(), spec, tmp_path)
