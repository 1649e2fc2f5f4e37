"""Train a draft for nano or nano-m3 for a given time and write it as an EAGLE3 folder.

    python -m nano.draft_train --data DIR --out DIR --seconds 500 [--target nano-m3]

`nano.data --out` or `nano.m3_data --out` makes the shards at the same time. The target is the
frozen shipped checkpoint with its FP8 rounding. The loss is the cross-entropy with the target's
distribution, renormalized over the draft's vocabulary. The loss covers trained tokens whose best
token is in that vocabulary. Each step has 0.8 of the weight of the step before.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from nano.draft_model import LAYERS, DraftConfig, DraftModel, attend_with
from nano.draft_targets import NanoM3Target, NanoTarget, Target
from nano.train import Batch

DECAY = 0.8
WARMUP_STEPS = 100
BATCH_TOKENS = 98_304
ASSETS = Path(__file__).resolve().parents[1] / "negamax" / "assets"
TARGETS = {"nano": NanoTarget, "nano-m3": NanoM3Target}
MARKERS = 4096  # first id of MiniMax's markers


def choose_vocabulary(shards: list[dict[str, np.ndarray]], size: int, vocab_size: int) -> Tensor:
    """Return the `size` most frequent trained tokens, including all markers, in ascending order."""
    written = np.concatenate([shard["tokens"][shard["mask"].astype(bool)] for shard in shards])
    counts = np.bincount(written, minlength=vocab_size).astype(np.int64)
    counts[MARKERS:][counts[MARKERS:] > 0] += counts.max()
    best = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(best))


class Trainer:
    def __init__(
        self, target: Target, draft: DraftModel, vocabulary: Tensor, *, shape: tuple[int, int],
        rate: float,
    ) -> None:  # fmt: skip
        self.device = vocabulary.device
        self.target, self.draft, self.ids = target, draft, vocabulary
        self.head = target.head.detach()
        self.is_gpu = self.device.type == "cuda"
        self.known = torch.zeros(
            target.vocab_size, dtype=torch.bool, device=self.device
        ).index_fill_(0, vocabulary, True)
        self.adam = torch.optim.AdamW(
            draft.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=self.is_gpu
        )
        self.full_rate, self.num_steps, self.num_tokens = rate, 0, 0
        self.positions = torch.arange(shape[1], device=self.device)
        self.documents = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.make_mask = torch.compile(create_block_mask) if self.is_gpu else create_block_mask
        self.loss = torch.compile(self._loss) if self.is_gpu else self._loss

    def step(self, batch: Batch, done: float) -> Tensor:
        """Run one optimizer step when the share `done` of the time has passed.

        Return the loss and, for each of STEPS, the share of accepted tokens, [1 + STEPS] on the
        device.
        """
        self.documents.copy_(batch.documents)
        mask = self._mask()
        states = self.target.states(batch, mask)
        loss, right = self.loss(*states, batch.inputs, batch.targets, mask)
        loss.backward()
        warm = min(1.0, (self.num_steps + 1) / WARMUP_STEPS)
        for group in self.adam.param_groups:
            group["lr"] = self.full_rate * warm * (1.0 - done)
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 0.5)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.num_steps += 1
        self.num_tokens += batch.tokens.numel()
        return torch.cat([loss.detach()[None], right])

    def _loss(
        self, streams: Tensor, hidden: Tensor, embeddings: Tensor, inputs: Tensor, targets: Tensor,
        mask: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        with torch.no_grad():
            logits = F.linear(hidden.flatten(0, 1)[inputs], self.head.to(hidden.dtype)).float()
            best, wanted = logits.argmax(-1), logits[:, self.ids].log_softmax(-1)
            documents, places = self.documents.flatten(), inputs % hidden.shape[1]
        steps = self.draft(streams, embeddings, self.positions, attend_with(mask))
        loss, right = torch.zeros((), device=self.device), []
        for step, out in enumerate(steps):
            # Row t - 1 - step proposes token t + 1.
            row = (inputs - 1 - step).clamp_min(0)
            there = (targets != -100) & (places > step)
            there &= documents[row] == documents[inputs]
            logits = self.draft.logits(out.flatten(0, 1)[row]).float()
            each = -(wanted.exp() * logits.log_softmax(-1)).sum(-1)
            counted = there & self.known[best]
            loss = loss + DECAY**step * (each * counted).sum() / counted.sum().clamp_min(1)
            hit = there & (self.ids[logits.argmax(-1)] == best)
            right.append(hit.sum() / there.sum().clamp_min(1))
        return loss, torch.stack(right)

    def _mask(self) -> Any:
        documents = self.documents
        rows, size = documents.shape
        if not self.is_gpu:
            same = documents[:, :, None] == documents[:, None, :]
            return (same & torch.ones(size, size, dtype=torch.bool).tril())[:, None]

        def same_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (documents[b, q] == documents[b, k])

        return self.make_mask(same_document, rows, None, size, size, device=self.device)


def write(
    draft: DraftModel,
    vocabulary: Tensor,
    folder: Path,
    *,
    layers: tuple[int, ...],
    vocab_size: int,
    window: int,
    target_type: str,
) -> None:
    """Write an EAGLE3 folder in SpecForge's layout."""
    config, size = draft.config, len(vocabulary)
    names = {
        "fc": "fc", "norm": "norm", "head": "lm_head", "input_norm": "midlayer.input_layernorm",
        "hidden_norm": "midlayer.hidden_norm", "post_norm": "midlayer.post_attention_layernorm",
        **{part: f"midlayer.self_attn.{part}_proj" for part in ("q", "k", "v", "o")},
        **{part: f"midlayer.mlp.{part}_proj" for part in ("gate", "up", "down")},
    }  # fmt: skip
    tensors = {
        f"{name}.weight": getattr(draft, own).detach().to("cpu", torch.bfloat16).contiguous()
        for own, name in names.items()
    }
    ids = vocabulary.cpu()
    tensors["d2t"] = ids - torch.arange(size)
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)
    described = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": window,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "target_model_type": target_type,
        "vocab_size": vocab_size,
        "draft_vocab_size": size,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers],
            "use_aux_hidden_state": True,
        },
    }
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")


