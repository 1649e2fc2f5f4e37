"""Train nano-m3 for a given time, in one run or several.

    python -m nano.m3_train --data DIR --state DIR --seconds 560 --total-seconds 840

`nano.m3_data --out` makes the shards at the same time. A run continues the state in --state. The
schedule follows the trained time as a share of --total-seconds. The state has weights and Adam's
moments in bfloat16, without Muon's momentum, in files of at most 15 MiB.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from nano import model, train
from nano.m3_model import (
    Chooser,
    Heads,
    Layout,
    M3Config,
    M3Model,
    _block_scores,
    dense_mask,
    index_loss,
    masked_attention,
)

WARMUP_STEPS = 200
STABLE_SHARE = 0.55  # share of the time at full rate; then the rate falls linearly to zero
WIDEN_AFTER = 0.40  # share of the time after which half of the rows have full reach
CHOOSE_AFTER = 0.50  # share of the time after which sparse layers use only selected blocks
# Both phases wait until the loss in documents of more than `FAR` tokens is below `LOOKS_UP`, or
# until the share `WAIT_UNTIL` of the time.
LOOKS_UP, WAIT_UNTIL = 0.10, 0.70
FAR = 2048
WINDOW = 512  # reach of the dense layers before they are widened
SAMPLES = 256  # queries per row that train the index
PART_BYTES = 15 << 20
MATRICES = ("q", "k", "v", "o", "w1", "w2", "w3", "index_q", "index_k")


@dataclass(frozen=True)
class Batch:
    tokens: Tensor  # int64 [B, S]
    layout: Layout
    inputs: Tensor  # int64 [K], flat positions whose next token is trained; padded with 0
    targets: Tensor  # int64 [K], the next token; -100 in padding
    is_far: Tensor  # bool [K], whether the document has more than `FAR` tokens
    sample: Tensor  # int64 [B, M], queries that train the index
    weight: Tensor  # float32 [B, M], 0 in padding


def pack(
    lengths: np.ndarray, rows: int, row_tokens: int, config: M3Config
) -> tuple[list[list[tuple[int, int]]], list[int]]:
    """Pack documents, the longest first. Documents with block selection start at a multiple of the
    block size. Return each row's list of (document, start), and the documents that fit in no row.
    """
    block, choice = config.block_size, config.block_size * config.topk_blocks
    used = [0] * rows
    placed: list[list[tuple[int, int]]] = [[] for _ in range(rows)]
    left: list[int] = []
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        for row in range(rows):
            start = -(-used[row] // block) * block if length > choice else used[row]
            if start + length <= row_tokens:
                placed[row].append((index, start))
                used[row] = start + length
                break
        else:
            left.append(index)
    return placed, left


def assemble(
    placed: list[list[tuple[int, int]]],
    shard: dict[str, np.ndarray],
    *,
    row_tokens: int,
    capacity: int,
    config: M3Config,
    random: np.random.Generator,
) -> dict[str, np.ndarray]:
    """Return the arrays of a batch. A gap after a document belongs to that document."""
    rows, choice = len(placed), config.block_size * config.topk_blocks
    starts = np.concatenate(([0], np.cumsum(shard["lengths"])))
    tokens = np.zeros((rows, row_tokens), dtype=np.int64)
    mask = np.zeros((rows, row_tokens), dtype=bool)
    documents = np.zeros((rows, row_tokens), dtype=np.int32)
    is_short = np.ones((rows, row_tokens), dtype=bool)
    can_teach = np.zeros((rows, row_tokens), dtype=bool)
    is_far = np.zeros((rows, row_tokens), dtype=bool)
    for row, members in enumerate(placed):
        for number, (member, at) in enumerate(members):
            begin, end = starts[member], starts[member + 1]
            size = end - begin
            tokens[row, at : at + size] = shard["tokens"][begin:end]
            mask[row, at : at + size] = shard["mask"][begin:end]
            documents[row, at:] = number
            is_short[row, at:] = size <= choice
            is_far[row, at:] = size > FAR
            can_teach[row, at:] = False
            can_teach[row, at + choice : at + size] = True
    # No document starts with a trained token.
    trained = np.flatnonzero(mask.reshape(-1))[:capacity]
    inputs, targets = np.zeros(capacity, dtype=np.int64), np.full(capacity, -100, dtype=np.int64)
    inputs[: len(trained)] = trained - 1
    targets[: len(trained)] = tokens.reshape(-1)[trained]
    far = np.zeros(capacity, dtype=bool)
    far[: len(trained)] = is_far.reshape(-1)[trained]
    sample = np.zeros((rows, SAMPLES), dtype=np.int64)
    weight = np.zeros((rows, SAMPLES), dtype=np.float32)
    before_trained = np.roll(mask, -1, axis=1) & can_teach
    for row in range(rows):
        # Half of the sampled queries are at the start of an answer.
        spots = random.permutation(np.flatnonzero(before_trained[row]))[: SAMPLES // 2]
        others = random.permutation(np.flatnonzero(can_teach[row]))[: SAMPLES - len(spots)]
        found = np.concatenate((spots, others))
        sample[row, : len(found)], weight[row, : len(found)] = found, 1.0
    return {
        "tokens": tokens, "documents": documents, "is_short": is_short, "inputs": inputs,
        "targets": targets, "is_far": far, "sample": sample, "weight": weight,
    }  # fmt: skip


class Loader(train.Loader):
    """Load shards like nano's loader, and pack the documents for block selection."""

    def __init__(self, folder: Path, config: M3Config, **sizes: int) -> None:
        self.config = config
        super().__init__(folder, **sizes)

    def _fill(self) -> None:
        for shard in self._shards():
            order = self.random.permutation(np.flatnonzero(shard["lengths"] <= self.row_tokens))
            while len(order):
                taken = np.cumsum(shard["lengths"][order]) <= 1.04 * self.rows * self.row_tokens
                if taken.all():
                    break
                some, rest = order[taken], order[~taken]
                placed, left = pack(shard["lengths"][some], self.rows, self.row_tokens, self.config)
                self.ready.put(
                    assemble(
                        [[(int(some[index]), at) for index, at in row] for row in placed],
                        shard,
                        row_tokens=self.row_tokens,
                        capacity=self.capacity,
                        config=self.config,
                        random=self.random,
                    )
                )
                order = np.concatenate((some[left], rest))

    def take(self, device: torch.device, *, widened: bool) -> Batch:
        """Return the next batch on the device. If `widened`, half of the rows have full reach."""
        arrays = self.ready.get()
        rows = arrays["tokens"].shape[0]
        windows = np.full(rows, WINDOW, dtype=np.int32)
        if widened:
            windows[self.random.random(rows) < 0.5] = self.row_tokens
        return batch_of(arrays, windows, device)


