"""Tile sizes of the router and expert kernels by architecture. M is the number of tokens."""

from bisect import bisect_left
from dataclasses import dataclass, replace

import torch

from negamax.kernels.launch.tile import Tile, has_h200_tiles, round_to_power_of_two
from negamax.kernels.weight_only.layout import Packing

SMALL_M_MAX_M = 256  # maximum M for small_m, whose programs search topk_ids for their tokens
SORT_PROGRAMS = 128  # number of programs that sort (token, choice) pairs, one per multiprocessor
SORT_CHUNK = 128  # number of pairs that a sorting program sorts at a time
COUNT_CHUNK = 512  # number of pairs that a sorting program counts at a time
SORT_BLOCK = 32  # number of programs whose counts a sorting program adds up at a time
ROUTE_MAX_TILES = 4096
ROUTE_SMALL_M_MAX_M = 4  # maximum M for route_small_m, the router on the CUDA cores
ROUTE_SMALL_M_BLOCK_N = 2
ROUTE_SMALL_M_WARPS = 4  # warps per program of route_small_m for rows of up to 4096 values
NORM_ROUTE_MAX_M = 2  # maximum M for one launch of norm and router
NORM_ROUTE_MAX_PARTS = 4  # maximum P (parts of the input) for one launch of norm and router
NORM_ROUTE_WARPS = 4  # warps per program of norm_route for rows of up to 4096 values
NORM_ROUTE_THREAD_WORDS = 4  # number of 4-byte words that a thread reads in one load


@dataclass(frozen=True)
class RouteTile(Tile):
    """Tile of a program of `_route_large_m_kernel`; the weight of this GEMM is the gate. With
    num_stages = 0 the program loads all its rows of the gate before the activations are written.
    """

    topk_m: int = 1  # number of tokens for which experts are selected at a time


@dataclass(frozen=True)
class ExpertTiles:
    """Tiles of the two GEMMs of the experts. With FP8, down.block_k is 128, because 128 columns of
    h share a scale; in large_m and small_m, gate_up.block_n is also 128.
    """

    gate_up: Tile  # a tile has block_n gate rows and block_n up rows
    down: Tile
    # gemv: number of experts of a token whose outputs a program of down sums; a norm adds the sums
    choices: int = 1
    repeat_n: int = 1  # large_m: number of tiles that a program of down computes one after another
    resident: bool = False  # large_m: whether down keeps its input h in shared memory (FP8)
    starts_early: bool = True  # `starts_early` of `launch_options` for gate and up in packed gemv


class MoeTiles:
    """Unmeasured tiles, whose short pipelines need at most 64 KB of shared memory."""

    def route(self, M: int, *, hidden: int) -> RouteTile:
        block_m = 16 if M <= 16 else 64
        return RouteTile(block_m, 32, 64, num_warps=4, num_stages=2, split_k=8, topk_m=8)

    def gemv_max_m(self, width: int) -> int:
        """Return the maximum M for gemv, which reads an expert for each (token, choice) pair."""
        return 4

    def gemv(self, width: int, *, hidden: int) -> ExpertTiles:
        return ExpertTiles(Tile(1, 2, 1024, num_warps=2), Tile(1, 4, 128, num_warps=4), choices=4)

    def small_m(self, *, M: int, width: int, hidden: int, fp8: bool) -> ExpertTiles:
        side = 128 if fp8 else 64
        tile = Tile(16, side, side, num_warps=4, num_stages=2)
        return ExpertTiles(tile, tile)

    def large_m(self, *, width: int, fp8: bool) -> ExpertTiles:
        """Return small tiles for prefills, because an expert has about 256 of 8,192 tokens."""
        side = 128 if fp8 else 64
        tile = Tile(64, side, side, num_warps=4, num_stages=2)
        return ExpertTiles(tile, tile, repeat_n=8 if fp8 else 1)

    def packed_gemv(self, *, M: int, gate_up: Packing, down: Packing) -> ExpertTiles | None:
        """Return tiles for few tokens if each program's weights fit into registers, else None."""
        return None

    def packed(self, *, M: int, width: int, gate_up: Packing) -> ExpertTiles:
        """Return unmeasured tiles for weights of 4 and 8 bits, at any M."""
        block_m = 16 if M <= SMALL_M_MAX_M else 64
        return ExpertTiles(
            Tile(block_m, 32, 128, num_warps=4, num_stages=2),
            Tile(block_m, 64, 128, num_warps=4, num_stages=2),
        )

    def w8a8(self) -> ExpertTiles:
        """Return tiles of large_m for 8-bit GEMMs; gate_up.block_n columns of h share a scale."""
        tile = Tile(64, 128, 128, num_warps=4, num_stages=2)
        return ExpertTiles(tile, tile, repeat_n=8)


