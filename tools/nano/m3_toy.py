"""A small proof, on a CPU, that the index learns which blocks to read.

    python tools/nano/m3_toy.py --steps 600

Rows of keys and values, then keys whose values are asked for. The dense layer sees a few tokens
only, so that what is far away can come through chosen blocks alone. Trained as nano-m3 is: first
with all blocks, then with chosen ones; measured with chosen and with random blocks.
"""

from __future__ import annotations

import argparse
import dataclasses
import time

import model
import torch
import torch.nn.functional as F
import train
from m3_model import Chooser, Layout, M3Config, M3Model
from m3_train import MATRICES, PackedAttention
from torch import Tensor

KEYS, VALUES, PAIRS, ASKED = 24, 24, 24, 8
SIZE = 2 * PAIRS + 2 * ASKED
CONFIG = dataclasses.replace(
    M3Config(), vocab_size=KEYS + VALUES, hidden_size=64, num_hidden_layers=3, num_dense_layers=1,
    num_attention_heads=4, head_dim=32, rotary_dim=16, dense_intermediate_size=64,
    intermediate_size=32, index_dim=32, block_size=4, topk_blocks=3,
)  # fmt: skip
RATE = 1e-2


def draw(rows: int, generator: torch.Generator) -> Tensor:
    """int64 [rows, SIZE]: pairs of key and value, then some of the pairs again."""
    keys = torch.rand(rows, KEYS, generator=generator).argsort(-1)[:, :PAIRS]
    values = KEYS + torch.randint(VALUES, (rows, PAIRS), generator=generator)
    pairs = torch.stack((keys, values), -1)
    asked = torch.rand(rows, PAIRS, generator=generator).argsort(-1)[:, :ASKED]
    again = pairs.gather(1, asked[..., None].expand(-1, -1, 2))
    return torch.cat((pairs, again), 1).flatten(1)


class Toy:
    """The model, its optimizers and the data. Written by `step` only."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = M3Model(CONFIG)
        self.generator = torch.Generator().manual_seed(seed)
        named = dict(self.net.named_parameters())
        matrices = [p for name, p in named.items() if name.split(".")[-1] in MATRICES]
        taken = {id(p) for p in matrices}
        self.muon = train.Muon(matrices)
        self.adam = torch.optim.AdamW(
            [p for p in named.values() if id(p) not in taken], lr=RATE, betas=(0.9, 0.95)
        )
        self.use = model.precision(torch.float32, weights=False, activations=False)

    def run(self, tokens: Tensor, mode: str, *, teaches: bool) -> tuple[Tensor, Tensor, Tensor]:
        """-> (logits at the asked keys, their values, loss of the index)."""
        rows = len(tokens)
        layout = Layout(
            torch.zeros(rows, SIZE, dtype=torch.int32),
            torch.zeros(rows, SIZE, dtype=torch.bool),
            torch.full((rows,), 4, dtype=torch.int32),
        )
        asked = torch.arange(2 * PAIRS, SIZE, 2)
        sample = (asked.expand(rows, -1), torch.ones(rows, ASKED)) if teaches else None
        attend = PackedAttention(CONFIG, layout, Chooser(CONFIG, mode), None, sample)
        hidden, _ = self.net(tokens, attend, dtype=torch.float32, use=self.use)
        index = torch.stack(attend.index_losses).mean() if teaches else torch.zeros(())
        return self.net.logits(hidden[:, asked]), tokens[:, asked + 1], index

    def step(self, mode: str, rate: float) -> tuple[float, float]:
        """One update -> (loss of the values, loss of the index)."""
        logits, targets, index = self.run(draw(32, self.generator), mode, teaches=True)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        (loss + index).backward()
        for group in self.adam.param_groups:
            group["lr"] = RATE * rate
        self.adam.step()
        self.muon.step(RATE * rate)
        self.net.zero_grad(set_to_none=True)
        return loss.item(), index.item()

    @torch.no_grad()
    def accuracy(self, mode: str, seed: int = 10**6) -> float:
        """Share of the asked values that are right, on rows that training did not see."""
        tokens = draw(64, torch.Generator().manual_seed(seed))
        logits, targets, _ = self.run(tokens, mode, teaches=False)
        return float((logits.argmax(-1) == targets).float().mean())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    toy, begun = Toy(arguments.seed), time.monotonic()
    for step in range(arguments.steps):
        mode = "all" if step < 0.6 * arguments.steps else "index"
        done = step / arguments.steps
        loss, index = toy.step(mode, min(1.0, (step + 1) / 20, (1 - done) / 0.3))
        if step % 50 == 49:
            found = {name: round(toy.accuracy(name), 3) for name in ("all", "index", "random")}
            seconds = time.monotonic() - begun
            losses = f"loss {loss:.3f} index {index:.3f}"
            print(f"step {step + 1} {mode} {losses} {found} {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
