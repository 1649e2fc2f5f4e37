"""Tile sizes of the GEMMs, measured on an H200 with shards of MiniMax-M2 on 1, 2 and 4 ranks.

The tiles minimize the time of a layer's kernels from norm to o_proj (norm, qkv, QK norm, attention,
o_proj), with dependent launches and weights that are not in cache. The table lists the time from
norm to o_proj in microseconds at a context of 1,064 tokens; the time without the two GEMMs is in
brackets. Reading the weights takes 10.4 us on one rank, and 2.6 us on each of four ranks:

tokens    one rank      four
1         28.8 (13.1)   16.6 (10.7)
2         29.0 (13.4)
4         31.5 (16.2)   18.7 (12.3)
8         35.4 (19.8)
16        56.5 (33.0)   24.2 (15.5)
32                      32.9 (19.7)
63        84.9 (58.2)   52.5 (36.7)
100       106 (79.7)    51.7 (37.5)

If qkv and o_proj of one rank run without other kernels between them, they take 14.3 us at 1 token
and 17.2 us at 4 tokens. Tiles that leave capacity for programs of the next kernel make qkv and
o_proj 2 us faster, but a layer 4 to 7 us slower, and are not used.
"""

from dataclasses import dataclass

import torch

from negamax.kernels import platform
from negamax.kernels.launch.tile import Tile, has_h200_tiles, round_to_power_of_two
from negamax.kernels.weight_only.layout import Packing

GEMV_MAX_M = 1  # maximum number of tokens M for gemv on the CUDA cores
SPLIT_K_MAX_M = 64  # maximum number of tokens M for split_k; for more, 16-bit weights use cuBLAS
CUBLAS_PRODUCTS = 1024 * 2048 * 3072  # FP8 GEMMs with more multiplications (M * N * K) use cuBLAS
CUBLAS_MULTIPLE = 4  # block-scaled FP8 GEMMs can use cuBLAS only if M is a multiple of this
PDL_MAX_WEIGHTS = 4096 * 3072  # large_m uses PDL up to this number of weights (PDL saves 0.9 us)
GROUP_M = 8  # large_m: number of adjacent programs (token tiles) that read the same weight tile


def gemv(K: int) -> tuple[int, int]:
    """Return BLOCK_N and the number of warps for rows of K FP8 weights. At the widths of MiniMax-M2
    a thread loads 3 x 16 columns of each row.
    """
    return 4, 4 if K >= 6144 else 2 if K >= 3072 else 1


