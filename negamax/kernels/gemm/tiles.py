"""Tile sizes of the products, measured on an H200 at the slices of MiniMax-M2 on 1, 2 and 4 ranks (hidden 3072).

Microseconds per call in a CUDA graph, weights not in cache, qkv / o_proj of one of four ranks (2048 x 3072, 3072 x 1536;
reading them takes 1.5 / 1.1) and of one rank (8192 x 3072, 3072 x 6144; 5.9 / 4.4):

tokens                  1          2           8           16         64           256
four ranks              4.2 / 3.7  4.7 / 4.2   4.8 / 4.5   5.7 / 5.1  7.7 / 6.7    9.3 / 7.0
four, dependent launch  3.0 / 2.5  3.3 / 3.0   4.1 / 3.8   5.1 / 4.4  7.6 / 6.2
one rank                9.8 / 8.0  11.3 / 9.7  10.2 / 9.3  9.9 / 9.3  11.5 / 13.8  14.8 / 18.3
"""

from __future__ import annotations

from dataclasses import dataclass

MULTIPROCESSORS = 132
DOT_TOKENS = 2  # FP8: up to here products and sums on the plain cores
FEW_TOKENS = 8  # FP8: up to here, and up to so many weights, 16 rows per program are faster than 64
FEW_TOKENS_WEIGHTS = 4096 * 3072
NARROW_TOKENS = 64  # FP8: up to here weights are the tall operand
NARROW_TOKENS_16BIT = 64  # 16-bit weights: from here on cuBLAS
CUBLAS_PRODUCTS = 1024 * 2048 * 3072  # FP8: above so many, cuBLAS; its scales need a token count that is a multiple of
CUBLAS_MULTIPLE = 4


@dataclass(frozen=True)
class DotTile:
    """`rows` rows of the weight by `warps` warps, which share the columns; every weight is fetched before one is used."""

    rows: int
    warps: int


@dataclass(frozen=True)
class Tile:
    """`rows` of the weight against `tokens` tokens, `columns` at a time, `stages` of them under way; `splits` programs share
    the columns."""

    rows: int
    tokens: int
    columns: int
    warps: int
    stages: int
    splits: int = 1


FEW = Tile(rows=16, tokens=FEW_TOKENS, columns=128, warps=4, stages=6)  # each warp has its own 128 columns
WIDE_GROUP = 8  # token tiles that go through the weight together, for the L2 cache


def dot_products(columns: int) -> DotTile:
    """The tile for rows of `columns` FP8 weights: of MiniMax-M2's widths a thread has 3 x 16 per row."""
    return DotTile(rows=4, warps=4 if columns >= 6144 else 2 if columns >= 3072 else 1)


def narrow(*, num_tokens: int, rows: int) -> Tile:
    """The tile for FP8 weights of `rows` rows; the columns are split while multiprocessors would idle."""
    tokens = max(8, min(64, _power_of_two(num_tokens)))
    programs = -(-rows // 64) * -(-num_tokens // tokens)
    most = 200 if tokens <= 32 else MULTIPROCESSORS
    splits = 4 if 4 * programs <= most else 2 if 2 * programs <= most else 1
    return Tile(rows=64, tokens=tokens, columns=128, warps=4, stages=6, splits=splits)


def narrow_16bit(num_tokens: int) -> Tile:
    """The tile for bf16 and fp16 weights."""
    if num_tokens <= 16:
        return Tile(rows=128, tokens=16, columns=64, warps=8, stages=4)
    if num_tokens <= 32:
        return Tile(rows=64, tokens=32, columns=64, warps=4, stages=6)
    return Tile(rows=128, tokens=64, columns=64, warps=4, stages=5)


def wide(*, num_tokens: int, rows: int) -> Tile:
    """The tile for FP8 weights of `rows` rows and many tokens; the small one while two programs per multiprocessor hold it."""
    small = -(-rows // 64) * -(-num_tokens // 64) <= 2 * MULTIPROCESSORS
    return Tile(rows=64 if small else 128, tokens=64, columns=128, warps=4, stages=5 if small else 4)


def cublas_is_faster(num_tokens: int, num_weights: int) -> bool:
    """Whether an FP8 product is for cuBLAS: at [8192, 3072] x [3072, 2048] 89 us against 112, at 512 tokens 16 against 11."""
    return num_tokens % CUBLAS_MULTIPLE == 0 and num_tokens * num_weights > CUBLAS_PRODUCTS


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