def batch_of(arrays: dict[str, np.ndarray], windows: np.ndarray, device: torch.device) -> Batch:
    """Move the arrays of a batch to the device."""

    def move(array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        if device.type == "cuda":
            return tensor.pin_memory().to(device, non_blocking=True)
        return tensor

    layout = Layout(move(arrays["documents"]), move(arrays["is_short"]), move(windows))
    names = ("inputs", "targets", "is_far", "sample", "weight")
    return Batch(move(arrays["tokens"]), layout, *(move(arrays[name]) for name in names))


def tile_mask(need: Tensor, block: int, allows: Callable[..., Tensor]) -> BlockMask:
    """Make a mask for flex attention.

    `need` bool [B, heads or 1, query tiles, key tiles] limits where `allows` is evaluated.
    """
    order = torch.argsort(need.int(), dim=-1, descending=True, stable=True).int()
    return BlockMask.from_kv_blocks(need.sum(-1).int(), order, BLOCK_SIZE=block, mask_mod=allows)


class PackedAttention:
    """Run the attention of all layers for one batch, by flex attention or by explicit masks.

    Explicit masks need no compilation. `index_losses` has one entry per sparse layer.
    """

    def __init__(
        self,
        config: M3Config,
        layout: Layout,
        chooser: Chooser,
        tools: Compiled | None,
        sample: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.config, self.layout, self.chooser, self.tools = config, layout, chooser, tools
        self.sample = sample
        self.index_losses: list[Tensor] = []
        self.dense = self._document_mask(windowed=True)
        self.full = self._document_mask(windowed=False)

    def __call__(self, index: int, heads: Heads) -> Tensor:
        if heads.index_q is None:
            return self._attend(heads, self.dense)
        if self.sample is not None:
            loss = self.tools.index_loss if self.tools is not None else index_loss
            documents, block = self.layout.documents, self.config.block_size
            self.index_losses.append(
                loss(heads.q, heads.k, heads.index_q, heads.index_k, documents, *self.sample, block)
            )
        if self.chooser.mode == "all":
            return self._attend(heads, self.full)
        return self._attend(heads, self._chosen_mask(self.chooser.choose(heads, self.layout)))

    def _attend(self, heads: Heads, mask: Any) -> Tensor:
        if self.tools is None:
            return masked_attention(heads, mask)
        mixed: Tensor = self.tools.flex(heads.q, heads.k, heads.v, block_mask=mask, enable_gqa=True)
        return mixed

    def _tiles(self) -> Tensor:
        """Return bool [B, 1, tiles, tiles]: whether a key and a query tile share a document."""
        tiles = self.layout.documents.unflatten(-1, (-1, self.config.block_size))
        first, last = tiles[..., 0], tiles[..., -1]
        at = torch.arange(first.shape[1], device=first.device)
        shared = last[:, None, :] >= first[:, :, None]  # documents ascend
        return (shared & (at[:, None] >= at))[:, None]

    def _document_mask(self, *, windowed: bool) -> Any:
        if self.tools is None:
            return dense_mask(self.layout, windowed=windowed)
        documents, window = self.layout.documents, self.layout.window
        need, block = self._tiles(), self.config.block_size

        def same_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (documents[b, q] == documents[b, k])

        if not windowed:
            return tile_mask(need, block, same_document)

        def within_window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return same_document(b, h, q, k) & (q - k < window[b])

        at = torch.arange(need.shape[-1], device=need.device) * block
        nearest = at[:, None] - at - (block - 1)  # smallest distance between two tiles
        return tile_mask(need & (nearest < window[:, None, None, None]), block, within_window)

    def _chosen_mask(self, chosen: Tensor) -> Any:
        block = self.config.block_size
        if self.tools is None:
            return self.full & chosen.repeat_interleave(block, -1)
        documents, blocks = self.layout.documents, chosen.shape[-1]
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        need = chosen.unflatten(2, (-1, block)).any(3) & self._tiles()
        # Each block is one bit, so that a query loads its selection once.
        bits = torch.ones((), dtype=torch.int64, device=chosen.device) << torch.arange(
            blocks, device=chosen.device
        )
        words = (chosen * bits).sum(-1)

        def is_chosen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            visible = (q >= k) & (documents[b, q] == documents[b, k])
            return visible & (((words[b, h // group, q] >> (k // block)) & 1) == 1)

        return tile_mask(need.repeat_interleave(group, 1), block, is_chosen)


class Compiled:
    def __init__(self) -> None:
        self.flex: Any = torch.compile(flex_attention, dynamic=False)
        self.index_loss: Any = torch.compile(index_loss, dynamic=False)
        self.block_scores: Any = torch.compile(_block_scores, dynamic=False)


class Trainer:
    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self.arguments, self.device, self.config = arguments, device, M3Config()
        torch.manual_seed(arguments.seed)
        self.model = M3Model(self.config).to(device)
        matrices = [
            p for name, p in self.model.named_parameters() if name.split(".")[-1] in MATRICES
        ]
        taken = {id(p) for p in matrices}
        self.rest = {n: p for n, p in self.model.named_parameters() if id(p) not in taken}
        self.muon = train.Muon(matrices)
        self.adam = torch.optim.AdamW(
            list(self.rest.values()), lr=arguments.adam_rate, betas=(0.9, 0.95), eps=1e-10,
            weight_decay=0.0, fused=device.type == "cuda",
        )  # fmt: skip
        self.use = model.precision(
            torch.bfloat16, weights=True, activations=arguments.activation_fp8
        )
        can_compile = device.type == "cuda" and not arguments.eager
        self.tools = Compiled() if can_compile else None
        if self.tools is not None:
            self.model.compile()
        self.step_count, self.tokens_seen, self.elapsed = 0, 0, 0.0
        self.steps_here = 0
        self.looks_up = False  # whether the sparse layers already retrieve distant text

    def progress(self) -> float:
        """Return the elapsed share of the schedule, 0 to 1."""
        return min(self.elapsed / self.arguments.total_seconds, 1.0)

    def is_past(self, share: float) -> bool:
        """Return whether the phase that starts at this share of the time has begun."""
        return self.progress() >= (share if self.looks_up else max(share, WAIT_UNTIL))

    def rate(self) -> float:
        """Return the learning rate's factor: a warm-up after each start, then a decay by time."""
        decay = min((1 - self.progress()) / (1 - STABLE_SHARE), 1.0)
        steps = WARMUP_STEPS if self.step_count == self.steps_here else WARMUP_STEPS // 4
        return float(min(decay, (self.steps_here + 1) / steps))

    def step(self, batch: Batch) -> Tensor:
        """Run one update. Return losses [3]: of all text, of long documents, and of the index."""
        chooser = Chooser(self.config, "index" if self.is_past(CHOOSE_AFTER) else "all")
        if self.tools is not None:
            chooser.scores = self.tools.block_scores
        sample = (batch.sample, batch.weight)
        attend = PackedAttention(self.config, batch.layout, chooser, self.tools, sample)
        hidden, loads = self.model(batch.tokens, attend, dtype=torch.bfloat16, use=self.use)
        logits = self.model.logits(hidden.flatten(0, 1)[batch.inputs])
        each = F.cross_entropy(logits.float(), batch.targets, ignore_index=-100, reduction="none")
        text = each.sum() / (batch.targets >= 0).sum()
        index = torch.stack(attend.index_losses).mean()
        (text + index).backward()  # The two losses share no parameter.
        rate = self.rate()
        for group in self.adam.param_groups:
            group["lr"] = self.arguments.adam_rate * rate
        torch.nn.utils.clip_grad_norm_(list(self.rest.values()), 1.0)
        self.adam.step()
        self.muon.step(self.arguments.muon_rate * rate)
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for layer, load in zip(self.model.layers, loads, strict=True):
                if layer.is_sparse:
                    layer.expert_bias += (
                        self.arguments.bias_rate * rate * torch.sign(load.mean() - load)
                    )
        self.step_count += 1
        self.steps_here += 1
        self.tokens_seen += batch.tokens.numel()
        far = (each * batch.is_far).sum() / batch.is_far.sum().clamp(min=1)
        return torch.stack((text, far, index)).detach()

    def save(self, folder: Path) -> None:
        """Write the state in files of at most `PART_BYTES`.

        The counters are written last, so that a partial state is detected.
        """
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for name, parameter in self.rest.items():
            for key in ("exp_avg", "exp_avg_sq"):
                if parameter in self.adam.state:
                    tensors[f"{key}.{name}"] = self.adam.state[parameter][key]
        parts: list[dict[str, Tensor]] = [{}]
        room = PART_BYTES
        for name, tensor in tensors.items():
            kept = tensor.bfloat16() if tensor.dim() > 1 and not name.endswith("gate") else tensor
            size = kept.numel() * kept.element_size()
            if size > room:
                parts.append({})
                room = PART_BYTES
            parts[-1][name] = kept.detach().cpu().contiguous()
            room -= size
        counts = [self.step_count, self.tokens_seen, self.elapsed]
        parts[-1]["counts"] = torch.tensor(counts, dtype=torch.float64)
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("part-*.safetensors"):
            path.unlink()
        for number, part in enumerate(parts):
            save_file(part, folder / f"part-{number}.safetensors")

    def resume(self, folder: Path) -> None:
        """Load a state that `save` wrote."""
        tensors = load_state(folder)
        state = {n[6:]: t.float() for n, t in tensors.items() if n.startswith("model.")}
        self.model.load_state_dict(state)
        for name, parameter in self.rest.items():
            if f"exp_avg.{name}" in tensors:
                self.adam.state[parameter] = {
                    "step": torch.tensor(1e4, device=self.device),
                    **{
                        key: tensors[f"{key}.{name}"].float().to(self.device)
                        for key in ("exp_avg", "exp_avg_sq")
                    },
                }
        steps, tokens, self.elapsed = tensors["counts"].tolist()
        self.step_count, self.tokens_seen = int(steps), int(tokens)


def load_state(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a state. Raises `SystemExit` if the state is partial."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("part-*.safetensors")):
        tensors |= load_file(path)
    if "counts" not in tensors:
        raise SystemExit(f"{folder} holds a partial state; its last part is missing")
    return tensors


def run(arguments: argparse.Namespace) -> None:
    begun = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(arguments, device)
    if (arguments.state / "part-0.safetensors").exists():
        trainer.resume(arguments.state)
        print(f"continuing at step {trainer.step_count}, {trainer.elapsed:.0f} s", flush=True)
    loader = Loader(
        arguments.data,
        trainer.config,
        rows=arguments.rows,
        row_tokens=arguments.row_tokens,
        capacity=int(arguments.rows * arguments.row_tokens * arguments.trained_share),
        seed=arguments.seed + trainer.step_count,
    )
    losses: list[Tensor] = []
    printed, tokens = time.monotonic(), trainer.tokens_seen
    saved = printed
    while (
        time.monotonic() - begun < arguments.seconds
        and trainer.progress() < 1
        and trainer.step_count < arguments.max_steps
    ):
        begin = time.monotonic()
        batch = loader.take(device, widened=trainer.is_past(WIDEN_AFTER))
        losses.append(trainer.step(batch))
        if trainer.step_count % arguments.log_every == 0 or trainer.steps_here < 4:
            text, far, index = torch.stack(losses).mean(0).tolist()  # host-sync: progress line
            trainer.looks_up |= 0 < far < LOOKS_UP
            now = time.monotonic()
            print(
                f"step {trainer.step_count} loss {text:.4f} far {far:.4f} index {index:.4f} tokens "
                f"{trainer.tokens_seen / 1e6:.0f}M speed "
                f"{(trainer.tokens_seen - tokens) / (now - printed) / 1e6:.2f}M/s "
                f"rate {trainer.rate():.3f} done {trainer.progress():.2f} shards "
                f"{loader.fresh_shards} fresh of {loader.used_shards} queue "
                f"{loader.ready.qsize()}",
                flush=True,
            )
            losses, printed, tokens = [], now, trainer.tokens_seen
        if time.monotonic() - saved > arguments.save_every:
            trainer.save(arguments.state)
            saved = time.monotonic()
        # The schedule does not count compilation.
        if trainer.steps_here > 3:
            trainer.elapsed += time.monotonic() - begin
    trainer.save(arguments.state)
    print(
        f"done: {trainer.step_count} steps, {trainer.tokens_seen} tokens, "
        f"{time.monotonic() - begun:.0f} s in this run, {trainer.progress():.1%} of the schedule",
        flush=True,
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--state", type=Path, required=True, help="folder; continued if it exists")
    options.add_argument(
        "--total-seconds", type=float, default=780, help="of the schedule, over all runs"
    )
    options.add_argument("--rows", type=int, default=12)
    options.add_argument("--row-tokens", type=int, default=8192)
    options.add_argument(
        "--eager", action="store_true", help="compile nothing; with 4 rows, a fifth of the speed"
    )
    options.add_argument("--trained-share", type=float, default=0.22)
    options.add_argument("--muon-rate", type=float, default=3e-3)
    options.add_argument("--adam-rate", type=float, default=3e-3)
    options.add_argument("--bias-rate", type=float, default=1e-3)
    options.add_argument("--activation-fp8", action="store_true")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--data", type=Path, required=True)
    options.add_argument(
        "--seconds", type=float, default=540, help="of this run, compilation included"
    )
    options.add_argument("--max-steps", type=int, default=10**9)
    options.add_argument("--log-every", type=int, default=100)
    options.add_argument("--save-every", type=float, default=120)
    run(options.parse_args())


if __name__ == "__main__":
    main()
