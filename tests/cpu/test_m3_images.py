import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from negamax.engine.core.setup import _make_worker_config
from negamax.engine.core.source import locate
from negamax.options.engine import EngineOptions
from negamax.scheduler import encoder_cache
from tests import tiny, tiny_draft, tiny_m3
from tests.layouts import full
from tests.m3_vision_support import (
    Answer,
    Prompt,
    SeeingEngine,
    check,
    draw_prompt,
    replace_image,
    seeing_engine,
)

TRANSFER = {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}}


@pytest.mark.parametrize("seed", [0, 1, 2, *map(full, range(3, 60))])
def test_engine_equals_transformers_on_random_models_and_images(seed: int, tmp_path: Path) -> None:
    """Mix images of several sizes with text, over many sparse blocks and chunks."""
    rng = random.Random(seed)
    sizes = tiny_m3.random_sizes(seed)
    width = rng.choice([48, 96, 144])
    vision = {
        "hidden_size": width, "num_attention_heads": width // rng.choice([16, 24, 48]),
        "intermediate_size": rng.choice([40, 96]), "num_hidden_layers": rng.randint(1, 3),
    }  # fmt: skip
    vision = vision if seed % 3 else tiny_m3.SEEING
    model = tiny_m3.make_seeing_model(seed, vision=vision, **sizes)
    prompts = [
        draw_prompt(rng, sizes["vocab_size"], text=text, images=images, most=most)
        for text, images, most in ((9, 1, 6), (40, 3, 20), (70, rng.randint(0, 4), 30), (3, 2, 40))
    ]
    options: dict[str, Any] = {
        "block_size": sizes["index_block_size"] * (1 + seed % 2),
        "max_num_batched_tokens": rng.choice([17, 37, 64]),
    }
    with seeing_engine(tiny.save(model, tmp_path), **options) as engine:
        answer_all(engine, model, *prompts, prompt_logprobs=2)
        again = answer_all(engine, model, *prompts)
    assert sum(answer.num_cached for answer in again) > 0


def make_seeing(folder: Path, *, num_layers: int) -> tuple[Any, Path]:
    """Make a model whose odd layers have sparse attention to the top 2 blocks of 16 tokens."""
    mlps = ["dense", "sparse"] * num_layers
    attention = ["full_attention", "minimax_m3_sparse"] * num_layers
    layers = {"mlp_layer_types": mlps[:num_layers], "layer_types": attention[:num_layers]}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "index_n_heads": 2}
    blocks = {"index_topk_blocks": 2, "index_local_blocks": 1, "index_block_size": 16}
    layers |= {"vocab_size": 96, "num_hidden_layers": num_layers}
    sizes = tiny_m3.random_sizes(3, **layers, **heads, **blocks)
    model = tiny_m3.make_seeing_model(3, **sizes)
    return model, tiny.save(model, folder)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return make_seeing(tmp_path_factory.mktemp("seeing"), num_layers=2)


def text(count: int, first: int = 7) -> list[int]:
    return [6 + (first + 11 * n) % 89 for n in range(count)]


