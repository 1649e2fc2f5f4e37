"""Experts of prefills with FP8 weights on Hopper, in Gluon (*large_m*). The sorted pairs and the
results are those of `triton_prefill.py`, bit for bit.

One program per multiprocessor computes tiles of 128 pairs of one expert and 256 rows of its weight,
one after another. A program's warps have three tasks and exchange blocks of 128 values of K through
a ring of stages in shared memory:

    producer     4 warps    waits for `empty`, loads two tiles of w by TMA, and the rows of x by
                            cp.async (down: h by TMA); then `full` completes
    consumer 0   4 warps    waits for `full`, multiplies pairs 0 .. 63 of the tile, arrives at
    consumer 1   4 warps    `empty`; the same for pairs 64 .. 127

While one consumer adds its product to the sum in registers, the tensor cores multiply for the
other. A tile of 128 x 256 needs less bandwidth of shared memory and L2 than a 64 x 128 tile of
`triton_prefill.py`. For gate and up, the tiles of w are 128 gate rows and the matching up rows.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from negamax.kernels import platform
from negamax.kernels.launch.ptx import launch_dependents, wait_for_predecessor
from negamax.kernels.launch.triton import launch_options
from negamax.kernels.mlp.triton import swiglu
from negamax.kernels.moe.triton_shared import PreparedExperts, compute_group_scale

# Both copy functions are named `async_load` from Triton 3.9 on.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_swiglu, _compute_group_scale, _wait_for_predecessor, _launch_dependents = (
    gluon.jit(each.fn)
    for each in (swiglu, compute_group_scale, wait_for_predecessor, launch_dependents)
)

_SIDE = gl.constexpr(128)  # number of pairs per tile, rows per tile of w, and values of K per stage
_STAGES = gl.constexpr(4)  # 48 KiB each
_TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_SHARED_TILE = gl.constexpr(_TILE)
_CONSUMER_REGISTERS = 232  # registers per thread: 128 for the sum, 64 for a product, and addresses
_PRODUCER_REGISTERS = 40


@gluon.jit
def _find_expert(
    expert_counts_ptr, tile, expert, first_tile, begin, count, num_experts, TILES_N: gl.constexpr
):
    """Advance from an expert to the expert of `tile`. Return the expert of `tile` (num_experts:
    none), and the expert's first tile, first index in sorted_token_ids and number of pairs.
    """
    next_tile = first_tile + (count + _SIDE - 1) // _SIDE * TILES_N
    while (expert < num_experts) & (tile >= next_tile):
        expert += 1
        begin += count
        first_tile = next_tile
        count = gl.load(expert_counts_ptr + expert, mask=expert < num_experts, other=0)
        next_tile = first_tile + (count + _SIDE - 1) // _SIDE * TILES_N
    return expert, first_tile, begin, count


@gluon.jit
def _produce(
    sorted_token_ids_ptr, expert_counts_ptr, x_ring, w_ring, full, empty, num_experts, x, w,
    E: gl.constexpr, DOWN: gl.constexpr, TOP_K: gl.constexpr,
):  # fmt: skip
    """Load the operands of all tiles of the program."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    K: gl.constexpr = E.WIDTH if DOWN else E.HIDDEN
    W_ROWS: gl.constexpr = E.HIDDEN if DOWN else 2 * E.WIDTH
    N: gl.constexpr = 2 * _SIDE if DOWN else _SIDE  # columns of a tile's result
    APART: gl.constexpr = _SIDE if DOWN else E.WIDTH  # row distance between the two tiles of w
    TILES_N: gl.constexpr = (E.HIDDEN if DOWN else E.WIDTH) // N
    step, expert, first_tile, begin = 0, 0, 0, 0
    tile, count = gl.program_id(0), gl.load(expert_counts_ptr)
    expert, first_tile, begin, count = _find_expert(
        expert_counts_ptr, tile, expert, first_tile, begin, count, num_experts, TILES_N
    )
    while expert < num_experts:
        first_m = begin + (tile - first_tile) // TILES_N * _SIDE
        w_row = expert * W_ROWS + (tile - first_tile) % TILES_N * N
        if not DOWN:
            places = first_m + gl.arange(0, _SIDE, layout=gl.SliceLayout(1, LAYOUT))
            valid = places < begin + count
            tokens = gl.load(sorted_token_ids_ptr + places, mask=valid, other=0) // TOP_K
            offs_k = gl.arange(0, _SIDE, layout=gl.SliceLayout(0, LAYOUT))
            x_ptrs = x + tokens.to(gl.int64)[:, None] * K + offs_k[None, :]
        for k in range(0, K, _SIDE):
            stage = step % _STAGES
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), ((step // _STAGES) & 1) ^ 1)
            mbarrier.expect(ready, (3 if DOWN else 2) * _SIDE * _SIDE)
            _load(w, [w_row, k], ready, w_ring.index(2 * stage))
            _load(w, [w_row + APART, k], ready, w_ring.index(2 * stage + 1))
            if DOWN:
                _load(x, [first_m, k], ready, x_ring.index(stage))
            else:
                _copy(x_ring.index(stage), x_ptrs + k, mask=valid[:, None])
                async_copy.mbarrier_arrive(ready, increment_count=False)
            step += 1
        tile += gl.num_programs(0)
        expert, first_tile, begin, count = _find_expert(
            expert_counts_ptr, tile, expert, first_tile, begin, count, num_experts, TILES_N
        )


@gluon.jit
def _consume(
    sorted_token_ids_ptr, expert_counts_ptr, x_ring, w_ring, full, empty, num_experts,
    x_scale_ptr, w_scale_ptr, topk_weights_ptr, out_ptr, out_scale_ptr, num_pairs,
    E: gl.constexpr, DOWN: gl.constexpr, TOP_K: gl.constexpr,
    CONSUMER: gl.constexpr,  # the half of each tile's pairs to compute: 0 or 1
):  # fmt: skip
    """Compute half of the pairs of all tiles of the program."""
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    # A thread stores 16 bytes of the result, 8 or 16 values.
    STORE: gl.constexpr = gl.BlockedLayout(
        [1, 8 if DOWN else 16], [2 if DOWN else 4, 16 if DOWN else 8], [4, 1], [1, 0]
    )
    HALF: gl.constexpr = _SIDE // 2
    K_BLOCKS: gl.constexpr = (E.WIDTH if DOWN else E.HIDDEN) // _SIDE
    W_BLOCKS: gl.constexpr = (E.HIDDEN if DOWN else 2 * E.WIDTH) // _SIDE
    APART: gl.constexpr = 1 if DOWN else E.WIDTH // _SIDE
    WIDTH: gl.constexpr = E.HIDDEN if DOWN else E.WIDTH
    N: gl.constexpr = 2 * _SIDE if DOWN else _SIDE
    TILES_N: gl.constexpr = WIDTH // N
    ACTIVATION: gl.constexpr = E.ACTIVATION
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    offs_m = gl.arange(0, HALF, layout=gl.SliceLayout(1, SUM))
    store_m = gl.arange(0, HALF, layout=gl.SliceLayout(1, STORE))
    store_n = gl.arange(0, _SIDE, layout=gl.SliceLayout(0, STORE))
    zeros = gl.zeros([HALF, _SIDE], gl.float32, layout=SUM)
    step, expert, first_tile, begin = 0, 0, 0, 0
    tile, count = gl.program_id(0), gl.load(expert_counts_ptr)
    expert, first_tile, begin, count = _find_expert(
        expert_counts_ptr, tile, expert, first_tile, begin, count, num_experts, TILES_N
    )
    while expert < num_experts:
        first_m = begin + (tile - first_tile) // TILES_N * _SIDE + CONSUMER * HALF
        tile_n, end = (tile - first_tile) % TILES_N, begin + count
        if first_m < end:
            places, store_places = first_m + offs_m, first_m + store_m
            valid, store_valid = places < end, store_places < end
            pairs = gl.load(sorted_token_ids_ptr + places, mask=valid, other=0)
            if DOWN:
                x_scale_ptrs = x_scale_ptr + places * K_BLOCKS
                topk_weight = gl.load(topk_weights_ptr + pairs, mask=valid, other=0.0)
                out_rows = gl.load(sorted_token_ids_ptr + store_places, mask=store_valid, other=0)
            else:
                x_scale_ptrs, out_rows = x_scale_ptr + pairs // TOP_K * K_BLOCKS, store_places
            w_scale_ptrs = w_scale_ptr + (expert * W_BLOCKS + tile_n * (N // _SIDE)) * K_BLOCKS
            next_scale = gl.load(x_scale_ptrs, mask=valid, other=0.0)
            next_first = gl.load(w_scale_ptrs)
            next_second = gl.load(w_scale_ptrs + APART * K_BLOCKS)
            first, second = zeros, zeros
            mbarrier.wait(full.index(step % _STAGES), (step // _STAGES) & 1)
            if not DOWN:
                fence_async_shared()  # cp.async and the tensor cores use different memory proxies
            for k in range(K_BLOCKS):
                scale, first_scale, second_scale = next_scale, next_first, next_second
                # Load the scales of the next step here: the fence below would wait for later loads.
                next_k = gl.minimum(k + 1, K_BLOCKS - 1)
                next_scale = gl.load(x_scale_ptrs + next_k, mask=valid, other=0.0)
                next_first = gl.load(w_scale_ptrs + next_k)
                next_second = gl.load(w_scale_ptrs + APART * K_BLOCKS + next_k)
                if DOWN:
                    scale *= topk_weight
                stage = step % _STAGES
                x = x_ring.index(stage).slice(CONSUMER * HALF, HALF, dim=0)
                w = w_ring.index(2 * stage).permute((1, 0))
                product = warpgroup_mma(x, w, zeros, use_acc=False, is_async=True)
                product = warpgroup_mma_wait(0, deps=[product])
                first += product * (scale * first_scale)[:, None]
                # Without this wait, ptxas adds after the next product and needs too many registers.
                first = warpgroup_mma_wait(0, deps=[first])
                w = w_ring.index(2 * stage + 1).permute((1, 0))
                product = warpgroup_mma(x, w, zeros, use_acc=False, is_async=True)
                step += 1
                mbarrier.wait(
                    full.index(step % _STAGES), (step // _STAGES) & 1, pred=k + 1 < K_BLOCKS
                )
                if not DOWN:
                    fence_async_shared()
                product = warpgroup_mma_wait(0, deps=[product])
                mbarrier.arrive(empty.index(stage), count=1)
                second += product * (scale * second_scale)[:, None]
            out_ptrs = out_ptr + out_rows.to(gl.int64)[:, None] * WIDTH + tile_n * N
            out_ptrs, inside = out_ptrs + store_n[None, :], store_valid[:, None]
            if DOWN:
                gl.store(out_ptrs, gl.convert_layout(first.to(dtype), STORE), mask=inside)
                second = gl.convert_layout(second.to(dtype), STORE)
                gl.store(out_ptrs + _SIDE, second, mask=inside)
            else:
                y = _swiglu(first, second, ACTIVATION)
                scale = _compute_group_scale(y, 1, dtype)
                gl.store(out_scale_ptr + places * TILES_N + tile_n, scale, mask=valid)
                y = gl.convert_layout((y / scale[:, None]).to(dtype), STORE)
                gl.store(out_ptrs, y, mask=inside)
        else:
            for _ in range(K_BLOCKS):
                mbarrier.wait(full.index(step % _STAGES), (step // _STAGES) & 1)
                mbarrier.arrive(empty.index(step % _STAGES), count=1)
                step += 1
        tile += gl.num_programs(0)
        expert, first_tile, begin, count = _find_expert(
            expert_counts_ptr, tile, expert, first_tile, begin, count, num_experts, TILES_N
        )
    if DOWN:  # Results of other ranks' pairs, which follow this rank's `begin` pairs, become 0.
        BLOCK_N: gl.constexpr = 1024
        offs_n = gl.arange(0, BLOCK_N, layout=gl.BlockedLayout([8], [32], [4], [0]))
        for place in range(
            begin + 2 * gl.program_id(0) + CONSUMER, num_pairs, 2 * gl.num_programs(0)
        ):
            row_ptr = out_ptr + gl.load(sorted_token_ids_ptr + place).to(gl.int64) * WIDTH
            for n in range(0, WIDTH, BLOCK_N):
                zero = gl.full([BLOCK_N], 0.0, dtype, layout=offs_n.type.layout)
                gl.store(row_ptr + n + offs_n, zero, mask=n + offs_n < WIDTH)


@gluon.jit(do_not_specialize=["num_pairs", "num_experts"])
def _specialized_large_m_kernel(
    x,  # [M, HIDDEN] e4m3; if DOWN, the descriptor of h [M * TOP_K, WIDTH] e4m3
    x_scale_ptr,  # [rows of x, columns of x / 128] fp32
    w,  # descriptor of e4m3 [num_experts * 2 * WIDTH, HIDDEN]; DOWN: [num_experts * HIDDEN, WIDTH]
    w_scale_ptr,  # [num_experts, rows of an expert / 128, columns of w / 128] fp32
    topk_weights_ptr,  # [M, TOP_K] fp32, read with DOWN only
    out_ptr,  # h in the order of sorted_token_ids; if DOWN, the output [M, TOP_K, HIDDEN]
    out_scale_ptr,  # [M * TOP_K, WIDTH / 128] fp32, written only without DOWN
    sorted_token_ids_ptr,  # [M * TOP_K] int32, indices of the pairs, sorted by expert
    expert_counts_ptr,  # [num_experts] int32, number of pairs of each expert
    num_pairs,
    num_experts,
    E: gl.constexpr, DOWN: gl.constexpr, TOP_K: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute h from x, or with DOWN the pairs' outputs times their routing weights from h."""
    x_ring = gl.allocate_shared_memory(w.dtype, [_STAGES, _SIDE, _SIDE], _SHARED_TILE)
    w_ring = gl.allocate_shared_memory(w.dtype, [2 * _STAGES, _SIDE, _SIDE], _SHARED_TILE)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        # TMA arrives once. Without DOWN, the producer's 128 threads also arrive, by cp.async.
        mbarrier.init(full.index(stage), 1 if DOWN else 129)
        mbarrier.init(empty.index(stage), 2)
    fence_async_shared()
    _wait_for_predecessor(PDL)
    _launch_dependents(PDL)
    gl.warp_specialize(
        [
            (_consume, (sorted_token_ids_ptr, expert_counts_ptr, x_ring, w_ring, full, empty,
                        num_experts, x_scale_ptr, w_scale_ptr, topk_weights_ptr, out_ptr,
                        out_scale_ptr, num_pairs, E, DOWN, TOP_K, 0)),
            (_consume, (sorted_token_ids_ptr, expert_counts_ptr, x_ring, w_ring, full, empty,
                        num_experts, x_scale_ptr, w_scale_ptr, topk_weights_ptr, out_ptr,
                        out_scale_ptr, num_pairs, E, DOWN, TOP_K, 1)),
            (_produce, (sorted_token_ids_ptr, expert_counts_ptr, x_ring, w_ring, full, empty,
                        num_experts, x, w, E, DOWN, TOP_K)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def experts_specialized(
    q: Tensor, scale: Tensor, prepared: PreparedExperts, topk_weights: Tensor,
    pairs: tuple[Tensor, Tensor], h: Tensor, h_scale: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """Write the experts' outputs of FP8 rows q [M, hidden] to out [M, top_k, hidden], and the
    intermediate result to h [M * top_k, width] with scales. `pairs` is the result of `sort_pairs`.
    """
    device, E, num_experts = q.device, prepared.constants, len(pairs[1])
    options = {
        "E": E, "TOP_K": out.shape[1], "CONSUMER_REGISTERS": _CONSUMER_REGISTERS,
        "PRODUCER_REGISTERS": _PRODUCER_REGISTERS, "num_warps": 4, **launch_options(device),
    }  # fmt: skip
    assert isinstance(prepared.gate_up, Tensor) and isinstance(prepared.down, Tensor)
    kernel = _specialized_large_m_kernel[(platform.platform_of(device).multiprocessors,)]
    side = [_SIDE.value, _SIDE.value]
    w1, w2, down_h = (
        TensorDescriptor.from_tensor(each, side, _TILE)
        for each in (prepared.gate_up.view(-1, E.HIDDEN), prepared.down.view(-1, E.WIDTH), h)
    )
    kernel(
        q, scale, w1, prepared.gate_up_scale, topk_weights, h, h_scale, *pairs, len(h), num_experts,
        DOWN=False, **options,
    )  # fmt: skip
    kernel(
        down_h, h_scale, w2, prepared.down_scale, topk_weights, out, h_scale, *pairs, len(h),
        num_experts, DOWN=True, **options,
    )  # fmt: skip
