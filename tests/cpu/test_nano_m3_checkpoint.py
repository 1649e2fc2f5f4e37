import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from negamax import LLM
from negamax.config.embedded import EMBEDDED
from negamax.engine.core.source import locate
from negamax.evals import accuracy
from negamax.evals.accuracy import run_suite
from negamax.models.registry import read_spec
from negamax.options.engine import EngineOptions

FOLDER = EMBEDDED["nano-m3"]
SIZE_LIMIT = 12_000_000


def test_files_are_those_of_a_small_minimax_m3() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= SIZE_LIMIT
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["MiniMaxM3SparseForConditionalGeneration"]
    assert config["model_type"] == "minimax_m3_vl"
    spec = read_spec(config)
    assert spec.num_layers == 5 and spec.max_position_embeddings == 8192 and spec.notes == ()
    caches = [[cache.name for cache in layer] for layer in spec.kv_caches()]
    assert caches == [["k", "v"]] * 2 + [["k", "v", "index"]] * 3
    tensors = load_file(FOLDER / "model-00001-of-00001.safetensors")
    index = json.loads((FOLDER / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert set(index["weight_map"]) == set(tensors)
    assert all(name.startswith("language_model.") for name in tensors)
    scaled = {name for name in tensors if f"{name}_scale_inv" in tensors}
    assert {tensors[name].dtype for name in scaled} == {torch.float8_e4m3fn}
    assert sum(tensors[name].numel() for name in scaled) > 7_000_000
    for name, model in (("minimax-m2", "nano"), ("minimax-m3-mxfp8", "nano-m3")):
        found = locate(EngineOptions(model=name, load_format="synthetic"))
        assert found.tokenizer_folder == EMBEDDED[model]


@pytest.fixture(scope="module")
def nano_m3() -> Iterator[LLM]:
    with LLM("nano-m3", num_threads=1) as llm:
        yield llm


def solved(llm: LLM, suite: str, count: int) -> int:
    return run_suite(llm, suite, count=count, seed=3).correct


def test_it_solves_what_it_was_trained_for(nano_m3: LLM) -> None:
    assert solved(nano_m3, "nano-math", 2) + solved(nano_m3, "nano-tools", 4) >= 5


@pytest.mark.full
def test_random_blocks_do_not_replace_selected_ones(
    nano_m3: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accuracy, "MOST_TOKENS", 200)
    assert solved(nano_m3, "nano-retrieval-2k", 3) == 3
    folder = Path(shutil.copytree(FOLDER, tmp_path / "random"))
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(0)
    for name, weight in tensors.items():
        if name.endswith(("index_q_proj.weight", "index_k_proj.weight")):
            order = torch.randperm(weight.numel(), generator=generator)
            shuffled = weight.view(torch.uint8).flatten()[order].view_as(weight)
            tensors[name] = shuffled.view(weight.dtype)
    save_file(tensors, file)
    with LLM(str(folder), num_threads=1) as llm:
        assert solved(llm, "nano-retrieval-2k", 3) <= 1
