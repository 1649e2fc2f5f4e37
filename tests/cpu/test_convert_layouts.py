from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from loading_support import (
    assert_equal,
    assert_holds,
    conversion,
    load,
    spec_of,
    stored_bytes,
    write_source,
)
from m2_checkpoints import FP8_CONFIG, random_tensors, save_single, tiny_spec, to_fp8, write_index
from model_support import random_weights
from safetensors.torch import load_file, save_file
from test_stored_formats import CONFIG, LAYOUTS
from torch import Tensor

from negamax import LLM, SamplingParams
from negamax.base.errors import CheckpointError, ConfigError
from negamax.checkpoint.quarot import read_rotation
from negamax.checkpoint.reader import read_entries
from negamax.convert.convert import Conversion, convert
from negamax.convert.source import Source
from negamax.convert.targets import find_target
from negamax.convert.verify import compare
from negamax.models.memory import draft_bytes
from negamax.models.registry import read_spec
from negamax.parallel.layout import ParallelLayout
from tests import tiny, tiny_draft, tiny_m3
from tests.layouts import full


@pytest.fixture(scope="module")
def converted(bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("converted")
    folders = {name: root / name for name in ("fp8-channel", "fp8-block", "int4", "int8")}
    for name, folder in folders.items():
        convert(conversion(bf16, folder, name))
    return folders


@pytest.mark.parametrize(
    ("to", "tp", "ep"),
    [(None, 2, 2), ("fp8-block", 4, 2), ("int4", 4, 1)]
    + [full(to, tp, 1) for to in (None, "fp8-block") for tp in (2, 4)]
    + [full(None, 4, 2), full("fp8-block", 2, 2)]
    + [full("int4", *sizes) for sizes in ((2, 1), (2, 2), (4, 2))],
)
def test_rank_loads_the_same_from_split_files(
    to: str | None, tp: int, ep: int, bf16: Path, converted: dict[str, Path], tmp_path: Path
) -> None:
    """Split experts of width 128, so that every split divides the blocks and groups."""
    whole = converted[to or "fp8-channel"]
    out = tmp_path / "out"
    convert(conversion(whole if to is None else bf16, out, to, tp=tp, ep=ep, allow_lossy=False))
    assert not any(one.error for one in compare(Source(whole), out))
    for rank in range(tp):
        layout = ParallelLayout(rank=rank, tp=tp, ep=ep)
        assert_equal(load(out, layout, is_split=True)[1], load(whole, layout)[1])
    files = [path.stat().st_size for path in out.glob("model-rank-0-*.safetensors")]
    all_files = [path.stat().st_size for path in whole.glob("*.safetensors")]
    most = 0.95 if to else 0.65  # A scale per row is not divided.
    assert len(files) == 3 and sum(files) < most * sum(all_files)
    with pytest.raises(CheckpointError, match=rf"split for --tensor-parallel-size {tp}, --expert"):
        read_entries(out)
    convert(conversion(out, tmp_path / "joined"))
    assert stored_bytes(tmp_path / "joined") == stored_bytes(whole)
    assert not list((tmp_path / "joined").glob("model-rank-*"))


def test_split_m3_loads_with_and_without_sharded_index_keys(tmp_path: Path) -> None:
    """Check that a rank with a shard of the index keys has the index queries of all heads."""
    sizes = {"intermediate_size": 24, "shared_intermediate_size": 24, "dense_intermediate_size": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "index_n_heads": 2}
    config = tiny_m3.text_config(5, vocab_size=96, **sizes, **heads)
    spec, whole, out = read_spec(config), tmp_path / "whole", tmp_path / "out"
    whole.mkdir()
    (whole / "config.json").write_text(json.dumps(config))
    save_file(random_weights(spec, 0), whole / "model.safetensors")
    convert(conversion(whole, out, tp=2))
    with pytest.raises(ConfigError, match=r"fp8-neuron supports only MiniMax-M2; .* is Mini"):
        convert(conversion(whole, tmp_path / "neuron", "fp8-neuron"))
    for rank, sharded_index in ((0, False), (1, False), (1, True)):
        layout, spec = ParallelLayout(rank=rank, tp=2), spec_of(whole)
        spec = spec.shard_index() if sharded_index else spec
        found = load(out, layout, spec=spec, is_split=True)[1]
        assert_equal(found, load(whole, layout, spec=spec)[1])


def test_split_is_split_again(bf16: Path, converted: dict[str, Path], tmp_path: Path) -> None:
    for name, target, tp in (("two", None, 2), ("four", None, 4), ("int8", "int8", 1)):
        source = tmp_path / "two" if name != "two" else bf16
        convert(conversion(source, tmp_path / name, target, tp=tp, allow_lossy=False))
    convert(conversion(bf16, tmp_path / "at once", tp=4))
    for rank in range(4):
        layout = ParallelLayout(rank=rank, tp=4)
        folders = tmp_path / "four", tmp_path / "at once"
        assert_equal(*(load(folder, layout, is_split=True)[1] for folder in folders))
    assert stored_bytes(tmp_path / "int8") == stored_bytes(converted["int8"])
    with pytest.raises(ConfigError, match="already split for --tensor-parallel-size"):
        convert(conversion(tmp_path / "two", tmp_path / "out", tp=2))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("index", r"split for 2 ranks, but model-rank-1"),
        ("file", r"lists 3 files, of which 1 cannot be found: model-rank-1-part-00000"),
        ("sizes", r"lacks a valid tensor or expert parallel size: its metadata is \{'rank': 0\}"),
        ("part", r"parts of model.layers.0.* in model-rank-0.*, model-rank-1.* do not cover"),
    ],
)
def test_incomplete_split_is_refused(broken: str, message: str, bf16: Path, tmp_path: Path) -> None:
    out, others = tmp_path / "out", tmp_path / "others"
    convert(conversion(bf16, out, tp=2))
    indices = [f"model-rank-{rank}.safetensors.index.json" for rank in (0, 1)]
    if broken == "index":
        (out / indices[1]).unlink()
    elif broken == "file":
        (out / "model-rank-1-part-00000.safetensors").unlink()
    elif broken == "sizes":
        index = json.loads((out / indices[0]).read_text())
        (out / indices[0]).write_text(json.dumps({**index, "metadata": {"rank": 0}}))
    else:  # The file belongs to a rank of another split.
        convert(conversion(bf16, others, tp=4))
        part = "model-rank-{}-part-00000.safetensors"
        shutil.copy(others / part.format(3), out / part.format(1))
    with pytest.raises(CheckpointError, match=message):
        convert(conversion(out, tmp_path / "joined"))


