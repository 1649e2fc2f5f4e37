"""Tile sizes of the products, measured on an H200 at the slices of MiniMax-M2 on 1, 2 and 4 ranks
(hidden 3072).

What counts is the time between the norm before qkv and the end of o_proj, as a layer runs it: norm,
qkv, QK norm, attention, o_proj, with dependent launches and weights that are not in cache.
Microseconds of that chain at 1,064 tokens of context, in brackets those without the two products
(reading the weights takes 10.4 on one rank, 2.6 on each of four):

tokens    one rank      four
1         28.8 (13.1)   16.6 (10.7)
2         29.0 (13.4)
4         31.5 (16.2)   18.7 (12.3)
8         35.4 (19.8)
16        56.5 (33.0)   24.2 (15.5)
32                      32.9 (19.7)
63        84.9 (58.2)   52.5 (36.7)
100       106 (79.7)    51.7 (37.5)

Back to back, with no other kernel between them, qkv and o_proj of one rank take 14.3 at one token
and 17.2 at 4. That order of kernels does not occur, and it prefers other tiles: programs that leave
room for those of the next kernel are 2 us faster there and 4 to 7 us slower in a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from negamax.kernels import platform

DOT_TOKENS = 1  # FP8: up to here products and sums on the plain cores
NARROW_TOKENS = 64  # FP8: up to here weights are the tall operand
NARROW_TOKENS_16BIT = 64  # 16-bit weights: from here on cuBLAS
# FP8: above so many, cuBLAS; its scales need a token count that is a multiple of
CUBLAS_PRODUCTS = 1024 * 2048 * 3072
CUBLAS_MULTIPLE = 4
# FP8: up to so many, dependent launch gains 0.9 us at 100 tokens; above, it loses 0.5
DEPENDENT_WIDE_WEIGHTS = 4096 * 3072


@dataclass(frozen=True)
class DotTile:
    """`rows` rows of the weight by `warps` warps, which share the columns; every weight is fetched
    before one is used.
    """

    rows: int
    warps: int


@dataclass(frozen=True)
class FewTile:
    """`rows` rows of the weight against up to `tokens` tokens, by `warps` warps, which share the
    columns. `registers` per thread, so that all programs of the largest weight fit on the GPU
    together; None: what the compiler takes.
    """

    rows: int
    tokens: int
    warps: int
    registers: int | None


@dataclass(frozen=True)
class Tile:
    """`rows` of the weight against `tokens` tokens, `columns` at a time, `stages` of them under
    way; `splits` programs share the columns."""

    rows: int
    tokens: int
    columns: int
    warps: int
    stages: int
    splits: int = 1


WIDE_GROUP = 8  # token tiles that go through the weight together, for the L2 cache


@dataclass(frozen=True)
class Tiles:
    """Where nothing was measured: short pipelines, and 64 KB of shared memory are enough."""

    multiprocessors: int
    measured_on: str | None = None

    def dot_products(self, columns: int) -> DotTile:
        """The tile for rows of `columns` FP8 weights: of MiniMax-M2's widths a thread has 3 x 16
        per row.
        """
        return DotTile(rows=4, warps=4 if columns >= 6144 else 2 if columns >= 3072 else 1)

    def few_tokens(self, *, num_tokens: int, rows: int, columns: int) -> FewTile | None:
        """The tile for FP8 weights of which every program's part fits into registers, all programs
        running at once; else None.
        """
        return None

    def narrow(self, *, num_tokens: int, rows: int, columns: int) -> Tile:
        """The tile for FP8 weights [rows, columns]. The columns are split while multiprocessors
        would idle; with many tokens not into less than 12 blocks of 128, since what the programs of
        a tile exchange grows with the tokens.
        """
        tokens = max(16, min(64, _power_of_two(num_tokens)))
        splits = self._splits(num_tokens, rows, columns, tokens=tokens)
        return Tile(rows=64, tokens=tokens, columns=128, warps=4, stages=2, splits=splits)

    def narrow_16bit(self, num_tokens: int) -> Tile:
        """The tile for bf16 and fp16 weights."""
        tokens = max(16, min(64, _power_of_two(num_tokens)))
        return Tile(rows=64, tokens=tokens, columns=64, warps=4, stages=2)

    def wide(self, *, num_tokens: int, rows: int) -> Tile | None:
        """The tile for FP8 weights of `rows` rows and many tokens, of which both come through the
        tensor memory accelerator; None: any number of tokens runs as few do.
        """
        return None

    def _splits(self, num_tokens: int, rows: int, columns: int, *, tokens: int) -> int:
        programs = -(-rows // 64) * -(-num_tokens // tokens)
        most = 200 * self.multiprocessors // 132 // programs
        if tokens > 32:
            most = min(most, columns // 1536)
        return 4 if most >= 4 else 2 if most >= 2 else 1


@dataclass(frozen=True)
class H200(Tiles):
    """Measured at the slices of MiniMax-M2 (see above)."""

    multiprocessors: int = 132
    measured_on: str | None = "H200"

    def few_tokens(self, *, num_tokens: int, rows: int, columns: int) -> FewTile | None:
        """A warp has up to six blocks of 128 columns: 96 of a thread's registers. With 128 in all,
        25 MB are on their way together.
        """
        warps = _power_of_two(-(-columns // 768))
        if warps > 16:
            return None
        if num_tokens <= 8 and rows * columns <= 8192 * 3072:
            return FewTile(rows=16, tokens=8, warps=warps, registers=128)
        if num_tokens <= 16 and rows * columns <= 4096 * 3072:
            return FewTile(rows=16, tokens=16, warps=warps, registers=None)
        return None

    def narrow(self, *, num_tokens: int, rows: int, columns: int) -> Tile:
        tokens = max(8, min(64, _power_of_two(num_tokens)))
        splits = self._splits(num_tokens, rows, columns, tokens=tokens)
        return Tile(rows=64, tokens=tokens, columns=128, warps=4, stages=6, splits=splits)

    def narrow_16bit(self, num_tokens: int) -> Tile:
        if num_tokens <= 16:
            return Tile(rows=128, tokens=16, columns=64, warps=8, stages=4)
        if num_tokens <= 32:
            return Tile(rows=64, tokens=32, columns=64, warps=4, stages=6)
        return Tile(rows=128, tokens=64, columns=64, warps=4, stages=5)

    def wide(self, *, num_tokens: int, rows: int) -> Tile:
        """The small one while two programs per multiprocessor hold it."""
        small = -(-rows // 64) * -(-num_tokens // 64) <= 2 * self.multiprocessors
        return Tile(
            rows=64 if small else 128, tokens=64, columns=128, warps=4, stages=5 if small else 4
        )


def tiles_for(device: torch.device) -> Tiles:
    """The sizes for `device`."""
    here = platform.platform_of(device)
    if here.vendor == "cpu":  # the interpreter
        return H200()
    if here.arch in ("sm_90", "sm_100", "sm_103"):  # the last two: not measured
        return H200(here.multiprocessors, "H200" if here.arch == "sm_90" else None)
    return Tiles(here.multiprocessors)


def cublas_is_faster(num_tokens: int, num_weights: int) -> bool:
    """Whether an FP8 product is for cuBLAS: at [8192, 3072] x [3072, 2048] 89 us against 112, at
    512 tokens 16 against 11.
    """
    return num_tokens % CUBLAS_MULTIPLE == 0 and num_tokens * num_weights > CUBLAS_PRODUCTS


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
