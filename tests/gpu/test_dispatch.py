"""Check that dispatch of tokens to other GPUs' experts and back is bit-exact.

`python3 tests/gpu/test_dispatch.py [file.json]` prints microseconds beside those of NCCL.
"""

import json
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import torch
from test_collectives import (
    EXPERTS,
    HIDDEN,
    MAX_TOKENS,
    TOP_K,
    capture,
    microseconds,
    num_ranks,
    several,
    show,
    spawn,
)
from torch import Tensor

from negamax.kernels.peers import Collective
from negamax.parallel.context import ParallelContext

ROWS = (1, 16, 64, 100, 128)  # rows of each rank
STEPS = 200


class Batch:
    """Hold the tokens of all ranks, equal on each rank. Ranks have different numbers of tokens."""

    def __init__(
        self, num_rows: int, group: Collective, device: torch.device, *, seed: int
    ) -> None:
        from negamax.kernels.dispatch.op import ExpertRanges

        self.group, self.num_rows, world = group, num_rows, group.size
        generator = torch.Generator(device).manual_seed(seed)
        count = EXPERTS // world
        firsts = torch.arange(0, EXPERTS, count, dtype=torch.int32, device=device)
        self.experts = ExpertRanges(firsts, count)
        draw = partial(torch.randn, generator=generator, device=device)
        self.all_ids = draw(world, num_rows, EXPERTS).topk(TOP_K).indices.to(torch.int32)
        for rank in range(1, world):
            self.all_ids[rank, num_rows - rank * num_rows // 8 :] = -1
        self.num_own = int((self.all_ids[group.rank, :, 0] >= 0).sum())
        self.columns = [
            draw(world, num_rows, TOP_K),
            draw(world, num_rows, HIDDEN).to(torch.float8_e4m3fn),
            draw(world, num_rows, HIDDEN // 128),
        ]
        # outputs of the experts of every rank for every row
        self.made = draw(world, world * num_rows, HIDDEN).bfloat16() * self.held().unsqueeze(-1)
        self.out = self.made[group.rank].contiguous()

    def held(self) -> Tensor:
        """Return whether rank r's experts are selected for row t: [ranks, ranks * num_rows]."""
        ids, first = self.all_ids.flatten(0, 1)[None], self.experts.firsts[:, None, None]
        return (ids.ge(first) & ids.lt(first + self.experts.count)).any(-1)

    def sent(self) -> tuple[Tensor, list[Tensor]]:
        ids, *columns = (
            each[self.group.rank, : self.num_own].contiguous()
            for each in (self.all_ids, *self.columns)
        )
        return ids, columns

    def __call__(self, kernels: Any) -> tuple[Tensor, list[Tensor], Tensor]:
        ids, columns = self.sent()
        shared = {"experts": self.experts, "group": self.group}
        all_ids, received = kernels.dispatch(ids, columns, num_rows=self.num_rows, **shared)
        return all_ids, received, kernels.combine(self.out, all_ids, **shared)

    def differences(self, found: tuple[Tensor, list[Tensor], Tensor]) -> Tensor:
        ids, received, sums = found
        mine = self.held()[self.group.rank][:, None]
        counts = [(ids != self.all_ids.flatten(0, 1)).sum()]
        for got, want in zip(received, self.columns, strict=True):
            differs = got.view(torch.uint8) != want.flatten(0, 1).view(torch.uint8)
            counts.append((differs & mine).sum())
        own = slice(self.group.rank * self.num_rows, (self.group.rank + 1) * self.num_rows)
        total = torch.zeros(self.num_rows, HIDDEN, device=sums.device)
        for part in self.made[:, own]:
            total += part.float()
        return torch.stack([*counts, (sums != total.bfloat16()).sum()])


def wrong(context: ParallelContext, device: torch.device) -> dict[str, list[int]]:
    from negamax.kernels.dispatch import triton as kernels

    group = context.data_group
    assert group.peers is not None and group.peers.tokens is not None
    batches = {rows: Batch(rows, group, device, seed=rows) for rows in (1, 5, 64, 128)}
    found = {rows: batch.differences(batch(kernels)) for rows, batch in batches.items()}

    def add(*sizes: int) -> None:
        for rows in sizes:
            found[rows].add_(batches[rows].differences(batches[rows](kernels)))

    graphs = [capture(partial(add, 1, 64, 5)), capture(partial(add, 128, 1))]
    for step in range(STEPS):
        graphs[step % 3 % 2].replay()
        if step % 10 == 0:
            add(64)
    return {f"T={rows}": counts.tolist() for rows, counts in found.items()}


def times(context: ParallelContext, device: torch.device) -> dict[str, dict[str, float]]:
    """Return microseconds of dispatch and combine in a graph; for many rows also bandwidths."""
    from negamax.kernels.dispatch import op as spec
    from negamax.kernels.dispatch import triton as kernels

    group, found = context.data_group, {}
    for rows in ROWS:
        batch = Batch(rows, group, device, seed=rows)
        found[f"T={rows}"] = {
            name: microseconds(lambda how=how, batch=batch: batch(how), context)
            for name, how in (("one launch each", kernels), ("NCCL", spec))
        }
    row_bytes = HIDDEN + 4 * HIDDEN // 128 + 8 * TOP_K
    sent = torch.zeros(MAX_TOKENS, row_bytes, dtype=torch.uint8, device=device)
    made = torch.zeros(group.size * MAX_TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)
    peer = torch.empty_like(made, device=torch.device("cuda", (device.index + 1) % group.size))
    others = group.size - 1
    for name, call, num_bytes in (
        ("gather", lambda: group.all_gather(sent, dim=0), others * sent.numel()),
        ("sum", lambda: group.reduce_scatter(made), others * made.nbytes // group.size),
        ("copy", lambda: peer.copy_(made), made.nbytes),
    ):
        # A copy between devices cannot be captured.
        taken = microseconds(call, context, repeats=5, is_captured=name != "copy")
        found[f"{name} T={MAX_TOKENS}"] = {"us": taken, "GB/s": num_bytes / taken / 1000}
    return found


@cache
def findings() -> list[dict[str, Any]]:
    return spawn({"wrong": wrong, "times": times}, dp=num_ranks(), ep=num_ranks())


@several
def test_rows_come_to_the_experts_and_sums_back_bit_for_bit() -> None:
    for found in findings():
        assert {label: counts for label, counts in found["wrong"].items() if any(counts)} == {}


@several
def test_times() -> None:
    show([rank["times"] for rank in findings()])


if __name__ == "__main__":
    show([rank["times"] for rank in findings()])
    print([rank["wrong"] for rank in findings()])
    for file in sys.argv[1:]:
        Path(file).write_text(json.dumps(findings(), indent=1))