def first_shards(folder: Path, count: int) -> list[dict[str, np.ndarray]]:
    """Wait for the first shards in `folder`, and return their arrays."""
    while len(paths := sorted(folder.glob("*.npz"))) < count:
        time.sleep(0.2)
    shards = []
    for path in paths[:count]:
        with np.load(path) as file:
            shards.append({name: file[name] for name in file.files})
    return shards


def run(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = TARGETS[arguments.target].load(ASSETS / arguments.target, device)
    config = DraftConfig(draft_vocab_size=arguments.draft_vocab_size)
    shards = first_shards(arguments.data, arguments.vocab_shards)
    ids = choose_vocabulary(shards, config.draft_vocab_size, target.vocab_size).to(device)
    draft = DraftModel(config).to(device)
    with torch.no_grad():  # A hidden state similar to the target's is a good start.
        draft.head.copy_(target.head[ids])
        draft.norm.copy_(target.norm)
    row_tokens = arguments.row_tokens or target.window
    rows = arguments.rows or max(1, BATCH_TOKENS // row_tokens)
    trainer = Trainer(target, draft, ids, shape=(rows, row_tokens), rate=arguments.rate)
    batches = target.batches(
        arguments.data, rows=rows, row_tokens=row_tokens, seed=arguments.seed,
        capacity=int(rows * row_tokens * arguments.trained_share),
    )  # fmt: skip
    began, window = time.monotonic(), list[Tensor]()
    while (elapsed := time.monotonic() - began) < arguments.seconds:
        window.append(trainer.step(next(batches), elapsed / arguments.seconds))
        if trainer.num_steps % arguments.log_every == 0:
            loss, *right = torch.stack(window).mean(0).tolist()  # host-sync: progress line
            shares = " ".join(f"{share:.4f}" for share in right)
            print(
                f"step {trainer.num_steps} loss {loss:.4f} right {shares} tokens "
                f"{trainer.num_tokens / 1e6:.1f}M elapsed {elapsed:.0f}s",
                flush=True,
            )
            window = []
    described = json.loads((ASSETS / arguments.target / "config.json").read_text())
    write(
        trainer.draft, ids, arguments.out, layers=LAYERS, vocab_size=target.vocab_size,
        window=target.window, target_type=described["model_type"],
    )  # fmt: skip
    print(f"done: {trainer.num_steps} steps, {trainer.num_tokens} tokens, {arguments.out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", choices=TARGETS, default="nano")
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--rows", type=int, help="default: as many as make 98,304 tokens")
    parser.add_argument("--row-tokens", type=int, help="default: the target's window")
    parser.add_argument("--trained-share", type=float, default=0.3)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--draft-vocab-size", type=int, default=1024)
    parser.add_argument("--vocab-shards", type=int, default=4)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