@dataclass(frozen=True)
class GemmTiles:
    """Unmeasured tiles, whose short pipelines need at most 64 KB of shared memory."""

    multiprocessors: int

    def small_m(self, *, M: int, N: int, K: int) -> Tile | None:
        """Return a tile if the registers of all programs can store the FP8 weight, else None."""
        return None

    def split_k(self, *, M: int, N: int, K: int) -> Tile:
        """Return a tile for FP8 weights, at any M for which no other kernel has a tile."""
        block_m = max(16, min(64, round_to_power_of_two(M)))
        split_k = self._splits(M, N, K, block_m)
        return Tile(block_m, 64, 128, num_warps=4, num_stages=2, split_k=split_k)

    def split_k_16bit(self, M: int) -> Tile:
        """Return a tile for bf16 and fp16 weights."""
        return Tile(max(16, min(64, round_to_power_of_two(M))), 64, 64, num_warps=4, num_stages=2)

    def large_m(self, *, M: int, N: int) -> Tile | None:
        """Return a tile for FP8 weights that a kernel loads by TMA; None if the GPU has no TMA."""
        return None

    def packed(self, *, M: int, N: int, K: int) -> Tile:
        """Return an unmeasured tile for weights of 4 and 8 bits, at any M."""
        return self.split_k(M=M, N=N, K=K)

    def packed_gemv(self, *, M: int, N: int, packing: Packing, in_parts: bool) -> Tile | None:
        """Return a tile for few tokens if the packed weight fits into registers, else None."""
        return None

    def dequantized_min_m(self, packing: Packing) -> int:
        """Return the number of tokens from which packed weights are dequantized for cuBLAS."""
        return 256 if packing.CODES == 1 else 300

    def w8a8(self, *, M: int, N: int) -> Tile:
        """Return an unmeasured tile for GEMMs of 8-bit values with scales per row and token."""
        return Tile(64, 128, 128, num_warps=4, num_stages=2)

    def _splits(self, M: int, N: int, K: int, block_m: int) -> int:
        """Return the number of splits of K that keeps all multiprocessors busy. With more than 32
        tokens a split has at least 12 blocks of 128 columns, because partial results are large.
        """
        most = 200 * self.multiprocessors // 132 // (-(-N // 64) * -(-M // block_m))
        if block_m > 32:
            most = min(most, K // 1536)
        return _at_most_four(most)


@dataclass(frozen=True)
class H200GemmTiles(GemmTiles):
    """Tile sizes measured with the shards of MiniMax-M2 (see the module's table)."""

    multiprocessors: int = 132

    def small_m(self, *, M: int, N: int, K: int) -> Tile | None:
        """Return a tile in which a warp loads up to six blocks of 128 columns of the weight; they
        fill 96 of a thread's 128 registers. All programs together load up to 25 MB.
        """
        warps = round_to_power_of_two(-(-K // 768))
        if warps > 16:
            return None
        if M <= 8 and N * K <= 8192 * 3072:
            return Tile(8, 16, 128 * warps, num_warps=warps, maxnreg=128)
        if M <= 16 and N * K <= 4096 * 3072:
            return Tile(16, 16, 128 * warps, num_warps=warps)
        return None

    def split_k(self, *, M: int, N: int, K: int) -> Tile:
        block_m = max(8, min(64, round_to_power_of_two(M)))
        split_k = self._splits(M, N, K, block_m)
        return Tile(block_m, 64, 128, num_warps=4, num_stages=6, split_k=split_k)

    def split_k_16bit(self, M: int) -> Tile:
        if M <= 16:
            return Tile(16, 128, 64, num_warps=8, num_stages=4)
        if M <= 32:
            return Tile(32, 64, 64, num_warps=4, num_stages=6)
        return Tile(64, 128, 64, num_warps=4, num_stages=5)

    def packed(self, *, M: int, N: int, K: int) -> Tile:
        """Return a tile for packed weights. For up to 128 tokens, K is split into runs of at least
        1,536 columns if the tiles leave a quarter of the multiprocessors idle. For 33 to 128
        tokens, a tile contains all tokens if two splits of K fill the multiprocessors.
        """
        tiles_n = -(-N // 64)
        if M > 128:
            programs = tiles_n * -(-M // 128)
            if programs > 2 * self.multiprocessors:
                return Tile(128, 128, 128, num_warps=8, num_stages=3)
            split_k = _at_most_four(2 * self.multiprocessors // programs)
            return Tile(128, 64, 128, num_warps=4, num_stages=3, split_k=split_k)
        if M <= 16:
            split_k = 1
            if tiles_n <= self.multiprocessors:
                split_k = _at_most_four(5 * self.multiprocessors // (2 * tiles_n))
            return Tile(16, 64, 256, num_warps=4, num_stages=3, split_k=split_k)
        fill_half = self._are_filled(2 * tiles_n) and not self._are_filled(tiles_n)
        if M > 32 and K >= 3072 and fill_half:
            block_m, block_k = (64, 256) if M <= 64 else (128, 128)
            return Tile(block_m, 64, block_k, num_warps=4, num_stages=3, split_k=2)
        largest_of_32 = 32 if self._are_filled(tiles_n) else 64
        block_m = 32 if largest_of_32 >= M else 64
        split_k = 1
        if not self._are_filled(tiles_n * -(-M // block_m)):
            split_k = _at_most_four(K // 1536)
        if M <= 64:
            return Tile(block_m, 64, 256, num_warps=4, num_stages=3, split_k=split_k)
        return Tile(64, 64, 128, num_warps=4, num_stages=4 if split_k == 1 else 3, split_k=split_k)

    def _are_filled(self, programs: int) -> bool:
        """Return whether `programs` leave less than a quarter of the multiprocessors idle."""
        return 4 * programs > 3 * self.multiprocessors

    def packed_gemv(self, *, M: int, N: int, packing: Packing, in_parts: bool) -> Tile | None:
        """Return a tile for up to 4 tokens, or only for 1 token if an 8-bit weight exceeds the
        registers of all multiprocessors. A thread loads up to 384 bytes of codes of the weight.
        """
        row_bytes = packing.K_PACKED // packing.CODES
        if M > 4:
            return None
        if packing.CODES == 1:
            if row_bytes <= 6144 and N * row_bytes <= 8192 * 3072:
                return Tile(8, 16, 1, num_warps=4)
            return Tile(8, 8, 1, num_warps=8) if M == 1 and row_bytes <= 8192 else None
        if row_bytes > 6144:
            return None
        warps = round_to_power_of_two(-(-row_bytes // 384))
        if in_parts and warps > 4:
            if M > 1:
                return Tile(8, 32, 1, num_warps=4, split_k=4)
            return Tile(8, 16, 1, num_warps=4, split_k=4, maxnreg=128)
        if M > 1:
            return Tile(8, 32, 1, num_warps=warps)
        maxnreg = None if row_bytes == 1536 and packing.SCALE != "e5m3" else 128
        return Tile(8, 16, 1, num_warps=max(4, warps), maxnreg=maxnreg)

    def w8a8(self, *, M: int, N: int) -> Tile:
        """Return the tile of `large_m`; no other tile was measured."""
        return self.large_m(M=M, N=N)

    def large_m(self, *, M: int, N: int) -> Tile:
        """Return a 64 x 64 tile if up to two programs per multiprocessor suffice, else 64 x 128."""
        programs = -(-N // 64) * -(-M // 64)
        if programs <= 2 * self.multiprocessors:
            return Tile(64, 64, 128, num_warps=4, num_stages=5)
        return Tile(64, 128, 128, num_warps=4, num_stages=4)


def tiles_for(device: torch.device) -> GemmTiles:
    here = platform.platform_of(device)
    if here.vendor == "cpu":  # Triton's interpreter runs on the CPU
        return H200GemmTiles()
    return (H200GemmTiles if has_h200_tiles(device) else GemmTiles)(here.multiprocessors)


def cublas_is_faster(M: int, num_weights: int) -> bool:
    """Return whether cuBLAS is faster for FP8. cuBLAS takes 89 us for 8192 tokens (Triton: 112 us),
    but 16 us for 512 tokens (Triton: 11 us).
    """
    return M % CUBLAS_MULTIPLE == 0 and M * num_weights > CUBLAS_PRODUCTS


def _at_most_four(splits: int) -> int:
    """Round `splits` down to 1, 2 or 4."""
    return 4 if splits >= 4 else 2 if splits >= 2 else 1
