import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nano import m3_data, m3_export, m3_vision_data, m3_vision_train, model
from nano.m3_model import M3Config, M3Model
from nano.m3_vision_model import ASSETS, FILE, Tower, add_tower, load_tower
from nano.suites import common, vision
from negamax import LLM, SamplingParams
from negamax.evals.suites import load_problems


@pytest.fixture(scope="module")
def net() -> M3Model:
    return m3_export.load(ASSETS)


@pytest.fixture(scope="module")
def tower() -> Tower:
    return load_tower(ASSETS)


def test_engine_answers_as_the_training_model(net: M3Model, tower: Tower) -> None:
    problems = load_problems("nano-vision", 1)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
    with LLM("nano-m3", device="cpu", dtype="float32", num_threads=1) as llm:
        made = llm.chat([each.messages for each in problems], sampling)
    renderer = m3_data.Renderer()
    use = model.precision(torch.float32, weights=False, activations=False)
    for problem, generation in zip(problems, made, strict=True):
        image, text = problem.messages[0]["content"]
        pixels = m3_vision_data.resize(vision.decode(image["image_url"]["url"]))
        prompt = m3_vision_data.encode_prompt(renderer, text["text"], pixels.size // 3 // 784)
        assert generation.prompt_token_ids == prompt.tolist()
        said = list(generation.outputs[0].token_ids)
        tokens = torch.tensor([[*prompt.tolist(), *said]])
        places = (tokens[0] == 4121).nonzero().flatten()
        after = tokens[0, len(prompt) - 9 :]  # the end of the question, and the answer
        answered: Any = generation
        entries = [*answered.prompt_logprobs[-9:], *answered.outputs[0].logprobs]
        found = [each.logprob for each in entries]
        expected = []
        for image in (pixels, 255 - pixels):
            with torch.no_grad():
                rows = tower(torch.from_numpy(image)[None], torch.float32)[0]
                hidden = m3_vision_train.read(net, tokens, places, rows, use)
                scores = torch.log_softmax(net.logits(hidden[0, len(prompt) - 10 : -1]), -1)
            expected.append(scores.gather(-1, after[:, None])[:, 0].tolist())
        assert found == pytest.approx(expected[0], abs=1e-3)
        assert found != pytest.approx(expected[1], abs=1e-2)


def test_written_checkpoint_has_the_shipped_files(
    net: M3Model, tower: Tower, tmp_path: Path
) -> None:
    m3_export.write(net.state_dict(), tmp_path, M3Config())
    add_tower(tower, tmp_path)
    for file in ("config.json", "model.safetensors.index.json", "chat_template.jinja", FILE):
        assert (tmp_path / file).read_bytes() == (ASSETS / file).read_bytes(), file


def test_shards_hold_images_and_trained_answers() -> None:
    renderer = m3_data.Renderer()
    shard = m3_vision_data.make_shard(renderer, "1", 12)
    batch = m3_vision_train.batch_of(shard, torch.device("cpu"))
    flat = batch.tokens.flatten()
    assert len(batch.places) == batch.images.numel() // 3 // 784 > 0
    assert (flat[batch.places] == 4121).all() and (flat == 4121).sum() == len(batch.places)
    assert (flat[batch.inputs + 1] == batch.targets).all()
    assert len({image.tobytes() for image in shard["images"]}) == 12
    for tokens, mask in zip(shard["tokens"], shard["mask"], strict=True):
        ends = np.flatnonzero(mask & (tokens == 4116))
        assert 1 <= len(ends) <= 3 and not (mask & (tokens == 4121)).any()


def test_text_model_has_one_token_for_each_word() -> None:
    tokenizer = m3_data.Renderer().tokenizer
    said = [tokenizer.encode(f": {word}.", add_special_tokens=False).ids for word in vision.WORDS]
    assert len({word for _, word, _ in said}) == len(vision.WORDS) == 293


def test_training_sees_no_font_place_or_number_of_the_suite() -> None:
    rng = random.Random(0)
    for number in range(60):
        held_out = number % 2 == 1
        if held_out and not vision.HELD_OUT_FOLDER.exists():
            continue
        kind = ("digit", "number", "word", "shape")[number // 2 % 4]
        scene = vision.draw_scene(rng, kind, vision.draw_size(rng), held_out=held_out)
        for item in scene.items:
            place = item.x / scene.width, item.y / scene.height
            assert vision.is_place_held_out(*place) == held_out
        if kind == "number":
            assert common.is_held_out(f"nano-vision {scene.answer}") == held_out
        assert (scene.font in vision.HELD_OUT_FONTS) == held_out
    assert not set(vision.FONTS) & set(vision.HELD_OUT_FONTS)
