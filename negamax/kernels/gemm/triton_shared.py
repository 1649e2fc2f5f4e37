"""Functions that several GEMM kernels call."""

import triton
import triton.language as tl


@triton.jit
def locate_tile(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Return the first row and column of a program's output tile. Programs process GROUP_M rows
    of tiles column by column, so programs that run together read the same w from the L2 cache:

            N                       with GROUP_M = 2
        +----+----+----+
      M | 0  | 2  | 4  |  group 0
        | 1  | 3  | 5  |
        +----+----+----+
        | 6  | 8  | 10 |  group 1
        | 7  | 9  | 11 |
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    group_size = GROUP_M * tiles_n
    first_tile_m = tl.program_id(0) // group_size * GROUP_M
    group_m = tl.minimum(tl.cdiv(M, BLOCK_M) - first_tile_m, GROUP_M)
    first_m = (first_tile_m + tl.program_id(0) % group_size % group_m) * BLOCK_M
    return first_m, tl.program_id(0) % group_size // group_m * BLOCK_N


@triton.jit
def store_split(
    acc, out_ptrs, inside, partials_ptr, arrivals_ptr, tile,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """Transpose acc [BLOCK_N, BLOCK_M] of tile number `tile` and store it to out_ptrs where
    `inside` is true. The split that ends last adds the partial sums in a fixed order.
    """
    if SPLIT_K == 1:
        tl.store(out_ptrs, tl.trans(acc).to(out_ptrs.dtype.element_ty), mask=inside)
    else:
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        partial_ptrs = partials_ptr + tile * (SPLIT_K * SIZE)
        partial_ptrs += tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tl.store(partial_ptrs + tl.program_id(1) * SIZE, acc)
        tl.debug_barrier()  # wait until all threads have written the partial sums
        if tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1:
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for split in tl.static_range(SPLIT_K):
                total += tl.load(partial_ptrs + split * SIZE, cache_modifier=".cg")
            tl.store(out_ptrs, tl.trans(total).to(out_ptrs.dtype.element_ty), mask=inside)
            tl.store(arrivals_ptr + tile, 0)