_MEASURED_HIDDEN = 4096  # up to this hidden size, sizes measured for MiniMax-M2 are used
_ROUTE = (
    RouteTile(16, 16, 128, num_warps=4, num_stages=0, split_k=8),
    RouteTile(64, 32, 128, num_warps=4, num_stages=0, split_k=8),
    RouteTile(128, 128, 64, num_warps=8, num_stages=3, split_k=4, topk_m=4),
    RouteTile(128, 128, 64, num_warps=8, num_stages=3, topk_m=16),
)


def _tall(
    block_m: int, *, num_warps: int, num_stages: int, maxnreg: int | None = None
) -> ExpertTiles:
    """Return a tile of 64 gate rows and 64 up rows, and a tile of 128 rows of down."""
    tile = Tile(block_m, 64, 128, num_warps=num_warps, num_stages=num_stages, maxnreg=maxnreg)
    return ExpertTiles(tile, replace(tile, block_n=128))


# Tiles for many tokens and packed weights: kind of scale -> (M, tiles up to M, tiles above M). Two
# programs with tiles of 128 tokens run on a multiprocessor if its shared memory has room for their
# tokens, scales and codes. Otherwise one program with twice the tokens and warps is faster.
_PACKED_LARGE_M = {
    "float": (2048, _tall(64, num_warps=4, num_stages=4), _tall(128, num_warps=4, num_stages=3)),
    "e8m0": (
        2048,
        _tall(64, num_warps=4, num_stages=3, maxnreg=168),
        _tall(128, num_warps=4, num_stages=3),
    ),
    "e5m3": (
        4096,
        _tall(64, num_warps=4, num_stages=3, maxnreg=168),
        _tall(256, num_warps=8, num_stages=3),
    ),
    "8 bits": (2048, _tall(64, num_warps=4, num_stages=3), _tall(256, num_warps=8, num_stages=3)),
}


