"""Train the vision tower of the shipped nano-m3, through its frozen text model.

    python -m nano.m3_vision_train --data DIR --out DIR --seconds 500

`nano.m3_vision_data --out` makes the shards at the same time. The shipped tower is trained on,
unless `--fresh` is given.
"""

from __future__ import annotations

import argparse
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nano import m3_data, m3_export, m3_train, m3_vision_data, model, train
from nano.m3_model import Heads, Layer, M3Model, gemma_norm, rope_tables
from nano.m3_tokenizer import EOS_ID
from nano.m3_vision_model import ASSETS, IMAGE_ID, SIDE, Tower, add_tower, load_tower
from nano.model import Precision
from nano.suites.vision import KINDS, decode
from negamax.evals.suites import Problem, load_problems

LABEL_WEIGHT = 0.5
ANSWER_TOKENS = 24  # limit of an answer to a problem


@dataclass(frozen=True)
class ImageBatch:
    images: Tensor  # uint8 [B, height, width, 3]
    tokens: Tensor  # int64 [B, S]
    places: Tensor  # int64, flat positions of all image tokens in order
    inputs: Tensor  # int64 [K], flat positions whose next token is trained
    targets: Tensor  # int64 [K]
    labels: Tensor  # int64 [B, 11], see `m3_vision_data.label`