def test_parts_hold_shards_at_block_borders(bf16: Path, tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", intermediate_size=640)
    convert(conversion(source, tmp_path / "out", "fp8-block", tp=4))
    for rank in range(4):
        layout = ParallelLayout(rank=rank, tp=4)
        share = layout.experts.width(640, unit=128).part
        entries = read_entries(tmp_path / "out", layout)
        name = "model.layers.0.block_sparse_moe.experts.1"
        for entry, dim in ((entries[f"{name}.w1.weight"], 0), (entries[f"{name}.w2.weight"], 1)):
            assert entry.part is not None
            held = entry.part[dim]
            assert entry.shape[dim] == 640 and held.start % 128 == 0
            assert held.start <= share.start and share.stop <= held.stop
            beyond = [range(size) for size in entry.shape]
            with pytest.raises(CheckpointError, match="convert the checkpoint again"):
                entry.translate(tuple(beyond))


# --- Neuron's layout ------------------------------------------------------------------------------

NEURON_SIZES = {**CONFIG, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
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


NEURON_CONFIG = {**NEURON_SIZES, "quantization_config": FP8_CONFIG}
NEURON_SPEC = tiny_spec(**NEURON_CONFIG)


def write_preprocessed(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    folder.mkdir(exist_ok=True)
    made, plain = preprocessed(to_fp8(random_tensors(NEURON_SPEC)))
    (folder / "config.json").write_text(json.dumps(NEURON_CONFIG))
    save_file(made, folder / "model_layer0.safetensors")
    write_index(folder, dict.fromkeys(made, "model_layer0.safetensors"))
    return made, plain


def test_neuron_conversion_matches_the_preprocessing(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    stored = to_fp8(random_tensors(NEURON_SPEC, dtype=torch.bfloat16))
    (source / "config.json").write_text(json.dumps(NEURON_CONFIG))
    convert(conversion(save_single(source, stored), out, "fp8-neuron"))
    extras, layer = (load_file(out / f"model_{part}.safetensors") for part in ("extras", "layer0"))
    assert set(extras) == {"embed_tokens.weight", "norm.weight", "lm_head.weight"}
    assert layer["layers.0.self_attn.o_proj.weight"].dtype == torch.bfloat16
    made, _ = preprocessed(stored)
    assert_equal(
        {name: tensor.float() for name, tensor in {**extras, **layer}.items()},
        {name: tensor.float() for name, tensor in made.items()},
    )


def test_neuron_checkpoint_is_split_joined_and_converted(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_preprocessed(source)
    for name, first, to, tp in (
        ("split", "source", None, 2), ("joined", "split", None, 1),
        ("neuron", "joined", "fp8-neuron", 1), ("split again", "neuron", None, 4),
    ):  # fmt: skip
        convert(conversion(tmp_path / first, tmp_path / name, to, tp=tp))
        assert not any(one.error for one in compare(Source(source), tmp_path / name)), name
    with pytest.raises(ConfigError, match="convert the result a second time without --to"):
        convert(conversion(source, tmp_path / "no", "fp8-neuron", tp=2))


def test_neuron_checkpoint_loads_as_its_stored_values(tmp_path: Path) -> None:
    spec = NEURON_SPEC
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
    """Check mode per_row, where the stacked scales have two dimensions: gate rows, then up rows."""
    source, split = tmp_path / "source", tmp_path / "split"
    made, plain = write_preprocessed(source)
    rows = (
        torch.rand(2, 4, 2 * NEURON_SIZES["intermediate_size"], generator=torch.Generator()) + 0.5
    )
    for number, stack in enumerate(("gate_up_proj", "down_proj")):
        name = f"layers.0.block_sparse_moe.expert_mlps.mlp_op.{stack}"
        made[f"{name}.scale"] = rows[number, :, : made[f"{name}.weight"].shape[-1]].clone()
        for expert, (weight, scale) in enumerate(
            zip(made[f"{name}.weight"].float(), made[f"{name}.scale"], strict=True)
        ):
            parts = (weight.T * scale[:, None]).split(NEURON_SIZES["intermediate_size"])
            for part, matrix in zip(("w1", "w3") if number == 0 else ("w2",), parts, strict=True):
                key = f"model.layers.0.block_sparse_moe.experts.{expert}.{part}.weight"
                plain[key] = matrix
    save_file(made, source / "model_layer0.safetensors")
    convert(conversion(source, split, tp=2))
    for folder, layouts in ((source, LAYOUTS), (split, [ParallelLayout(rank=1, tp=2)])):
        for layout in layouts:
            model, found, _ = load(folder, layout, is_split=folder is split)
            assert_holds(model, found, plain)


if TYPE_CHECKING:
    from transformers import MiniMaxM2ForCausalLM

HIDDEN = 32
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8,
    "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64,
}  # fmt: skip
LAYERS = (2, 3, 4)  # layers whose inputs the draft reads
PROMPTS = [[5, 17, 80, 33, 9, 61], [70, 4, 4, 90]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
GENERATOR = torch.Generator().manual_seed(0)
ROTATION = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=GENERATOR))[0].contiguous()
FILE = "optional/quarot.safetensors"


def describe(folder: Path, file: str) -> None:
    said = {
        "model_quant_type": "FLOAT",
        "version": "1.0.0",
        "model.layers.0.self_attn.q_proj.weight": "FLOAT",
        "optional": {"quarot": {"rotation_map": {"global_rotation": file}}},
    }
    (folder / "quant_model_description.json").write_text(json.dumps(said))


def rotated(name: str, tensor: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    layer = name.split(".self_attn.")[0].split(".block_sparse_moe.")[0].split(".mlp.")[0]
    norms = {
        ".q_proj.": "input_layernorm", ".k_proj.": "input_layernorm",
        ".v_proj.": "input_layernorm", ".w1.": "post_attention_layernorm",
        ".w3.": "post_attention_layernorm", ".gate.": "post_attention_layernorm",
    }  # fmt: skip
    if name == "lm_head.weight":
        return tensor * tensors["model.norm.weight"] @ ROTATION
    if name == "model.embed_tokens.weight":
        return tensor @ ROTATION
    if name.endswith("layernorm.weight") or name == "model.norm.weight":
        return torch.ones_like(tensor)
    if ".o_proj." in name or ".w2." in name:
        return ROTATION.T @ tensor
    norm = next((norm for part, norm in norms.items() if part in name), None)
    return tensor if norm is None else tensor * tensors[f"{layer}.{norm}.weight"] @ ROTATION


@pytest.fixture(scope="module")
def target() -> MiniMaxM2ForCausalLM:
    return tiny.make_model(5, **SIZES)


@pytest.fixture(scope="module")
def folder(target: MiniMaxM2ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    plain = tiny.save(target, tmp_path_factory.mktemp("plain"))
    source = Source(plain)
    with source.reader() as reader:
        tensors = {one.name: one.dequantize(one.read(reader)) for one in source.weights}
    turned = {name: rotated(name, one, tensors).contiguous() for name, one in tensors.items()}
    for file in plain.glob("*.safetensors*"):
        file.unlink()
    save_file(turned, plain / "model.safetensors")
    describe(plain, FILE)
    (plain / "optional").mkdir()
    save_file({"global_rotation": ROTATION}, plain / FILE)
    return plain


def engine(folder: Path, draft: str) -> LLM:
    speculation = {
        "method": "eagle3", "model": draft, "num_speculative_tokens": 3, "adaptive": False,
    }  # fmt: skip
    return LLM(
        str(folder), speculative_config=speculation, device="cpu", dtype="float32", num_threads=1,
        block_size=4,
    )  # fmt: skip


def draft_of(variant: str, folder: Path) -> tuple[dict[str, Any], tiny_draft.Weights, str]:
    ids = [layer - 1 for layer in LAYERS]
    return tiny_draft.make(variant, folder / "draft", vocab_size=96, hidden_size=HIDDEN, ids=ids)


@pytest.mark.parametrize(
    "variant",
    [full("plain"), full("full vocabulary, norms"), full("biases, two layers"), "another width"],
)
def test_draft_tokens_are_those_before_the_rotation(
    variant: str,
    folder: Path,
    target: MiniMaxM2ForCausalLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, tensors, draft = draft_of(variant, tmp_path)
    seen = tiny_draft.watch(monkeypatch.setattr)
    with engine(folder, draft) as llm:
        found = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, [PARAMS] * 2)]
        spec = llm._loop.executor._worker.runner.config.draft.spec  # type: ignore[attr-defined]
    texts = [prompt + output for prompt, output in zip(PROMPTS, found, strict=True)]
    wrong, compared = tiny_draft.count_differing(seen, target, texts, LAYERS, config, tensors)
    assert wrong == 0 and compared > 30
    (folder / FILE).rename(tmp_path / "away")  # Without this file the draft tokens would differ.
    try:
        with pytest.raises(CheckpointError, match=r"quarot.safetensors: global_rotation cannot"):
            engine(folder, draft)
    finally:
        (tmp_path / "away").rename(folder / FILE)
    held = sum(one.nbytes for name, one in tensors.items() if name != "t2d")
    copied = 0 if spec.own_embedding else 96 * HIDDEN * 4
    assert draft_bytes(spec, dtype="float32") == held + copied + ROTATION.nbytes


def test_a_draft_without_a_head_is_refused(folder: Path, tmp_path: Path) -> None:
    _, _, draft = draft_of("borrows embedding and head", tmp_path)
    with pytest.raises(ConfigError, match=r"lack a head, and the model's head cannot be used"):
        engine(folder, draft)


@pytest.mark.parametrize(("to", "tp"), [(None, 2), ("int8", 1)])
def test_conversion_stays_rotated(to: str | None, tp: int, folder: Path, tmp_path: Path) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    convert(Conversion("x", folder, out, to and find_target(to), tp=tp))
    convert(Conversion("x", out, again, find_target("bf16"), allow_lossy=True))
    for converted in (out, again):
        found = read_rotation(converted)
        assert found is not None and torch.equal(found, ROTATION)
    assert not (again / "quant_model_description.json").exists()


def test_the_rotation_is_read_from_the_file_that_the_description_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert read_rotation(tmp_path) is None
    (tmp_path / "optional").mkdir()
    describe(tmp_path, FILE)
    with pytest.raises(CheckpointError, match=r"quarot.safetensors: global_rotation cannot be"):
        read_rotation(tmp_path)
    # The file is a link, as in the hub's cache.
    save_file({"global_rotation": ROTATION.bfloat16()}, tmp_path.parent / "blob")
    (tmp_path / FILE).symlink_to(tmp_path.parent / "blob")
    found = read_rotation(tmp_path)
    assert found is not None and torch.equal(found, ROTATION.bfloat16().float())
    (tmp_path / FILE).unlink()
    for broken in (2 * ROTATION, ROTATION[:5]):
        save_file({"global_rotation": broken.contiguous()}, tmp_path / FILE)
        with pytest.raises(CheckpointError, match=r"global_rotation \[\d+, 32\] is not a square"):
            read_rotation(tmp_path)
    outside, allowed = "outside the folder", "must be one .safetensors file"
    refused = dict.fromkeys(
        ("../quarot.safetensors", "optional/../../x", "/x.safetensors"), outside
    )
    names = ("optional/*.safetensors", "model.py", "optional", "pytorch_model.bin")
    for file, message in (refused | dict.fromkeys(names, allowed)).items():
        describe(tmp_path, file)
        with pytest.raises(ConfigError, match=message):
            read_rotation(tmp_path)
