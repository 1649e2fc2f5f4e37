"""Tile sizes of the Triton kernels by architecture."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from negamax.kernels import platform

MAX_SCAN = 256  # tokens up to which every expert looks for its tokens itself
SCAN_CHUNK = 512  # pairs looked through at a time
SORT_PROGRAMS = 128  # about as many as there are multiprocessors; each puts some
SORT_CHUNK = 128  # pairs in place at a time,
COUNT_CHUNK = 512  # counts so many,
SORT_BLOCK = 32  # and adds up the counts of so many programs
MAX_ROUTE_TILES = 4096
MAX_ROUTE_FEW = 4  # tokens up to which the router multiplies on the CUDA cores, with
ROUTE_FEW_ROWS = 2  # experts in one program
ROUTE_FEW_WARPS = 4


@dataclass(frozen=True)
class RouteTile:
    """One program of the router: `rows` experts, one of `splits` parts of the columns, `tokens`
    tokens.
    """

    tokens: int
    rows: int
    columns: int  # at a time
    splits: int
    choose: int  # tokens chosen for at a time
    stages: int  # 0: the whole part at once
    warps: int


@dataclass(frozen=True)
class TokenTile:
    """One program of the token kernels: `rows` of one weight (of each half, in gate_up)."""

    gate_up_rows: int
    gate_up_columns: int
    gate_up_warps: int
    down_choices: int  # experts of a token summed up by one program; the next norm sums the rest
    down_rows: int
    down_columns: int
    down_warps: int


@dataclass(frozen=True)
class Tile:
    """One program of the tile kernels: `rows` of the weight against `tokens` tokens, `columns` at a
    time.
    """

    tokens: int
    # as many gate rows and up rows; with FP8 the columns of h that share a scale (in sorted: 128)
    gate_up_rows: int
    gate_up_columns: int
    gate_up_stages: int
    gate_up_warps: int
    down_rows: int
    down_columns: int  # without FP8; with it the columns of h that share a scale
    down_stages: int
    down_warps: int
    down_repeat: int = 1  # row tiles that a program does one after another (sorted)
    down_tokens: int = 64  # (sorted)
    down_resident: bool = False  # keep the tokens' h in shared memory (sorted, FP8, narrow experts)


@dataclass(frozen=True)
class Tiles:
    """Where nothing was measured: short pipelines, and 64 KB of shared memory are enough."""

    measured_on: str | None = None

    def route(self, num_tokens: int) -> RouteTile:
        """By the number of tokens."""
        tokens = 16 if num_tokens <= 16 else 64
        return RouteTile(tokens, rows=32, columns=64, splits=8, choose=8, stages=2, warps=4)

    def max_token(self, width: int) -> int:
        """Tokens up to which each choice runs on its own; beyond, an expert's weights are better
        read once for all its tokens.
        """
        return 4

    def token(self, width: int) -> TokenTile:
        """By the experts' width."""
        return TokenTile(2, 1024, 2, 4, 4, 128, 4)

    def scan(self, *, width: int, num_tokens: int, fp8: bool) -> Tile:
        """For a decode step's tokens."""
        side = 128 if fp8 else 64
        return Tile(16, side, side, 2, 4, side, side, 2, 4)

    def sort(self, *, width: int, num_tokens: int, fp8: bool) -> Tile:
        """Tiles of 64 tokens waste less than larger ones: of 8,192 tokens, an expert gets 256, give
        or take 16.
        """
        if not fp8:
            return Tile(64, 64, 64, 2, 4, 64, 64, 2, 4)
        return Tile(64, 128, 128, 2, 4, 128, 128, 2, 4, down_repeat=8)


_ROUTE = (
    (16, RouteTile(tokens=16, rows=16, columns=128, splits=8, choose=1, stages=0, warps=4)),
    (256, RouteTile(tokens=64, rows=32, columns=128, splits=8, choose=1, stages=0, warps=4)),
    (4096, RouteTile(tokens=128, rows=128, columns=64, splits=4, choose=4, stages=3, warps=8)),
    (1 << 30, RouteTile(tokens=128, rows=128, columns=64, splits=1, choose=16, stages=3, warps=8)),
)


@dataclass(frozen=True)
class H200(Tiles):
    """Measured at the shapes of MiniMax-M2 (hidden 3072, 256 experts, top 8)."""

    measured_on: str | None = "H200"

    def route(self, num_tokens: int) -> RouteTile:
        return next(tile for limit, tile in _ROUTE if num_tokens <= limit)

    def max_token(self, width: int) -> int:
        return 8 if width <= 384 else 4

    def token(self, width: int) -> TokenTile:
        if width <= 384:
            return TokenTile(2, 1024, 2, 4, 8, 128, 2)
        if width <= 768:
            return TokenTile(2, 1024, 2, 8, 4, 128, 4)
        return TokenTile(2, 1024, 2, 4, 4, 512, 4)

    def scan(self, *, width: int, num_tokens: int, fp8: bool) -> Tile:
        """At width 384 and 13 to 20 tokens, three small programs on a multiprocessor leave a
        shorter tail than two large ones.
        """
        if not fp8:
            return Tile(16, 64, 64, 3, 4, 64, 64, 3, 4)
        stages = 2 if width <= 384 and 12 < num_tokens <= 20 else 3
        return Tile(16, 128, 128, stages, 4, 128, 128, 3, 4)

    def sort(self, *, width: int, num_tokens: int, fp8: bool) -> Tile:
        if not fp8:
            return Tile(64, 128, 64, 4, 4, 64, 64, 3, 4)
        if width <= 384:
            return Tile(64, 128, 128, 4, 4, 64, 128, 3, 4, down_repeat=24, down_resident=True)
        return Tile(64, 128, 128, 4, 4, 128, 128, 3, 4, down_repeat=8)


_LIKE_H200 = H200(measured_on=None)  # as much shared memory, nothing measured
# cpu: the interpreter
_BY_ARCH = {"sm_90": H200(), "sm_100": _LIKE_H200, "sm_103": _LIKE_H200, "cpu": H200()}


def tiles_for(device: torch.device) -> Tiles:
    """The sizes for `device`."""
    return _BY_ARCH.get(platform.platform_of(device).arch, Tiles())