class Probe(nn.Module):
    """Predict the labels of images from their embeddings, only to train the tower faster."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(11, width))
        self.rows, self.columns = (nn.Parameter(0.1 * torch.randn(24, width)) for _ in range(2))
        self.keys, self.values, self.inner = (nn.Linear(width, width) for _ in range(3))
        self.norm, self.last_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.last = nn.Linear(width, 1 + len(m3_vision_data.SYMBOLS))

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Map embeddings [B, rows * columns, width] to logits [B, 11, symbols]."""
        places = self.rows[: grid[0], None] + self.columns[: grid[1]]
        x = self.norm(x.float()) + places.flatten(0, 1)
        queries = self.queries.expand(len(x), -1, -1)
        q, k, v = (
            each.unflatten(-1, (4, -1)).transpose(1, 2)
            for each in (queries, self.keys(x), self.values(x))
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        logits: Tensor = self.last(self.last_norm(mixed + F.gelu(self.inner(mixed))))
        return logits


class ShardLoader(train.Loader):
    """Load shards of images, each of which is one batch."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, rows=0, row_tokens=0, capacity=0, seed=seed)

    def _fill(self) -> None:
        for shard in self._shards():
            self.ready.put(shard)

    def take(self, device: torch.device) -> ImageBatch:
        return batch_of(self.ready.get(), device)


def batch_of(shard: dict[str, np.ndarray], device: torch.device) -> ImageBatch:
    """Move a shard to the device."""
    tokens = shard["tokens"].astype(np.int64).reshape(-1)
    trained = np.flatnonzero(shard["mask"])  # No conversation starts with a trained token.
    places = np.flatnonzero(tokens == IMAGE_ID)
    arrays = (
        shard["images"], tokens.reshape(shard["tokens"].shape), places, trained - 1,
        tokens[trained], shard["labels"],
    )  # fmt: skip
    pinned = (torch.from_numpy(array) for array in arrays)
    if device.type == "cuda":
        pinned = (each.pin_memory().to(device, non_blocking=True) for each in pinned)
    return ImageBatch(*pinned)


def read(net: M3Model, tokens: Tensor, places: Tensor, rows: Tensor, use: Precision) -> Tensor:
    """Map tokens [B, S] to hidden states [B, S, hidden]; `rows` replace those at `places`.

    A conversation has at most `topk_blocks` blocks, so all of them are selected.
    """
    assert tokens.shape[1] <= net.config.block_size * net.config.topk_blocks
    cos, sin = rope_tables(torch.arange(tokens.shape[1], device=tokens.device), net.config)
    x = F.embedding(tokens.flatten(), net.embed.to(rows.dtype)).index_copy(0, places, rows)
    x = x.unflatten(0, tokens.shape)
    for layer in net.layers:  # not compiled, because shapes vary
        heads = Heads(*Layer.project(layer, x, cos, sin, use))
        mixed = F.scaled_dot_product_attention(
            heads.q, heads.k, heads.v, is_causal=True, enable_gqa=True
        )
        x, _ = Layer.finish(layer, x, mixed, use)
    return gemma_norm(x, net.norm, net.config.rms_norm_eps)


class VisionTrainer(m3_train.Trainer):
    """Train the tower."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        super().__init__(arguments, device)
        self.model.load_state_dict(m3_export.load(ASSETS).state_dict())
        self.model.requires_grad_(False)
        self.tower = (Tower() if arguments.fresh else load_tower(ASSETS)).to(device)
        self.probe = Probe(self.config.hidden_size).to(device)
        self.tower_rest = [p for p in self.tower.parameters() if p.dim() == 1]
        self.tower_rest += self.probe.parameters()
        self.tower_muon = train.Muon([p for p in self.tower.parameters() if p.dim() == 2])
        self.tower_adam = torch.optim.AdamW(
            self.tower_rest, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda"
        )
        self.use = model.precision(
            torch.bfloat16, weights=False, activations=arguments.activation_fp8
        )

    def see(self, batch: ImageBatch) -> Tensor:
        """Run one update. Return losses [2]: of answers about images, and of labels."""
        rows = self.tower(batch.images, torch.bfloat16)
        grid = batch.images.shape[1] // SIDE, batch.images.shape[2] // SIDE
        labels = F.cross_entropy(self.probe(rows, grid).flatten(0, 1), batch.labels.flatten())
        hidden = read(self.model, batch.tokens, batch.places, rows.flatten(0, 1), self.use)
        logits = self.model.logits(hidden.flatten(0, 1)[batch.inputs])
        loss = F.cross_entropy(logits.float(), batch.targets)
        (loss + LABEL_WEIGHT * labels).backward()
        rate = self.arguments.tower_rate * self.rate()
        self.step_count += 1
        self.steps_here += 1
        torch.nn.utils.clip_grad_norm_(self.tower_rest, 1.0)
        for group in self.tower_adam.param_groups:
            group["lr"] = rate
        self.tower_adam.step()
        self.tower_muon.step(rate)
        self.tower.zero_grad(set_to_none=True)
        self.probe.zero_grad(set_to_none=True)
        return torch.stack((loss, labels)).detach()

    @torch.no_grad()
    def answer(self, renderer: m3_data.Renderer, problem: Problem) -> str:
        """Answer a problem of nano-vision by greedy decoding."""
        image, text = problem.messages[0]["content"]
        pixels = m3_vision_data.resize(decode(image["image_url"]["url"]))
        rows = self.tower(torch.from_numpy(pixels).to(self.device)[None], torch.bfloat16)[0]
        prompt = m3_vision_data.encode_prompt(renderer, text["text"], len(rows))
        ids = prompt.tolist()
        places = torch.from_numpy(np.flatnonzero(prompt == IMAGE_ID)).to(self.device)
        while len(ids) < len(prompt) + ANSWER_TOKENS and ids[-1] != EOS_ID:
            tokens = torch.tensor([ids], device=self.device)
            hidden = read(self.model, tokens, places, rows, self.use)
            ids.append(int(self.model.logits(hidden[0, -1]).argmax()))  # host-sync: evaluation
        said: str = renderer.tokenizer.decode(ids[len(prompt) :])
        return said.replace("</mm:think>", "")

    def evaluate(self) -> None:
        """Print the share of solved problems by kind."""
        problems = load_problems("nano-vision", self.arguments.problems)
        renderer = m3_data.Renderer()
        said = [self.answer(renderer, problem) for problem in problems]
        solved = [p.is_solved_by(text, []) for p, text in zip(problems, said, strict=True)]
        shares = ", ".join(
            f"{kind} {np.mean(solved[number :: len(KINDS)]):.3f}"
            for number, kind in enumerate(KINDS)
        )
        wrong = [(p.answer, t) for p, t, ok in zip(problems, said, solved, strict=True) if not ok]
        print(f"held-out: {np.mean(solved):.4f} ({shares}); failures: {wrong[:4]}", flush=True)

    def write(self, folder: Path) -> None:
        """Write the checkpoint."""
        shutil.copytree(ASSETS, folder, dirs_exist_ok=True)
        add_tower(self.tower, folder)


def run(arguments: argparse.Namespace) -> None:
    begun = printed = evaluated = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = VisionTrainer(arguments, device)
    loader = ShardLoader(arguments.data, arguments.seed)
    losses: list[Tensor] = []
    while trainer.elapsed < arguments.seconds and trainer.step_count < arguments.max_steps:
        losses.append(trainer.see(loader.take(device)))
        now = time.monotonic()
        if trainer.step_count < 4 or now - printed > arguments.print_every:
            seen, labels = torch.stack(losses).mean(0).tolist()  # host-sync: progress line
            print(
                f"step {trainer.step_count} at {trainer.elapsed:.0f} s, loss {seen:.4f} labels "
                f"{labels:.4f} rate {trainer.rate():.3f} shards {loader.fresh_shards} fresh of "
                f"{loader.used_shards}",
                flush=True,
            )
            losses, printed = [], now
        if now - evaluated > arguments.evaluate_every:
            trainer.evaluate()
            trainer.write(arguments.out)
            evaluated = now
        trainer.elapsed = time.monotonic() - begun
    trainer.write(arguments.out)
    trainer.evaluate()
    print(f"done: {trainer.step_count} steps in {time.monotonic() - begun:.0f} s", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])

    def add(name: str, value: Any, what: str | None = None) -> None:
        options.add_argument(f"--{name}", type=type(value), default=value, help=what)

    for name in ("data", "out"):
        options.add_argument(f"--{name}", type=Path, required=True)
    add("seconds", 500.0, "wall-clock time of the training")
    add("tower-rate", 2e-3)
    add("problems", 100, "of nano-vision per evaluation")
    add("max-steps", 10**9)
    add("print-every", 15.0)
    add("evaluate-every", 80.0, "also writes the checkpoint")
    add("seed", 0)
    for name in ("fresh", "activation-fp8"):
        options.add_argument(f"--{name}", action="store_true")
    given = options.parse_args()
    given.total_seconds, given.eager, given.adam_rate = given.seconds, True, 0.0
    run(given)


if __name__ == "__main__":
    main()
