"""Conversations about images, the training data of nano-m3's vision tower.

    python -m nano.m3_vision_data --show 5
    python -m nano.m3_vision_data --out DIR --workers 12    keep unread shards in DIR

A shard is one batch: `images` uint8 [B, height, width, 3] of one size, resized as the server
resizes them, `labels` int64 [B, 11] (see `label`), `tokens` uint16 [B, S], `mask` bool [B, S]
(true for trained tokens).
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from nano import data, m3_data, talk
from nano.dialogue import Conversation
from nano.m3_vision_model import END_ID, IMAGE_ID, SIDE, START_ID
from nano.suites import vision
from nano.suites.vision import Question, Scene
from negamax.images.sizes import count_tokens, fit

BATCH = 192  # images per shard
MARK = "]<]image[>["
SYMBOLS = (*string.digits, *string.ascii_lowercase, *vision.SHAPES, *vision.COLORS, *vision.WORDS)
_KINDS, _WEIGHTS = ("digit", "number", "word", "shape"), (8, 24, 52, 16)


def draw(rng: random.Random, size: tuple[int, int]) -> tuple[Scene, Conversation, str | None]:
    """Draw an image of `size` (width, height), questions about it, and the thinking mode."""
    scene = vision.draw_scene(rng, rng.choices(_KINDS, weights=_WEIGHTS)[0], size)
    mode = rng.choices((None, "adaptive", "enabled", "disabled"), weights=(60, 10, 20, 10))[0]
    chat = converse(scene, vision.ask(scene, rng, rng.randint(1, 3)), last=rng.random() < 0.25)
    if mode == "enabled":
        for message in chat.messages[1::2]:
            message["reasoning_content"] = vision.describe(scene)
    system = talk.draw_system(rng)[0] if rng.random() < 0.2 else None
    if system is not None and len(system) < 100:
        chat.messages.insert(0, {"role": "system", "content": system})
    return scene, chat, mode


def converse(scene: Scene, questions: Sequence[Question], *, last: bool = False) -> Conversation:
    """Return the questions and answers. The image is before or after (`last`) the first one."""
    chat = Conversation()
    for number, each in enumerate(questions):
        image = MARK if number == 0 else ""
        text = each.text + image if last else image + each.text
        chat.messages.append({"role": "user", "content": text})
        chat.messages.append({"role": "assistant", "content": each.sentence, "trained": True})
    return chat


def label(scene: Scene) -> list[int]:
    """Return numbers of up to six characters or shapes, three colors, the background and the word.

    The number of a symbol is 1 + its place in `SYMBOLS`, or 0 for none.
    """
    shown = [i.name for i in scene.items] if scene.kind == "shape" else list(scene.answer)
    found = [1 + SYMBOLS.index(each) for each in shown]
    colors = [1 + SYMBOLS.index(item.color) for item in scene.items]
    found += [0] * (6 - len(found)) + colors + [0] * (3 - len(colors))
    word = 1 + SYMBOLS.index(scene.answer) if scene.kind == "word" else 0
    return [*found, 1 + SYMBOLS.index(scene.background), word]


def encode(
    renderer: m3_data.Renderer, chat: Conversation, mode: str | None, num_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Encode a conversation with an image of `num_tokens`. Return tokens and mask."""
    ids, mask = renderer.encode(chat, mode)
    counts = np.where(ids == IMAGE_ID, num_tokens + 2, 1)
    return expand(ids, num_tokens), np.repeat(mask, counts)


def expand(ids: np.ndarray, num_tokens: int) -> np.ndarray:
    """Replace the image token by `num_tokens` of it between the markers of an image."""
    (at,) = np.flatnonzero(ids == IMAGE_ID).tolist()
    image = np.array([START_ID, *[IMAGE_ID] * num_tokens, END_ID], dtype=ids.dtype)
    return np.concatenate((ids[:at], image, ids[at + 1 :]))


def encode_prompt(renderer: m3_data.Renderer, question: str, num_tokens: int) -> np.ndarray:
    """Encode a question after an image, and the opening of the answer."""
    chat = Conversation([{"role": "user", "content": MARK + question}])
    text = renderer.text(chat, None, prompt=True)
    ids = renderer.tokenizer.encode(text, add_special_tokens=False).ids
    return expand(np.array(ids), num_tokens)


def resize(image: Image.Image) -> np.ndarray:
    """Resize an image as the server does. Return uint8 [height, width, 3]."""
    height, width = fit(image.height, image.width, rule="longest")
    return np.array(image.resize((width, height), Image.Resampling.BICUBIC))


def stack(made: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
    """Pad encoded conversations to one length, a multiple of 16."""
    longest = -(-max(len(tokens) for tokens, _ in made) // 16) * 16
    tokens = np.zeros((len(made), longest), dtype=np.uint16)
    mask = np.zeros((len(made), longest), dtype=bool)
    for row, (ids, trained) in enumerate(made):
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, trained
    return {"tokens": tokens, "mask": mask}


def make_shard(renderer: m3_data.Renderer, seed: str, count: int) -> dict[str, np.ndarray]:
    """Draw `count` images of one size with their conversations."""
    rng = random.Random(f"nano-vision-data:{seed}")
    size = vision.draw_size(rng)
    num_tokens = count_tokens(*fit(size[1], size[0], rule="longest"))
    images, made, labels = [], [], []
    for _ in range(count):
        scene, chat, mode = draw(rng, size)
        images.append(resize(vision.render(scene)))
        made.append(encode(renderer, chat, mode, num_tokens))
        labels.append(label(scene))
    assert images[0].shape[0] * images[0].shape[1] == num_tokens * SIDE**2
    return {"images": np.stack(images), "labels": np.array(labels), **stack(made)}


def new_maker() -> Callable[[str, int], dict[str, np.ndarray]]:
    """Make the function that makes shards in a worker."""
    renderer = m3_data.Renderer()
    return lambda seed, count: make_shard(renderer, seed, count)


def _show(rng: random.Random) -> str:
    _, chat, mode = draw(rng, vision.draw_size(rng))
    return m3_data.Renderer().text(chat, mode)


if __name__ == "__main__":
    data.run(_show, new_maker, max_shards=60, shard_tokens=BATCH)
