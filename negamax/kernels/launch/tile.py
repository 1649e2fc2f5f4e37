"""Tile sizes and launch options of kernels."""

from dataclasses import dataclass
from functools import cached_property

import torch

from negamax.kernels import platform


@dataclass(frozen=True)
class Tile:
    """Sizes of a GEMM: `block_m` tokens, `block_n` rows of the weight, `block_k` columns per step.
    The fields are named like the kernels' constants and Triton's launch options.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1  # number of steps along K whose loads are in flight
    split_k: int = 1  # number of programs that share one output tile's loop along K
    maxnreg: int | None = None  # maximum number of registers per thread; None: the compiler decides

    @cached_property
    def constants(self) -> dict[str, int]:
        """The kernel arguments for this tile, if the kernel's code pipelines the loop along K."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "NUM_STAGES": self.num_stages,
            "NUM_WARPS": self.num_warps,
            "num_warps": self.num_warps,
        }


@dataclass(frozen=True)
class Launch:
    """Launch sizes of a kernel whose loops are pipelined by Triton."""

    num_warps: int
    num_stages: int
    block_n: int = 0  # number of keys per tile; 0: the kernel has no key tiles
    maxnreg: int | None = None  # maximum number of registers per thread; None: the compiler decides

    @cached_property
    def options(self) -> dict[str, int]:
        """The Triton launch options `num_warps` and `num_stages`."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def round_to_power_of_two(count: int) -> int:
    """Round `count` (at least 1) up to a power of two."""
    return 1 << (count - 1).bit_length()


def warps_of_row(width: int, *, measured: int) -> int:
    """Return the number of warps of a program that processes one row.

    The result is `measured` for rows of up to 4096 values. For wider rows, the number of warps
    grows with the width, up to 32 warps.
    """
    return min(32, measured << max(0, (width - 1).bit_length() - 12))


def has_h200_tiles(device: torch.device) -> bool:
    """Return whether `device` uses the sizes measured on an H200.

    The H200, the interpreter, sm_100 and sm_103 use the H200's sizes. sm_100 and sm_103 were not
    measured, but have as much shared memory as the H200.
    """
    return platform.platform_of(device).arch in ("sm_90", "sm_100", "sm_103", "cpu")