def image(tokens: int, seed: int = 0, rows: int = 1) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return tiny_m3.random_image(28 * rows, 28 * tokens // rows, generator)


def answer_all(engine: SeeingEngine, model: Any, *prompts: Prompt, **options: Any) -> list[Answer]:
    """Run the prompts, and compare their answers with those of transformers."""
    answers = engine.run(*prompts, **options)
    for prompt, answer in zip(prompts, answers, strict=True):
        check(model, prompt, answer)
    return answers


def test_images_begin_and_end_at_every_border(seeing: tuple[Any, Path]) -> None:
    """Let images end at -1, 0 and +1 of the borders of KV blocks, sparse blocks and chunks."""
    model, folder = seeing
    prompts = [
        Prompt([text(before), image(length, before), image(3, 1), text(2)])
        for before in (15, 16, 17)
        for length in (15, 16, 17, 31, 33)
    ]
    prompts += [Prompt([image(40, 8), text(1)]), Prompt([text(1), image(1), text(1)])]
    for chunk, picked in ((16, prompts), (33, prompts), (1, prompts[:2])):
        options = {"max_num_batched_tokens": chunk, "max_num_seqs": min(chunk, 3)}
        with seeing_engine(folder, **options) as engine:
            answer_all(engine, model, *picked, max_tokens=3)


def test_an_image_counts_by_content_place_and_salt(seeing: tuple[Any, Path]) -> None:
    model, folder = seeing
    first = Prompt([text(20), image(40), text(9)])
    other = replace_image(first, 0, image(40, seed=1))
    moved = Prompt([text(20), image(36), text(4, first=2), text(9)])
    with seeing_engine(folder) as engine:
        cached = []
        for prompt, salt in (
            *((first, ""), (first, ""), (other, ""), (moved, "")),
            *((first, "own"), (first, "own")),
        ):
            (answer,) = answer_all(engine, model, prompt, salt=salt)
            cached.append(answer.num_cached)
        # One block of text is shared, and a cache hit may end inside the image.
        assert cached == [0, 64, 16, 16, 0, 64]
        (answer,) = answer_all(engine, model, Prompt([text(20), image(40), text(1)]))
        assert answer.num_cached == 48
        # Token ids without the image never find the image's blocks.
        (answer,) = engine.run(Prompt([first.ids]))
        assert answer.num_cached == 16


def test_a_hit_inside_an_image_encodes_it_again(seeing: tuple[Any, Path]) -> None:
    model, folder = seeing
    prompts = [Prompt([text(9), image(60, n), text(5)]) for n in range(3)]
    with seeing_engine(folder, encoder_cache_tokens=64, num_kv_blocks=14) as engine:
        for prompt in (*prompts, *prompts):
            answer_all(engine, model, prompt)
        assert engine.encoders[0].num_hits == 0  # The cache holds one image at a time.


def test_choices_and_repeated_images_encode_an_image_once(seeing: tuple[Any, Path]) -> None:
    model, folder = seeing
    shared = image(10)
    prompts = [Prompt([text(n + 1), shared, text(3), shared, text(2)]) for n in range(3)]
    with seeing_engine(folder, max_num_batched_tokens=128) as engine:
        answer_all(engine, model, *prompts)
        assert engine.encoders[0].num_hits == 5
    choices = [Prompt([text(20), image(60), text(20)])] * 3
    with seeing_engine(folder, max_num_batched_tokens=37) as engine:
        answers = answer_all(engine, model, *choices)
        # The second choice starts inside the image, and the third choice starts after the image.
        assert [answer.num_cached for answer in answers] == [0, 32, 96]
        assert engine.encoders[0].num_hits == 1


@pytest.mark.parametrize("part_patches", [3_000, 30])
def test_preempted_and_aborted_requests_leave_no_image_held(
    seeing: tuple[Any, Path], part_patches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_cache, "PART_PATCHES", part_patches)
    model, folder = seeing
    prompts = [Prompt([text(9), image(40, n), text(12), image(20, n + 9), text(3)]) for n in (1, 2)]
    options: dict[str, Any] = {"num_kv_blocks": 14, "encoder_cache_tokens": 64}
    with seeing_engine(folder, **options) as engine:
        answer_all(engine, model, *prompts, max_tokens=60)
        assert engine.loop.stats().preemption_count > 0
        for steps in range(1, 8):
            name = engine.add(prompts[0], salt=f"{steps}")
            for _ in range(steps):
                engine.step()
            engine.loop.abort([name])
            engine.finish()
        answer_all(engine, model, prompts[1], salt="last")


def test_decodes_continue_while_an_image_is_encoded(
    seeing: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encode an image of 160 patches in six parts and another in five, with the same bits."""
    found, num_steps = [], []
    prompt = Prompt([text(9), image(40), text(3), image(30, seed=1), text(5)])
    for part_patches in (3_000, 30):
        monkeypatch.setattr(encoder_cache, "PART_PATCHES", part_patches)
        with seeing_engine(seeing[1], max_num_batched_tokens=200) as engine:
            names = [engine.add(Prompt([text(9)]), max_tokens=40)]
            for _ in range(3):
                engine.step()
            names.append(engine.add(prompt, prompt_logprobs=2))
            decode, answer = (engine.answers[name] for name in names)
            before, steps = len(decode.tokens), 0
            while not answer.tokens:
                engine.step()
                steps += 1
            assert len(decode.tokens) == before + steps
            num_steps.append(steps)
            engine.finish()
            found.append([decode.content, answer.content])
    assert found[0] == found[1] and num_steps[1] - num_steps[0] == 5 + 4 + 1


def test_images_wait_for_room_and_larger_ones_are_refused(seeing: tuple[Any, Path]) -> None:
    model, folder = seeing
    prompts = [Prompt([text(5), image(30, n), text(5), image(20, n + 5), text(3)]) for n in (1, 2)]
    with seeing_engine(folder, encoder_cache_tokens=32, max_num_batched_tokens=200) as engine:
        answer_all(engine, model, *prompts)
        (answer,) = engine.run(Prompt([text(5), image(40), text(5)]))
        assert answer.error is not None
        assert "image 0 has 40 tokens; the encoder cache holds 32" in answer.error
        (answer,) = engine.run(Prompt([text(5), image(4)]))
        assert "a token must follow the last image" in str(answer.error)


@pytest.mark.parametrize(
    "method", ["ngram", "plain", "dspark", full("borrows embedding and head"), full("dflash")]
)
def test_drafts_do_not_change_answers_to_images(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempt requests, and let chunks and prefix hits end inside images."""
    model, folder = make_seeing(tmp_path, num_layers=5)
    prompts = [Prompt([text(30), image(20, n), text(9), image(7)]) for n in range(3)]
    prompts = [Prompt([*prompt.parts, text(3 + n)]) for n, prompt in enumerate(prompts)]
    options = {"num_kv_blocks": 14, "max_num_batched_tokens": 37, "max_num_seqs": 3}
    # transformers replaces sampled image tokens by the rows of an image
    asked = {"max_tokens": 32, "prompt_logprobs": 2, "logit_bias": {tiny_m3.IMAGE_TOKEN: -100.0}}
    with seeing_engine(folder, **options) as engine:
        expected = [each.content for each in engine.run(*prompts, **asked)]
    texts = [prompt.ids + each[0] for prompt, each in zip(prompts, expected, strict=True)]
    config: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": 2}
    if method != "ngram":
        sizes = {"vocab_size": 96, "hidden_size": model.config.text_config.hidden_size}
        draft = tiny_draft.make(method, tmp_path / "draft", ids=[1, 2, 3], **sizes)
        config, seen = {"model": draft[2]}, tiny_draft.watch(monkeypatch.setattr, texts)
    config |= {"num_speculative_tokens": 3, "adaptive": False}
    with seeing_engine(folder, speculative_config=config, **options) as engine:
        assert [each.content for each in engine.run(*prompts, **asked)] == expected
        again = engine.run(*prompts, **asked | {"prompt_logprobs": None})
        stats = engine.loop.stats()
    assert [each.content[:2] for each in again] == [each[:2] for each in expected]
    assert stats.num_accepted_tokens > 20 and stats.preemption_count > 0
    assert sum(each.num_cached for each in again) > 0
    if method != "ngram":
        pixels = [tiny_m3.pixel_values(prompt.images) for prompt in prompts]
        of_layers = seen, model, texts, (2, 3, 4)
        differing, compared = tiny_draft.count_differing(*of_layers, *draft[:2], inputs=pixels)
        assert differing == 0 and compared > 100


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_broken_image_ends_its_request_alone(
    seeing: tuple[Any, Path], in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_cache, "PART_PATCHES", 30 if in_parts else 3_000)
    model, folder = seeing
    good, bad = (Prompt([text(9), image(20, n), text(3)]) for n in (1, 2))
    bad.inputs[0] = msgspec.structs.replace(bad.inputs[0], pixels=b"too short")
    with seeing_engine(folder) as engine:
        if in_parts:  # Images are encoded in parts beside a decode.
            engine.add(Prompt([text(9)]), max_tokens=40)
            engine.step()
            engine.step()
        first, second, third = engine.run(good, bad, good)
        check(model, good, first)
        check(model, good, third)
        assert "while this request was computed" in str(second.error)
        answer_all(engine, model, good)


def test_files_without_a_tower_serve_text(
    seeing: tuple[Any, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, folder = seeing
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if name.startswith("language_model")}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level("INFO", logger="negamax"), seeing_engine(tmp_path) as engine:
        answer_all(engine, model, Prompt([text(30)]))
        (refused,) = engine.run(Prompt([text(9), image(2), text(3)]))
        assert "this engine reads text only" in str(refused.error)
    reason = "the checkpoint's files have no vision tower"
    assert [each.levelname for each in caplog.records if reason in each.message] == ["INFO"]


@pytest.mark.parametrize(
    ("options", "level", "reason"),
    [
        ({}, "", ""),
        ({"encoder_cache_tokens": 0}, "INFO", "--encoder-cache-tokens is 0"),
        ({"load_format": "synthetic"}, "", ""),
        ({"data_parallel_size": 2, "prefill_context_parallel_size": 2}, "", ""),
        (TRANSFER, "", ""),
    ],
)
def test_images_are_read_unless_a_reason_is_logged(
    seeing: tuple[Any, Path], options: Any, level: str, reason: str, caplog: Any
) -> None:
    asked = EngineOptions(str(seeing[1]), device="cpu", **options)
    with caplog.at_level("INFO", logger="negamax"):
        config = _make_worker_config(asked, locate(asked), None)
    found = config.encoder_tokens, config.spec.vision is None
    assert found == ((0, True) if reason else (32_768, False))
    logged = [(each.levelname, each.message) for each in caplog.records if "images" in each.message]
    assert [name for name, _ in logged] == [level] * bool(reason) and reason in str(logged)


def test_synthetic_weights_read_images(seeing: tuple[Any, Path]) -> None:
    """Encode two images to rows that differ and have the variance of embeddings, which is 1."""
    prompts = [Prompt([text(20), image(30, seed), text(3)]) for seed in (1, 2)]
    with seeing_engine(seeing[1], load_format="synthetic") as engine:
        first, second, again = engine.run(*prompts, prompts[0], prompt_logprobs=0)
        encoder = engine.loop.executor._worker.runner.encoder
        rows = encoder.rows[encoder.rows.any(dim=1)]
    assert first.content == again.content and first.prompt_logprobs != second.prompt_logprobs
    assert len(rows) == 60 and 0.7 < rows.std() < 1.4 and rows.std(dim=0).mean() > 0.5
    asked = EngineOptions("minimax-m3", load_format="synthetic", device="cpu")
    bundled = _make_worker_config(asked, locate(asked), None).spec.vision
    assert bundled is not None and bundled.image_token_id == 4121 == bundled.image_end_id - 5
