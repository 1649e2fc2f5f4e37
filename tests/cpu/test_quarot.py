from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from negamax import LLM, SamplingParams
from negamax.base.errors import CheckpointError, ConfigError
from negamax.checkpoint.quarot import read_rotation
from negamax.convert.convert import Conversion, convert
from negamax.convert.source import Source
from negamax.convert.targets import find_target
from negamax.models.memory import draft_bytes
from tests import tiny, tiny_draft
from tests.layouts import full

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
    [full("plain"), "full vocabulary, norms", full("biases, two layers"), "another width"],
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
