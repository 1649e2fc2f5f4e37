"""Show on a CPU that the index learns which blocks to read.

    python -m nano.m3_toy --pairs 36 --block 8 --topk 3 --steps 600

A row has keys with values, then some of the keys, whose values are asked for. Training uses all
blocks first and selected blocks later, as for nano-m3. The dense layers see only a few tokens at
first, and later all tokens in half of the rows. The measurement uses all tokens in the dense
layers, with selected and with random blocks.
"""

from __future__ import annotations

import argparse
import dataclasses
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from nano import model, train
from nano.m3_model import Chooser, Layout, M3Config, M3Model
from nano.m3_train import CHOOSE_AFTER, MATRICES, WIDEN_AFTER, PackedAttention

RATE = 1e-2
WINDOW = 4
CONFIG = dataclasses.replace(
    M3Config(), hidden_size=64, num_hidden_layers=3, num_dense_layers=2, num_attention_heads=4,
    head_dim=32, rotary_dim=16, dense_intermediate_size=64, intermediate_size=32, index_dim=32,
    max_position_embeddings=512,
)  # fmt: skip


class Toy:
    """The model, its optimizers and the data: `pairs` keys with values, a third of them asked for
    again.
    """

    def __init__(
        self, *, pairs: int = 24, block: int = 4, topk: int = 3, vocab: int = 0, seed: int = 0
    ) -> None:
        torch.manual_seed(seed)
        self.pairs, self.asked = pairs, pairs // 3
        self.config = dataclasses.replace(
            CONFIG, vocab_size=vocab or 2 * pairs, block_size=block, topk_blocks=topk
        )
        self.net = M3Model(self.config)
        self.generator = torch.Generator().manual_seed(seed)
        named = dict(self.net.named_parameters())
        matrices = [p for name, p in named.items() if name.split(".")[-1] in MATRICES]
        taken = {id(p) for p in matrices}
        self.muon = train.Muon(matrices)
        self.adam = torch.optim.AdamW(
            [p for p in named.values() if id(p) not in taken], lr=RATE, betas=(0.9, 0.95)
        )
        self.use = model.precision(torch.float32, weights=False, activations=False)

    def draw(self, rows: int, generator: torch.Generator) -> Tensor:
        """int64 [rows, 2 * (pairs + asked)]: keys with values, then some of the keys with values
        again.
        """
        keys = torch.rand(rows, self.pairs, generator=generator).argsort(-1)
        values = self.pairs + torch.randint(self.pairs, (rows, self.pairs), generator=generator)
        pairs = torch.stack((keys, values), -1)
        asked = torch.rand(rows, self.pairs, generator=generator).argsort(-1)[:, : self.asked]
        again = pairs.gather(1, asked[..., None].expand(-1, -1, 2))
        return torch.cat((pairs, again), 1).flatten(1)

    def run(
        self, tokens: Tensor, mode: str, *, widened: float, teaches: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (logits at the asked keys, their values, loss of the index).

        `widened` is the share of rows whose dense layers see all tokens.
        """
        rows, size = tokens.shape
        window = torch.where(torch.arange(rows) < widened * rows, size, WINDOW).int()
        layout = Layout(
            torch.zeros(rows, size, dtype=torch.int32),
            torch.zeros(rows, size, dtype=torch.bool),
            window,
        )
        asked = torch.arange(2 * self.pairs, size, 2)
        sample = (asked.expand(rows, -1), torch.ones(rows, len(asked))) if teaches else None
        attend = PackedAttention(self.config, layout, Chooser(self.config, mode), None, sample)
        hidden, _ = self.net(tokens, attend, dtype=torch.float32, use=self.use)
        index = torch.stack(attend.index_losses).mean() if teaches else torch.zeros(())
        return self.net.logits(hidden[:, asked]), tokens[:, asked + 1], index

    def step(self, done: float, rate: float) -> tuple[float, float]:
        """Run one update at the share `done`; returns (loss of the values, of the index)."""
        mode = "all" if done < CHOOSE_AFTER else "index"
        widened = 0.0 if done < WIDEN_AFTER else 0.5
        tokens = self.draw(32, self.generator)
        logits, targets, index = self.run(tokens, mode, widened=widened, teaches=True)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        (loss + index).backward()
        for group in self.adam.param_groups:
            group["lr"] = RATE * rate
        self.adam.step()
        self.muon.step(RATE * rate)
        self.net.zero_grad(set_to_none=True)
        return loss.item(), index.item()

    def train(self, steps: int, *, report: int = 0) -> None:
        """Run `steps` updates and print a line after each `report` of them."""
        begun = time.monotonic()
        for step in range(steps):
            done = step / steps
            loss, index = self.step(done, min(1.0, (step + 1) / 20, (1 - done) / 0.3))
            if report and (step + 1) % report == 0:
                found = {name: round(self.accuracy(name), 3) for name in ("all", "index", "random")}
                print(
                    f"step {step + 1} loss {loss:.3f} index {index:.3f} {found} "
                    f"{time.monotonic() - begun:.0f} s",
                    flush=True,
                )

    @torch.no_grad()
    def accuracy(self, mode: str, seed: int = 10**6) -> float:
        """The share of correct values on new rows."""
        tokens = self.draw(64, torch.Generator().manual_seed(seed))
        logits, targets, _ = self.run(tokens, mode, widened=1.0, teaches=False)
        return float((logits.argmax(-1) == targets).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--pairs", type=int, default=36)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--topk", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    toy = Toy(pairs=options.pairs, block=options.block, topk=options.topk, seed=options.seed)
    toy.train(options.steps, report=50)


if __name__ == "__main__":
    main()
