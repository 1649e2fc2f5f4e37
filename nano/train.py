"""Train nano: AdamW and Muon, document-masked packing, FP8-aware weights, a wall-clock schedule.

    python -m nano.train --data /tmp/nano_data --state /tmp/nano_state.pt --seconds 1080

`nano.data --out` makes the shards at the same time. If --state exists, the run continues from it.
"""

from __future__ import annotations

import argparse
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from nano import export, model
from nano.model import NanoConfig, NanoModel

WARMUP_STEPS = 200
STABLE_SHARE = 0.55  # share of the time at full rate; then the rate falls linearly to zero


@dataclass(frozen=True)
class Batch:
    tokens: Tensor  # int64 [B, S]
    documents: Tensor  # int32 [B, S], number of the document in its row
    inputs: Tensor  # int64 [K], flat positions whose next token is trained; padded with 0
    targets: Tensor  # int64 [K], the next token; -100 in padding


def pack(lengths: np.ndarray, rows: int, row_tokens: int) -> tuple[list[list[int]], list[int]]:
    """Pack documents by first fit into `rows` rows. Return (indices per row, the rest)."""
    room = [row_tokens] * rows
    placed: list[list[int]] = [[] for _ in range(rows)]
    left: list[int] = []
    first_open = 0
    for index, length in enumerate(lengths.tolist()):
        for row in range(first_open, rows):
            if room[row] >= length:
                room[row] -= length
                placed[row].append(index)
                break
        else:
            left.append(index)
        while first_open < rows and room[first_open] < 24:
            first_open += 1
    return placed, left


def _assemble(
    rows: list[list[int]], shard: dict[str, np.ndarray], row_tokens: int, capacity: int
) -> dict[str, np.ndarray]:
    starts = np.concatenate(([0], np.cumsum(shard["lengths"])))
    tokens = np.zeros((len(rows), row_tokens), dtype=np.int64)
    mask = np.zeros((len(rows), row_tokens), dtype=bool)
    documents = np.full((len(rows), row_tokens), -1, dtype=np.int32)
    for row, members in enumerate(rows):
        at = 0
        for number, member in enumerate(members):
            begin, end = starts[member], starts[member + 1]
            size = end - begin
            tokens[row, at : at + size] = shard["tokens"][begin:end]
            mask[row, at : at + size] = shard["mask"][begin:end]
            documents[row, at : at + size] = number
            at += size
    # No document starts with a trained token.
    trained = np.flatnonzero(mask.reshape(-1))[:capacity]
    inputs, targets = np.zeros(capacity, dtype=np.int64), np.full(capacity, -100, dtype=np.int64)
    inputs[: len(trained)] = trained - 1
    targets[: len(trained)] = tokens.reshape(-1)[trained]
    return {"tokens": tokens, "documents": documents, "inputs": inputs, "targets": targets}


class Loader:
    """Read and pack shards in a thread. Used shards repeat if no new shard is ready."""

    def __init__(
        self, folder: Path, *, rows: int, row_tokens: int, capacity: int, seed: int
    ) -> None:
        self.folder, self.rows, self.row_tokens, self.capacity = folder, rows, row_tokens, capacity
        self.random = np.random.default_rng(seed)
        self.kept: list[dict[str, np.ndarray]] = []
        self.fresh_shards = 0
        self.used_shards = 0
        self.ready: queue.Queue[dict[str, np.ndarray]] = queue.Queue(maxsize=16)
        threading.Thread(target=self._fill, daemon=True).start()

    def _shards(self) -> Iterator[dict[str, np.ndarray]]:
        while True:
            paths = sorted(self.folder.glob("*.npz"))
            for path in paths[:16]:
                with np.load(path) as file:
                    shard = {name: file[name] for name in file.files}
                path.unlink()
                self.fresh_shards += 1
                self.used_shards += 1
                if len(self.kept) < 600:
                    self.kept.append(shard)
                yield shard
            if not paths:
                if not self.kept:
                    time.sleep(0.2)
                    continue
                self.used_shards += 1
                yield self.kept[int(self.random.integers(len(self.kept)))]

    def _fill(self) -> None:
        for shard in self._shards():
            fitting = np.flatnonzero(shard["lengths"] <= self.row_tokens)
            order = self.random.permutation(fitting)
            while len(order):
                if shard["lengths"][order].sum() < self.rows * self.row_tokens:
                    break
                placed, left = pack(shard["lengths"][order], self.rows, self.row_tokens)
                rows = [[int(order[index]) for index in row] for row in placed]
                self.ready.put(_assemble(rows, shard, self.row_tokens, self.capacity))
                order = order[left]

    def next(self, device: torch.device) -> Batch:
        """Return the next batch, moved to the device."""
        arrays = self.ready.get()

        def move(name: str) -> Tensor:
            tensor = torch.from_numpy(arrays[name])
            return (
                tensor.pin_memory().to(device, non_blocking=True)
                if device.type == "cuda"
                else tensor
            )

        return Batch(move("tokens"), move("documents"), move("inputs"), move("targets"))


