"""Launch sizes of the kernels that exchange rows between ranks, and rules for their use."""

from dataclasses import dataclass

import torch

from negamax.kernels import platform

# From this number of rows on, two-shot sums are faster than one-shot sums (4 H200, 6 KB rows).
TWO_SHOT_ROWS = 16
# From this number of rows on, a rank normalizes only its shard of the rows. Estimate for 512 rows
# (4 H200, 6 KB rows, links at 380 GB/s): the scatter takes 6 us, norm and gather take 5 us, and two
# barriers take 6 us. Without sharding, the sum takes 23 us, and each rank normalizes all rows.
SHARD_ROWS = 512


@dataclass(frozen=True)
class ExchangeTiles:
    """Default launch sizes, which were not measured."""

    row_warps: int = 4  # number of warps of an all-reduce program, which sums one row
    push_warps: int = 4  # number of warps of a program that sends a row of partial sums
    shard_warps: int = 4  # number of warps of a program that normalizes a row of this rank
    gather_block: int = 1024  # number of 4-byte words that a program of an all-gather copies


_H200 = ExchangeTiles(row_warps=8, shard_warps=8)  # measured on H200 GPUs
_BY_ARCH = {"sm_90": _H200, "cpu": _H200}  # "cpu": Triton's interpreter


def tiles_for(device: torch.device) -> ExchangeTiles:
    return _BY_ARCH.get(platform.platform_of(device).arch, ExchangeTiles())


def two_shot(num_rows: int, *, world: int, words: int) -> bool:
    """Return whether each rank sums only a slice of each row (two-shot), not whole rows."""
    return world > 2 and num_rows >= TWO_SHOT_ROWS and words % (world * 64) == 0


def shards(num_rows: int) -> bool:
    """Return whether ranks shard the rows in all norms of a step with `num_rows` rows."""
    return num_rows >= SHARD_ROWS
