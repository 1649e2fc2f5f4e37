"""Launch sizes of the kernels that exchange rows with other ranks, and which of them run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from negamax.kernels import platform

# From here on the links' bandwidth outweighs the second exchange (4 H200, 6 KB rows).
TWO_SHOT_ROWS = 16
# From here on every rank normalises its shard of the rows only. By arithmetic (4 H200, 6 KB rows,
# links at 380 GB/s): 512 rows take 6 us to scatter, 5 to normalise and gather, 6 for two barriers;
# summed on all ranks, 23 us, and the norm of all rows.
SHARD_ROWS = 512


@dataclass(frozen=True)
class Tiles:
    """Where nothing was measured."""

    measured_on: str | None = None
    row_warps: int = 4  # of the program of a row: all-reduce
    push_warps: int = 4  # a row of partial sums sent to its owner
    shard_warps: int = 4  # a row of the own shard
    gather_block: int = 1024  # 4-byte words of a program, of tensors gathered as they are


_H200 = Tiles("H200", row_warps=8, push_warps=4, shard_warps=8, gather_block=1024)
_BY_ARCH = {"sm_90": _H200, "cpu": _H200}  # cpu: the interpreter


def tiles_for(device: torch.device) -> Tiles:
    """The sizes for `device`."""
    return _BY_ARCH.get(platform.platform_of(device).arch, Tiles())


def two_shot(num_rows: int, *, world: int, words: int) -> bool:
    """Whether ranks sum a slice of each row and pass the sums on, instead of each summing whole
    rows. For two ranks both send the same.
    """
    return world > 2 and num_rows >= TWO_SHOT_ROWS and words % (world * 64) == 0


def shards(num_rows: int) -> bool:
    """Whether the ranks shard the rows. The same for every norm of a step, since all of them see
    the same rows.
    """
    return num_rows >= SHARD_ROWS