def orthogonalise(matrices: Tensor) -> Tensor:
    """Run five Newton-Schulz steps toward the nearest semi-orthogonal matrices."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return (x.mT if tall else x).float()


class Muon:
    """The Muon optimizer: orthogonalized momentum, with one batched call per matrix shape."""

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ) -> None:
        self.momentum, self.weight_decay = momentum, weight_decay
        groups: dict[tuple[int, int], list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            groups.setdefault((parameter.shape[-2], parameter.shape[-1]), []).append(parameter)
        self.groups = list(groups.values())
        self.buffers = [
            torch.zeros_like(torch.cat([p.detach().reshape(-1, *p.shape[-2:]) for p in group]))
            for group in self.groups
        ]
        self.orthogonalise = (
            torch.compile(orthogonalise) if self.buffers[0].is_cuda else orthogonalise
        )

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Run one update, which moves each element by about 0.2 * rate."""
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            grad = torch.cat(
                [p.grad.reshape(-1, *p.shape[-2:]) for p in group if p.grad is not None]
            )
            buffer.lerp_(grad, 1 - self.momentum)
            update = self.orthogonalise(grad.lerp(buffer, self.momentum))
            scale = 0.2 * max(update.shape[-2:]) ** 0.5
            pieces = update.split([p.numel() // (p.shape[-1] * p.shape[-2]) for p in group])
            torch._foreach_mul_(group, 1 - rate * self.weight_decay)
            torch._foreach_add_(
                group,
                [piece.view_as(p) for piece, p in zip(pieces, group, strict=True)],
                alpha=-rate * scale,
            )


class Trainer:
    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self.arguments, self.device = arguments, device
        torch.manual_seed(arguments.seed)
        self.model = NanoModel(NanoConfig()).to(device)
        matrices = [
            p
            for name, p in self.model.named_parameters()
            if name.split(".")[-1] in ("q", "k", "v", "o", "w1", "w2", "w3")
        ]
        taken = {id(p) for p in matrices}
        rest = [p for p in self.model.parameters() if id(p) not in taken]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(
            rest,
            lr=arguments.adam_rate,
            betas=(0.9, 0.95),
            eps=1e-10,
            weight_decay=0.0,
            fused=device.type == "cuda",
        )
        self.use = model.precision(
            torch.bfloat16, weights=True, activations=arguments.activation_fp8
        )
        self.positions = torch.arange(arguments.row_tokens, device=device)
        self.documents = torch.zeros(
            arguments.rows, arguments.row_tokens, dtype=torch.int32, device=device
        )
        self.flex = device.type == "cuda"
        self.make_mask = torch.compile(create_block_mask) if self.flex else create_block_mask
        self.loss = torch.compile(self._loss) if self.flex else self._loss
        self.step_count, self.tokens_seen, self.elapsed = 0, 0, 0.0

    def _loss(
        self, tokens: Tensor, inputs: Tensor, targets: Tensor, mask: Any
    ) -> tuple[Tensor, Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if self.flex:
                mixed = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
                assert isinstance(mixed, Tensor)
                return mixed
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

        hidden, loads = self.model(
            tokens, self.positions, attend, dtype=torch.bfloat16, use=self.use
        )
        logits = self.model.logits(hidden.flatten(0, 1)[inputs])
        return F.cross_entropy(logits.float(), targets, ignore_index=-100), loads

    def _mask(self) -> Any:
        documents = self.documents

        def same_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (documents[b, q] == documents[b, k])

        rows, size = documents.shape
        if self.flex:
            return self.make_mask(same_document, rows, None, size, size, device=self.device)
        return (
            (documents[:, :, None] == documents[:, None, :])
            & torch.ones(size, size, dtype=torch.bool).tril()
        )[:, None]

    def rate(self) -> float:
        """Return the factor of the learning rate at this step and time."""
        done = min(1.0, self.elapsed / self.arguments.seconds)
        return min(1.0, (self.step_count + 1) / WARMUP_STEPS) * min(
            1.0, (1 - done) / (1 - STABLE_SHARE)
        )

    def step(self, batch: Batch) -> Tensor:
        """Run one optimizer step. Return the loss on the device."""
        self.documents.copy_(batch.documents)
        loss, loads = self.loss(batch.tokens, batch.inputs, batch.targets, self._mask())
        loss.backward()
        rate = self.rate()
        for group in self.adam.param_groups:
            group["lr"] = self.arguments.adam_rate * rate
        torch.nn.utils.clip_grad_norm_(
            [p for group in self.adam.param_groups for p in group["params"]], 1.0
        )
        self.adam.step()
        self.muon.step(self.arguments.muon_rate * rate)
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for layer, load in zip(self.model.layers, loads, strict=True):
                layer.expert_bias += (
                    self.arguments.bias_rate * rate * torch.sign(load.mean() - load)
                )
        self.step_count += 1
        self.tokens_seen += batch.tokens.numel()
        return loss.detach()

    def save(self, path: Path) -> None:
        """Save everything that a resumed run needs."""
        state = {
            "model": self.model.state_dict(), "adam": self.adam.state_dict(),
            "muon": self.muon.buffers,
            "counts": (self.step_count, self.tokens_seen, self.elapsed),
        }  # fmt: skip
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)

    def resume(self, path: Path) -> None:
        """Load a state that `save` wrote."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.adam.load_state_dict(state["adam"])
        self.muon.buffers = state["muon"]
        self.step_count, self.tokens_seen, self.elapsed = state["counts"]


def run(arguments: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(arguments, device)
    if arguments.state.exists():
        trainer.resume(arguments.state)
    elif arguments.init is not None:
        trainer.model.load_state_dict(
            export.load(arguments.init, device, torch.float32).state_dict()
        )
    capacity = int(arguments.rows * arguments.row_tokens * arguments.trained_share)
    loader = Loader(
        arguments.data,
        rows=arguments.rows,
        row_tokens=arguments.row_tokens,
        capacity=capacity,
        seed=arguments.seed + trainer.step_count,
    )
    losses: list[Tensor] = []
    window_start, window_tokens = time.monotonic(), trainer.tokens_seen
    last_save = started = time.monotonic()
    while trainer.elapsed < arguments.seconds and trainer.step_count < arguments.max_steps:
        begin = time.monotonic()
        losses.append(trainer.step(loader.next(device)))
        if trainer.step_count % arguments.log_every == 0 or trainer.step_count < 4:
            mean = torch.stack(losses).mean().item()  # host-sync: progress line
            now = time.monotonic()
            speed = (trainer.tokens_seen - window_tokens) / (now - window_start)
            print(
                f"step {trainer.step_count} loss {mean:.4f} tokens "
                f"{trainer.tokens_seen / 1e6:.0f}M speed {speed / 1e6:.2f}M/s "
                f"rate {trainer.rate():.3f} elapsed {trainer.elapsed:.0f}s shards "
                f"{loader.fresh_shards} fresh of "
                f"{loader.used_shards} queue {loader.ready.qsize()}",
                flush=True,
            )
            losses, window_start, window_tokens = [], now, trainer.tokens_seen
        if time.monotonic() - last_save > arguments.save_every:
            trainer.save(arguments.state)
            last_save = time.monotonic()
        trainer.elapsed += time.monotonic() - begin
    trainer.save(arguments.state)
    print(
        f"done: {trainer.step_count} steps, {trainer.tokens_seen} tokens, "
        f"{time.monotonic() - started:.0f} s in this run",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument(
        "--init", type=Path, help="checkpoint folder to start from instead of random weights"
    )
    parser.add_argument("--seconds", type=float, default=1080)
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--trained-share", type=float, default=0.28)
    parser.add_argument("--muon-rate", type=float, default=3e-3)
    parser.add_argument("--adam-rate", type=float, default=3e-3)
    parser.add_argument("--bias-rate", type=float, default=1e-3)
    parser.add_argument("--activation-fp8", action="store_true")
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--save-every", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
