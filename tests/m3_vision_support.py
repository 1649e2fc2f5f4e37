"""Run an engine that reads images, and compare its answers with those of transformers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch

from negamax import SamplingParams
from negamax.config.generation import SamplingDefaults
from negamax.engine.core.loop import EngineLoop
from negamax.engine.core.setup import start_loop
from negamax.options.engine import EngineOptions
from negamax.scheduler.request import GenerateRequest, ImageInput
from negamax.scheduler.step import SequenceUpdate, TokenLogprobs
from tests import tiny_m3

_NUMBERS = count()
SIDE = 28  # pixels per side of an image token
TOLERANCE = 1e-4  # of log-probabilities in fp32
LIMITS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "num_threads": 1, "block_size": 16,
    "max_num_batched_tokens": 48, "max_num_seqs": 4, "num_kv_blocks": 128,
}  # fmt: skip


@dataclass
class Prompt:
    """Hold text and images in order: token ids, or an image [height, width, 3] uint8."""

    parts: Sequence[list[int] | torch.Tensor]
    image_token: int = tiny_m3.IMAGE_TOKEN
    ids: list[int] = field(init=False)
    inputs: list[ImageInput] = field(init=False)

    def __post_init__(self) -> None:
        self.ids, self.inputs = [], []
        for part in self.parts:
            if isinstance(part, list):
                self.ids += part
                continue
            height, width, _ = part.shape
            pixels = part.numpy().tobytes()
            digest = hashlib.blake2b(repr((height, width)).encode() + pixels).digest()
            size = height // SIDE * (width // SIDE)
            grid = 2 * height // SIDE, 2 * width // SIDE
            self.inputs.append(ImageInput(len(self.ids), size, grid, digest[:32], pixels))
            self.ids += [self.image_token] * size

    @property
    def images(self) -> list[torch.Tensor]:
        return [part for part in self.parts if not isinstance(part, list)]


def draw_prompt(rng: random.Random, vocab: int, *, text: int, images: int, most: int) -> Prompt:
    """Draw `images` images of up to `most` tokens, with up to `text` tokens of text around each."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))

    def words() -> list[int]:
        return [rng.randrange(6, vocab) for _ in range(rng.randint(1, text))]

    parts: list[list[int] | torch.Tensor] = [words()]
    for _ in range(images):
        rows = rng.randint(1, min(5, most))
        size = SIDE * rows, SIDE * rng.randint(1, max(1, most // rows))
        parts += [tiny_m3.random_image(*size, generator), words() if rng.random() < 0.8 else []]
    return Prompt([*parts, words()])


@dataclass
class Answer:
    """Collect the tokens of an answer, and the log-probabilities of prompt and output tokens."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None
    num_cached: int = 0
    finish_reason: str | None = None

    @property
    def content(self) -> tuple[list[int], list[TokenLogprobs], list[TokenLogprobs]]:
        assert self.error is None, self.error
        return self.tokens, self.logprobs, self.prompt_logprobs


class SeeingEngine:
    """Drive an engine's loop step by step."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self.answers: dict[str, Answer] = {}

    @property
    def encoders(self) -> list[Any]:
        return [rank.encoder for rank in self.loop._scheduler.ranks]

    def add(self, prompt: Prompt, *, salt: str = "", **sampling: Any) -> str:
        name = f"r{next(_NUMBERS)}"
        greedy: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "seed": 0, "logprobs": 2}
        params = SamplingParams(**{**greedy, "max_tokens": 8, **sampling})
        self.answers[name] = Answer()
        self.loop.add(
            GenerateRequest(
                request_id=name,
                prompt_token_ids=tuple(prompt.ids),
                sampling=params.resolved(SamplingDefaults(), room=64),
                images=prompt.inputs,
                cache_salt=salt,
            )
        )
        return name

    def step(self) -> None:
        for update in self.loop.step():
            self._take(update)

    def _take(self, update: SequenceUpdate) -> None:
        answer = self.answers[update.request_id]
        answer.tokens += update.token_ids
        answer.logprobs += update.logprobs or []
        answer.prompt_logprobs += update.prompt_logprobs or []
        answer.error = answer.error or update.error
        answer.finish_reason = update.finish_reason or answer.finish_reason
        answer.num_cached = update.num_cached_tokens

    def finish(self) -> None:
        while self.loop.has_work:
            self.step()

    def run(self, *prompts: Prompt, **options: Any) -> list[Answer]:
        names = [self.add(prompt, **options) for prompt in prompts]
        self.finish()
        return [self.answers[name] for name in names]


@contextmanager
def seeing_engine(folder: Path, **options: Any) -> Iterator[SeeingEngine]:
    """Start an engine, and check when it ends that it holds no image."""
    loop, _ = start_loop(EngineOptions(model=str(folder), **{**LIMITS, **options}))
    engine = SeeingEngine(loop)
    try:
        yield engine
        room = engine.loop._scheduler.limits.encoder_tokens
        assert all(each.num_free_pages == room // 16 for each in engine.encoders)
    finally:
        loop.shutdown()


def check(model: Any, prompt: Prompt, answer: Answer, *, tolerance: float = TOLERANCE) -> None:
    """Compare tokens and log-probabilities of the answer with transformers' `model`."""
    assert answer.error is None, answer.error
    assert len(answer.logprobs) == len(answer.tokens) > 0
    # transformers also replaces sampled image tokens by the rows of an image.
    tokens = [*answer.tokens, tiny_m3.IMAGE_TOKEN]
    tokens = tokens[: tokens.index(tiny_m3.IMAGE_TOKEN)]
    ids = prompt.ids + tokens
    images = tiny_m3.pixel_values(prompt.images) if prompt.images else {}
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), **images).logits[0]
    assert tokens == logits[len(prompt.ids) - 1 : -1].argmax(dim=-1).tolist()
    logprobs = torch.log_softmax(logits, dim=-1)
    entries = answer.prompt_logprobs + answer.logprobs[: len(tokens)]
    first = len(ids) - len(entries) - 1
    for position, entry in enumerate(entries, start=first):
        assert entry.token_id == ids[position + 1]
        top = zip(entry.top_ids, entry.top_logprobs, strict=True)
        for token_id, logprob in ((entry.token_id, entry.logprob), *top):
            assert abs(logprob - float(logprobs[position, token_id])) < tolerance


def replace_image(prompt: Prompt, number: int, image: torch.Tensor) -> Prompt:
    """Return the prompt with `image` in place of image `number`."""
    places = [at for at, part in enumerate(prompt.parts) if not isinstance(part, list)]
    parts = list(prompt.parts)
    parts[places[number]] = image
    return Prompt(parts)
