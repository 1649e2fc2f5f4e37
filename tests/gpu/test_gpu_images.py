"""Images on GPUs, compared with the CPU in fp32: nano-m3 with a random vision tower."""

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_gpu_engine import skip_without

from negamax.cli.main import main
from negamax.config.embedded import EMBEDDED
from negamax.kernels.platform import platform_of
from negamax.kernels.registry import resolve
from negamax.models.minimax_m3 import names
from negamax.models.minimax_m3.config import read_vision
from negamax.models.minimax_m3.vision import VisionTower
from negamax.models.registry import bundled_spec
from negamax.quantization.scheme import WeightFormat
from negamax.scheduler import encoder_cache
from tests import tiny_m3
from tests.m3_vision_support import Answer, Prompt, seeing_engine

# sizes of the vision tower of MiniMax-M3
FULL = {"hidden_size": 1280, "num_attention_heads": 16, "intermediate_size": 5120}
SMALL = {"hidden_size": 160, "num_attention_heads": 2, "intermediate_size": 96}
IMAGE_TOKEN = 4121
IMAGES, TEXT = slice(3), slice(3, 4)  # prompts with images, and one without
LIMITS: dict[str, Any] = {
    "block_size": 128, "num_kv_blocks": 96, "max_model_len": 4096, "max_num_batched_tokens": 512,
    "encoder_cache_tokens": 4096,
}  # fmt: skip


def random_weights(spec: Any) -> dict[str, torch.Tensor]:
    """Draw the weights of tower and projector: norms near 1, outputs as large as embeddings."""
    generator = torch.Generator().manual_seed(5)
    found = {}
    for each in names.weights(spec):
        if each.is_vision:
            values = torch.randn(each.shape, generator=generator)
            is_norm = "norm" in each.name and each.name.endswith(".weight")
            width = each.shape[0] if len(each.shape) == 1 else values[0].numel()
            found[each.name] = (1 + 0.1 * values) if is_norm else values * width**-0.5
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """nano-m3 with a random tower of two layers."""
    path = tmp_path_factory.mktemp("seeing")
    source = Path(shutil.copytree(EMBEDDED["nano-m3"], path / "source"))
    config = json.loads((source / "config.json").read_text())
    config["vision_config"] = {**SMALL, "num_hidden_layers": 2}
    (source / "config.json").write_text(json.dumps(config))
    weights, file = random_weights(read_vision(config)), "vision.safetensors"
    save_file({name: each.bfloat16() for name, each in weights.items()}, source / file)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    text = {name: each for name, each in index["weight_map"].items() if each != file}
    index["weight_map"] = text | dict.fromkeys(weights, file)
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert main(["convert", str(source), str(path / "nano-m3"), "--to", "bf16"]) == 0
    return path / "nano-m3"


def draw_prompts() -> list[Prompt]:
    """Draw text with images, which begin and end inside sparse blocks of 128 tokens."""
    rng, generator = random.Random(3), torch.Generator().manual_seed(3)

    def words(count: int) -> list[int]:
        return rng.choices(range(300, 3900), k=count)

    def image(rows: int, columns: int) -> torch.Tensor:
        found: torch.Tensor = tiny_m3.random_image(28 * rows, 28 * columns, generator)
        return found

    shared = image(9, 14)
    lists = (
        [words(20), shared, words(30)],
        [words(300), image(20, 17), image(2, 3), words(200), shared, words(9)],
        [image(4, 33), words(1200), image(5, 5), words(5)],
        [words(700)],
    )
    return [Prompt(parts, image_token=IMAGE_TOKEN) for parts in lists]


def run(folder: Path, **options: Any) -> list[Answer]:
    with seeing_engine(folder, **{**LIMITS, **options}) as engine:
        return engine.run(*draw_prompts(), max_tokens=24, prompt_logprobs=1)


def mean_difference(left: Sequence[Answer], right: Sequence[Answer]) -> float:
    """Return the mean difference of the log-probabilities of prompt tokens, without the images'."""
    differences = [
        abs(one.logprob - other.logprob)
        for a, b in zip(left, right, strict=True)
        for one, other in zip(a.prompt_logprobs, b.prompt_logprobs, strict=True)
        if one.token_id != IMAGE_TOKEN
    ]
    return sum(differences) / len(differences)


@pytest.fixture(scope="module")
def exact(folder: Path) -> list[Answer]:
    return run(folder, device="cpu", dtype="float32", num_threads=8)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"max_num_batched_tokens": 96},
        {"encoder_cache_tokens": 400},
        {"speculative_config": {"model": "nano-m3-draft", "num_speculative_tokens": 3}},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
        {"prefill_context_parallel_size": 2},
    ],
    ids=str,
)
def test_images_on_a_gpu_give_the_log_probabilities_of_the_cpu(
    folder: Path, exact: list[Answer], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encode some images in parts beside decodes."""
    skip_without(options)
    monkeypatch.setattr(encoder_cache, "PART_PATCHES", 300)
    found = run(folder, device="cuda", dtype="bfloat16", **options)
    assert not any(each.error for each in found)
    same = sum(a.tokens == b.tokens for a, b in zip(found, exact, strict=True))
    seen, text = (mean_difference(found[part], exact[part]) for part in (IMAGES, TEXT))
    print(f"{options}: {seen:.4f} with images, {text:.4f} of text, {same} equal answers")
    assert seen < 1.5 * text


def test_steps_without_images_give_the_bits_of_a_text_model(folder: Path) -> None:
    text = draw_prompts()[-1:]
    found = []
    for tokens in (0, 4096):
        with seeing_engine(
            folder,
            **{**LIMITS, "device": "cuda", "dtype": "bfloat16", "encoder_cache_tokens": tokens},
        ) as engine:
            found.append(engine.run(*text, max_tokens=64, prompt_logprobs=1))
    assert found[0] == found[1]


@pytest.mark.parametrize("layers", [2, 32])
def test_the_tower_of_m3_at_its_full_width(layers: int) -> None:
    """The relative difference of bf16 from fp32 is that of transformers' class, about 1 %."""
    tower = bundled_spec("minimax-m3").vision
    assert tower is not None
    spec = replace(tower, num_layers=layers)
    generator = torch.Generator(device="cuda").manual_seed(1)
    image = partial(torch.randint, 0, 256, dtype=torch.uint8, device="cuda", generator=generator)
    images = [image((28 * rows, 28 * columns, 3)) for rows, columns in ((9, 14), (1, 30), (20, 20))]
    towers, cuda = [], torch.device("cuda")
    for dtype in (torch.float32, torch.bfloat16):
        kernels = resolve(platform=platform_of(cuda), dtype=dtype)
        tower = VisionTower(spec, WeightFormat(dtype=dtype, device=cuda), kernels)
        draw = torch.Generator(device="cuda").manual_seed(2)
        for slot in tower.slots:
            values = torch.randn(slot.target.shape, device="cuda", generator=draw)
            is_norm = "norm" in slot.name and slot.name.endswith(".weight")
            width = values.shape[0] if values.dim() == 1 else values[0].numel()
            slot.target.copy_(1 + 0.1 * values if is_norm else values * width**-0.5)
        towers.append(tower)
    exact, found = (tower(images).float() for tower in towers)
    error = float((found - exact).norm() / exact.norm())
    print(f"{layers} layers: relative difference {error:.4f}")
    assert error < 0.02
