"""What one program of a matrix product computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """`block_m` tokens times `block_n` rows of the weight, `block_k` columns at a time; the names
    are those of the kernels' constants and of Triton's launch options.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1  # steps along K whose loads are under way
    split_k: int = 1  # programs that share the columns
    maxnreg: int | None = None  # registers per thread at most; None: as the compiler takes


def warps_of_row(width: int, *, measured: int) -> int:
    """Warps of a program for one row: `measured` for up to 4096 values (MiniMax-M2 has 3072). Wider
    rows were not measured; they get as many values per thread.
    """
    return min(32, measured << max(0, (width - 1).bit_length() - 12))


def has_h200_tiles(arch: str) -> bool:
    """Whether the sizes measured on an H200 are taken: there; on sm_100 and sm_103, which have as
    much shared memory and were not measured; and in the interpreter.
    """
    return arch in ("sm_90", "sm_100", "sm_103", "cpu")