class H200MoeTiles(MoeTiles):
    """Tile sizes measured at the shapes of MiniMax-M2 (hidden 3072, 256 experts, top 8). The shapes
    of MiniMax-M3 (hidden 6144, 128 experts, top 4 and a shared expert) were measured only with
    packed 8-bit weights, and in prefills with FP8. For M3 in formats that were not measured, a
    program computes as many columns as for M2.
    """

    def route(self, M: int, *, hidden: int) -> RouteTile:
        tile = _ROUTE[bisect_left((16, 256, 4096), M)]
        return tile if hidden <= _MEASURED_HIDDEN else replace(tile, split_k=2 * tile.split_k)

    def gemv_max_m(self, width: int) -> int:
        return 8 if width <= 384 else 4

    def gemv(self, width: int, *, hidden: int) -> ExpertTiles:
        if hidden > _MEASURED_HIDDEN:  # M3 selects 5 experts (no power of two), so `choices` is 1
            down = Tile(1, 16, 128 if width <= 384 else 256, num_warps=4)
            return ExpertTiles(Tile(1, 2, 2048, num_warps=4), down)
        gate_up = Tile(1, 2, 1024, num_warps=2)
        if width <= 384:
            return ExpertTiles(gate_up, Tile(1, 8, 128, num_warps=2), choices=4)
        if width <= 768:
            return ExpertTiles(gate_up, Tile(1, 4, 128, num_warps=4), choices=8)
        return ExpertTiles(gate_up, Tile(1, 4, 512, num_warps=4), choices=4)

    def small_m(self, *, M: int, width: int, hidden: int, fp8: bool) -> ExpertTiles:
        """Return tiles for decode steps. At 13 to 20 tokens the gate and up GEMMs of one of four
        ranks have about 310 programs. With two stages three programs fit on a multiprocessor, so
        all 310 programs run at once. With three stages the 310 programs would run in two rounds.
        """
        side = 128 if fp8 else 64
        down = Tile(16, side, side, num_warps=4, num_stages=3)
        fits = width <= 384 if hidden <= _MEASURED_HIDDEN else 384 < width <= 768
        stages = 2 if fp8 and fits and 12 < M <= 20 else 3
        return ExpertTiles(Tile(16, side, side, num_warps=4, num_stages=stages), down)

    def large_m(self, *, width: int, fp8: bool) -> ExpertTiles:
        gate_up = Tile(64, 128, 128 if fp8 else 64, num_warps=4, num_stages=4)
        if not fp8:
            return ExpertTiles(gate_up, Tile(64, 64, 64, num_warps=4, num_stages=3))
        if width <= 384:
            down = Tile(64, 64, 128, num_warps=4, num_stages=3)
            return ExpertTiles(gate_up, down, repeat_n=24, resident=True)
        return ExpertTiles(gate_up, Tile(64, 128, 128, num_warps=4, num_stages=4), repeat_n=16)

    def packed_gemv(self, *, M: int, gate_up: Packing, down: Packing) -> ExpertTiles | None:
        """Return tiles for up to 4 tokens, else None. The limit is 2 tokens if rows have over 1,536
        bytes (3,072 bytes for 8-bit gate and up rows). The limit is 1 token if fewer than 128 4-bit
        codes share a 16-bit scale. A thread loads up to 384 bytes of the gate and up weights, or
        192 bytes if rows are long or scales and zero points need registers. A thread loads up to
        192 bytes of the down weight.
        """
        if gate_up.CODES != down.CODES:
            return None
        row_bytes = [each.K_PACKED // each.CODES for each in (gate_up, down)]
        if gate_up.CODES == 1:
            return self._bytes_gemv(M, *row_bytes)
        has_few_scales = gate_up.GROUP % 128 == 0
        has_long_rows = max(row_bytes) > 1536
        max_m = 1
        if has_few_scales or gate_up.SCALE != "float":
            max_m = 2 if has_long_rows else 4
        if max(row_bytes) > 3072 or max_m < M:
            return None
        first, second = (round_to_power_of_two(-(-each // 384)) for each in row_bytes)
        is_light = has_few_scales and not gate_up.ZEROS
        if M > 1:
            rows, maxnreg = (16, 168) if is_light and not has_long_rows else (8, 128)
            tile = Tile(8, rows, 1, num_warps=first, maxnreg=maxnreg)
            other = Tile(8, 16, 1, num_warps=second, maxnreg=128)
            return ExpertTiles(tile, other, starts_early=not has_long_rows)
        tile = Tile(8, 8, 1, num_warps=2 * first)
        if is_light or gate_up.SCALE == "e5m3":
            tile = Tile(8, 8, 1, num_warps=first, maxnreg=128)
        other = Tile(8, 16, 1, num_warps=2 * second, maxnreg=80 if is_light else None)
        return ExpertTiles(tile, other, starts_early=not has_long_rows)

    def _bytes_gemv(self, M: int, gate_up: int, down: int) -> ExpertTiles | None:
        """Return tiles for 8-bit weights whose rows have `gate_up` and `down` bytes."""
        if gate_up <= 3072 and down <= 1536 and M <= 4:
            tile = Tile(8, 8, 1, num_warps=4, maxnreg=168)
            return ExpertTiles(tile, Tile(8, 16, 1, num_warps=4, maxnreg=128))
        if gate_up <= 6144 and down <= 3072 and M <= 2:
            tile = Tile(8, 4, 1, num_warps=8, maxnreg=128)
            warps = round_to_power_of_two(-(-down // 384))
            other = Tile(8, 16, 1, num_warps=warps, maxnreg=128)
            return ExpertTiles(tile, other, starts_early=False)
        return None

    def packed(self, *, M: int, width: int, gate_up: Packing) -> ExpertTiles:
        """Return tiles for packed weights. A multiprocessor runs three programs with 168 registers
        per thread, or four with 128. Narrow experts with a large hidden size have few tiles, so the
        tiles have half as many rows. Above 48 tokens, halving the rows never saved time.
        """
        if M > SMALL_M_MAX_M:
            kind = "8 bits" if gate_up.CODES == 1 else gate_up.SCALE
            most, few, many = _PACKED_LARGE_M[kind]
            return few if most >= M else many
        if M == 1:  # with few programs, only longer pipelines keep enough loads in flight
            rows, stages = (32, 8) if gate_up.CODES == 2 else (64, 6)
            tile = Tile(16, rows, 128, num_warps=4, num_stages=stages, maxnreg=168)
            return ExpertTiles(tile, replace(tile, block_n=2 * rows))
        tile = Tile(16, 64, 128, num_warps=4, num_stages=4, maxnreg=168)
        if gate_up.CODES == 1 and gate_up.K > _MEASURED_HIDDEN and width <= 768 and M <= 48:
            tile = Tile(16, 32, 256, num_warps=4, num_stages=3, maxnreg=168)
        maxnreg = 128 if gate_up.CODES == 2 else None
        return ExpertTiles(tile, Tile(16, 128, 128, num_warps=4, num_stages=3, maxnreg=maxnreg))

    def w8a8(self) -> ExpertTiles:
        gate_up = Tile(64, 128, 128, num_warps=4, num_stages=4)
        return ExpertTiles(gate_up, Tile(64, 128, 128, num_warps=4, num_stages=3), repeat_n=8)


def specialized_min_pairs(hidden: int) -> int:
    """Return the mean number of pairs per expert from which on `triton_specialized.py` is used."""
    return 64 if hidden <= _MEASURED_HIDDEN else 0


def search_chunk(num_tokens: int) -> int:
    """Return the number of tokens that small_m searches at a time for an expert's pairs."""
    return min(64, max(16, round_to_power_of_two(num_tokens)))


def tiles_for(device: torch.device) -> MoeTiles:
    return H200MoeTiles() if has_h200_tiles(device) else MoeTiles()
