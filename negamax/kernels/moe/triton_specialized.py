"""Experts of prefills with FP8 weights on Hopper, in Gluon (*large_m*). The sorted pairs and the
results are those of `triton_prefill.py`, bit for bit.

One program per multiprocessor computes tiles of 128 pairs of one expert and 256 rows of its weight,
one after another. A unit is one tile of gate and up, or a few neighboring tiles of down. A program
takes the next unit when it has loaded the unit before, because units take different times. Its
warps have three tasks and exchange blocks of 128 values of K through a ring of stages in shared
memory:

    producer     4 warps    takes units, sends their numbers through `queue`, waits for `empty`,
                            loads two tiles of w by TMA, and the rows of x by cp.async (down: h by
                            TMA); then `full` completes
    consumer 0   4 warps    waits for `full`, multiplies pairs 0 .. 63 of the tile, arrives at
    consumer 1   4 warps    `empty`; the same for pairs 64 .. 127

While one consumer adds its product to the sum in registers, the tensor cores multiply for the
other. A tile of 128 x 256 needs less bandwidth of shared memory and L2 than a 64 x 128 tile of
`triton_prefill.py`. For gate and up, the tiles of w are 128 gate rows and the matching up rows.

An expert's last tile may have 64 pairs or fewer. Both consumers then multiply these pairs, each
with half of the rows of both tiles of w.
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
from negamax.kernels.moe.triton_shared import ExpertConstants, PreparedExperts, compute_group_scale

# Both copy functions are named `async_load` from Triton 3.9 on.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_swiglu, _compute_group_scale, _wait_for_predecessor, _launch_dependents = (
    gluon.jit(each.fn)
    for each in (swiglu, compute_group_scale, wait_for_predecessor, launch_dependents)
)

SIDE = gl.constexpr(128)  # number of pairs per tile, rows per tile of w, and values of K per stage
LISTED = gl.constexpr(4)  # index of the first tile in the list of tiles
_STAGES = gl.constexpr(4)  # 48 KiB each
_DOWN_STEPS = 12  # largest number of blocks of K in a unit of down with more than one tile
_QUEUE = gl.constexpr(2)  # number of units that the producer sends ahead
_TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_SHARED_TILE = gl.constexpr(_TILE)
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_CONSUMER_REGISTERS = 232  # registers per thread: 128 for the sum, 64 for a product, and addresses
_PRODUCER_REGISTERS = 40


@gluon.jit
def _load_unit(tiles_ptr, unit, UNITS: gl.constexpr):
    """Return a unit's index among the UNITS units of its pairs << 56 | its entry in the list of
    tiles (`_list_tiles`), or 0 if there is no such unit.
    """
    is_listed = unit // UNITS < gl.load(tiles_ptr)
    entry = gl.load(tiles_ptr + LISTED + unit // UNITS, mask=is_listed, other=0)
    return gl.where(entry == 0, 0, entry | ((unit % UNITS).to(gl.int64) << 56))


@gluon.jit
def _produce(
    sorted_token_ids_ptr, tiles_ptr, x_ring, w_ring, full, empty, queue, sent, taken, x, w,
    E: gl.constexpr, DOWN: gl.constexpr, TOP_K: gl.constexpr, UNITS: gl.constexpr,
):  # fmt: skip
    """Take units until none is left. Send their numbers to consumers and load their operands."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    K: gl.constexpr = E.WIDTH if DOWN else E.HIDDEN
    W_ROWS: gl.constexpr = E.HIDDEN if DOWN else 2 * E.WIDTH
    N: gl.constexpr = 2 * SIDE if DOWN else SIDE  # columns of a tile's result
    APART: gl.constexpr = SIDE if DOWN else E.WIDTH  # row distance between the two tiles of w
    TILES: gl.constexpr = (E.HIDDEN if DOWN else E.WIDTH) // N // UNITS
    step, turn, is_more = 0, 0, True
    number = _load_unit(tiles_ptr, gl.program_id(0), UNITS)
    while is_more:
        slot = turn % _QUEUE
        mbarrier.wait(taken.index(slot), ((turn // _QUEUE) & 1) ^ 1)
        queue.index(slot).store(gl.full([1], number, gl.int64, layout=ONE))
        mbarrier.arrive(sent.index(slot), count=1)
        turn += 1
        is_more = number != 0
        if is_more:
            next_unit = gl.atomic_add(tiles_ptr + (3 if DOWN else 2), 1, sem="relaxed")
            first_m = ((number >> 8) & 0xFFFFFFFF).to(gl.int32)
            first_row = ((number >> 40) & 0xFFFF).to(gl.int32) * W_ROWS
            if not DOWN:
                places = gl.arange(0, SIDE, layout=gl.SliceLayout(1, LAYOUT))
                valid = places < (number & 0xFF).to(gl.int32)
                places += first_m
                tokens = gl.load(sorted_token_ids_ptr + places, mask=valid, other=0) // TOP_K
                offs_k = gl.arange(0, SIDE, layout=gl.SliceLayout(0, LAYOUT))
                x_ptrs = x + tokens.to(gl.int64)[:, None] * K + offs_k[None, :]
            first_tile = (number >> 56).to(gl.int32) * TILES
            for tile_n in range(first_tile, first_tile + TILES):
                w_row = first_row + tile_n * N
                for k in range(0, K, SIDE):
                    stage = step % _STAGES
                    ready = full.index(stage)
                    mbarrier.wait(empty.index(stage), ((step // _STAGES) & 1) ^ 1)
                    mbarrier.expect(ready, (3 if DOWN else 2) * SIDE * SIDE)
                    _load(w, [w_row, k], ready, w_ring.index(2 * stage))
                    _load(w, [w_row + APART, k], ready, w_ring.index(2 * stage + 1))
                    if DOWN:
                        _load(x, [first_m, k], ready, x_ring.index(stage))
                    else:
                        _copy(x_ring.index(stage), x_ptrs + k, mask=valid[:, None])
                        async_copy.mbarrier_arrive(ready, increment_count=False)
                    step += 1
            number = _load_unit(tiles_ptr, next_unit.to(gl.int32) + gl.num_programs(0), UNITS)


@gluon.jit
def _receive(queue, sent, taken, turn):
    """Wait for the number of the program's next unit."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slot = turn % _QUEUE
    mbarrier.wait(sent.index(slot), (turn // _QUEUE) & 1)
    number = gl.max(queue.index(slot).load(ONE), 0)
    mbarrier.arrive(taken.index(slot), count=1)
    return number


@gluon.jit
def _compute_tile(
    sorted_token_ids_ptr, x_ring, w_ring, maxima, full, empty, met, expert, first_m, end, tile_n,
    step, turn, x_scale_ptr, w_scale_ptr, topk_weights_ptr, out_ptr, out_scale_ptr,
    E: gl.constexpr, DOWN: gl.constexpr, TOP_K: gl.constexpr, CONSUMER: gl.constexpr,
    N: gl.constexpr,  # number of rows of each tile of w to multiply with: 128; 64 for <= 64 pairs
):  # fmt: skip
    """Compute 64 pairs sorted_token_ids[first_m:end] with N rows of both tiles of w -> next step.

    `turn` is the number of earlier tiles of this program with at most 64 pairs.
    """
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    ROW_THREADS: gl.constexpr = N // (8 if DOWN else 16)
    # A thread stores 16 bytes of the result, 8 or 16 values.
    STORE: gl.constexpr = gl.BlockedLayout(
        [1, 8 if DOWN else 16], [32 // ROW_THREADS, ROW_THREADS], [4, 1], [1, 0]
    )
    HALF: gl.constexpr = SIDE // 2
    FIRST_X: gl.constexpr = CONSUMER * HALF if N == SIDE else 0
    FIRST_N: gl.constexpr = 0 if N == SIDE else CONSUMER * HALF
    K_BLOCKS: gl.constexpr = (E.WIDTH if DOWN else E.HIDDEN) // SIDE
    W_BLOCKS: gl.constexpr = (E.HIDDEN if DOWN else 2 * E.WIDTH) // SIDE
    APART: gl.constexpr = (1 if DOWN else E.WIDTH // SIDE) * K_BLOCKS
    WIDTH: gl.constexpr = E.HIDDEN if DOWN else E.WIDTH
    COLUMNS: gl.constexpr = 2 * SIDE if DOWN else SIDE  # of a whole tile of the result
    ACTIVATION: gl.constexpr = E.ACTIVATION
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    places = first_m + gl.arange(0, HALF, layout=gl.SliceLayout(1, SUM))
    store_places = first_m + gl.arange(0, HALF, layout=gl.SliceLayout(1, STORE))
    store_n = tile_n * COLUMNS + FIRST_N + gl.arange(0, N, layout=gl.SliceLayout(0, STORE))
    valid, store_valid = places < end, store_places < end
    pairs = gl.load(sorted_token_ids_ptr + places, mask=valid, other=0)
    if DOWN:
        x_scale_ptrs = x_scale_ptr + places * K_BLOCKS
        topk_weight = gl.load(topk_weights_ptr + pairs, mask=valid, other=0.0)
        out_rows = gl.load(sorted_token_ids_ptr + store_places, mask=store_valid, other=0)
    else:
        x_scale_ptrs, out_rows = x_scale_ptr + pairs // TOP_K * K_BLOCKS, store_places
    w_scale_ptrs = w_scale_ptr + (expert * W_BLOCKS + tile_n * (COLUMNS // SIDE)) * K_BLOCKS
    next_scale = gl.load(x_scale_ptrs, mask=valid, other=0.0)
    next_first, next_second = gl.load(w_scale_ptrs), gl.load(w_scale_ptrs + APART)
    zeros = gl.zeros([HALF, N], gl.float32, layout=SUM)
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
        next_second = gl.load(w_scale_ptrs + APART + next_k)
        if DOWN:
            scale *= topk_weight
        stage = step % _STAGES
        x = x_ring.index(stage).slice(FIRST_X, HALF, dim=0)
        w = w_ring.index(2 * stage).slice(FIRST_N, N, dim=0).permute((1, 0))
        product = warpgroup_mma(x, w, zeros, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=[product])
        first += product * (scale * first_scale)[:, None]
        # Without this wait, ptxas adds after the next product and needs too many registers.
        first = warpgroup_mma_wait(0, deps=[first])
        w = w_ring.index(2 * stage + 1).slice(FIRST_N, N, dim=0).permute((1, 0))
        product = warpgroup_mma(x, w, zeros, use_acc=False, is_async=True)
        step += 1
        mbarrier.wait(full.index(step % _STAGES), (step // _STAGES) & 1, pred=k + 1 < K_BLOCKS)
        if not DOWN:
            fence_async_shared()
        product = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(empty.index(stage), count=1)
        second += product * (scale * second_scale)[:, None]
    out_ptrs = out_ptr + out_rows.to(gl.int64)[:, None] * WIDTH + store_n[None, :]
    inside = store_valid[:, None]
    if DOWN:
        gl.store(out_ptrs, gl.convert_layout(first.to(dtype), STORE), mask=inside)
        gl.store(out_ptrs + SIDE, gl.convert_layout(second.to(dtype), STORE), mask=inside)
    else:
        y = _swiglu(first, second, ACTIVATION)
        scale = _compute_group_scale(y, 1, dtype)
        if N < SIDE:  # The other consumer has the other columns of the same group.
            own = 2 * (turn & 1)
            maxima.index(own + CONSUMER).store(scale)
            mbarrier.arrive(met.index(CONSUMER), count=1)
            mbarrier.wait(met.index(1 - CONSUMER), turn & 1)
            scale = gl.maximum(scale, maxima.index(own + 1 - CONSUMER).load(scale.type.layout))
        gl.store(out_scale_ptr + places * (WIDTH // SIDE) + tile_n, scale, mask=valid)
        y = gl.convert_layout((y / scale[:, None]).to(dtype), STORE)
        gl.store(out_ptrs, y, mask=inside)
    return step


@gluon.jit
def _consume(
    sorted_token_ids_ptr, tiles_ptr, x_ring, w_ring, maxima, full, empty, met, queue, sent, taken,
    x_scale_ptr, w_scale_ptr, topk_weights_ptr, out_ptr, out_scale_ptr, num_pairs,
    E: gl.constexpr, DOWN: gl.constexpr, TOP_K: gl.constexpr, UNITS: gl.constexpr,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """Compute half of each tile: the pairs from 64 * CONSUMER on, or if the tile has at most 64
    pairs, the rows of both tiles of w from 64 * CONSUMER on.
    """
    WIDTH: gl.constexpr = E.HIDDEN if DOWN else E.WIDTH
    HALF: gl.constexpr = SIDE // 2
    TILES: gl.constexpr = WIDTH // (2 * SIDE if DOWN else SIDE) // UNITS
    step, turn, few_turn = 0, 0, 0
    number = _receive(queue, sent, taken, turn)
    tile_n = (number >> 56).to(gl.int32) * TILES
    while number != 0:
        expert = ((number >> 40) & 0xFFFF).to(gl.int32)
        first_m, size = ((number >> 8) & 0xFFFFFFFF).to(gl.int32), (number & 0xFF).to(gl.int32)
        end = first_m + size
        if size > HALF:
            step = _compute_tile(
                sorted_token_ids_ptr, x_ring, w_ring, maxima, full, empty, met, expert,
                first_m + CONSUMER * HALF, end, tile_n, step, few_turn, x_scale_ptr, w_scale_ptr,
                topk_weights_ptr, out_ptr, out_scale_ptr, E, DOWN, TOP_K, CONSUMER, SIDE,
            )  # fmt: skip
        else:
            step = _compute_tile(
                sorted_token_ids_ptr, x_ring, w_ring, maxima, full, empty, met, expert,
                first_m, end, tile_n, step, few_turn, x_scale_ptr, w_scale_ptr,
                topk_weights_ptr, out_ptr, out_scale_ptr, E, DOWN, TOP_K, CONSUMER, HALF,
            )  # fmt: skip
            few_turn += 1
        tile_n += 1
        if tile_n % TILES == 0:
            turn += 1
            number = _receive(queue, sent, taken, turn)
            tile_n = (number >> 56).to(gl.int32) * TILES
    if DOWN:  # Results of other ranks' pairs, which follow this rank's pairs, become 0.
        BLOCK_N: gl.constexpr = 1024
        offs_n = gl.arange(0, BLOCK_N, layout=gl.BlockedLayout([8], [32], [4], [0]))
        dtype: gl.constexpr = out_ptr.dtype.element_ty
        begin = gl.load(tiles_ptr + 1).to(gl.int32) + 2 * gl.program_id(0) + CONSUMER
        for place in range(begin, num_pairs, 2 * gl.num_programs(0)):
            row_ptr = out_ptr + gl.load(sorted_token_ids_ptr + place).to(gl.int64) * WIDTH
            for n in range(0, WIDTH, BLOCK_N):
                zero = gl.full([BLOCK_N], 0.0, dtype, layout=offs_n.type.layout)
                gl.store(row_ptr + n + offs_n, zero, mask=n + offs_n < WIDTH)


@gluon.jit(do_not_specialize=["num_pairs"])
def _specialized_large_m_kernel(
    x,  # [M, HIDDEN] e4m3; if DOWN, the descriptor of h [M * TOP_K, WIDTH] e4m3
    x_scale_ptr,  # [rows of x, columns of x / 128] fp32
    w,  # descriptor of e4m3 [num_experts * 2 * WIDTH, HIDDEN]; DOWN: [num_experts * HIDDEN, WIDTH]
    w_scale_ptr,  # [num_experts, rows of an expert / 128, columns of w / 128] fp32
    topk_weights_ptr,  # [M, TOP_K] fp32, read with DOWN only
    out_ptr,  # h in the order of sorted_token_ids; if DOWN, the output [M, TOP_K, HIDDEN]
    out_scale_ptr,  # [M * TOP_K, WIDTH / 128] fp32, written only without DOWN
    sorted_token_ids_ptr,  # [M * TOP_K] int32, indices of the pairs, sorted by expert
    tiles_ptr,  # int64, list of tiles (`_list_tiles`); the zeros before the tiles count units taken
    num_pairs,
    E: gl.constexpr, DOWN: gl.constexpr, TOP_K: gl.constexpr, UNITS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute h from x, or with DOWN the pairs' outputs times their routing weights from h."""
    x_ring = gl.allocate_shared_memory(w.dtype, [_STAGES, SIDE, SIDE], _SHARED_TILE)
    w_ring = gl.allocate_shared_memory(w.dtype, [2 * _STAGES, SIDE, SIDE], _SHARED_TILE)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    maxima = gl.allocate_shared_memory(gl.float32, [4, SIDE // 2], _VECTOR)
    met = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    queue = gl.allocate_shared_memory(gl.int64, [_QUEUE, 1], _VECTOR)
    sent = gl.allocate_shared_memory(gl.int64, [_QUEUE, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [_QUEUE, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        # TMA arrives once. Without DOWN, the producer's 128 threads also arrive, by cp.async.
        mbarrier.init(full.index(stage), 1 if DOWN else 129)
        mbarrier.init(empty.index(stage), 2)
    for index in gl.static_range(2):
        mbarrier.init(met.index(index), 1)
        mbarrier.init(sent.index(index), 1)
        mbarrier.init(taken.index(index), 2)
    fence_async_shared()
    _wait_for_predecessor(PDL)
    _launch_dependents(PDL)
    gl.warp_specialize(
        [
            (_consume, (sorted_token_ids_ptr, tiles_ptr, x_ring, w_ring, maxima, full, empty, met,
                        queue, sent, taken, x_scale_ptr, w_scale_ptr, topk_weights_ptr, out_ptr,
                        out_scale_ptr, num_pairs, E, DOWN, TOP_K, UNITS, 0)),
            (_consume, (sorted_token_ids_ptr, tiles_ptr, x_ring, w_ring, maxima, full, empty, met,
                        queue, sent, taken, x_scale_ptr, w_scale_ptr, topk_weights_ptr, out_ptr,
                        out_scale_ptr, num_pairs, E, DOWN, TOP_K, UNITS, 1)),
            (_produce, (sorted_token_ids_ptr, tiles_ptr, x_ring, w_ring, full, empty,
                        queue, sent, taken, x, w, E, DOWN, TOP_K, UNITS)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def _units_of_down(E: ExpertConstants) -> int:
    """Return the number of units into which down divides the columns of a tile's pairs."""
    tiles_n, steps = E.HIDDEN // (2 * SIDE.value), E.WIDTH // SIDE.value
    return min(
        units
        for units in range(1, tiles_n + 1)
        if tiles_n % units == 0 and (tiles_n // units * steps <= _DOWN_STEPS or units == tiles_n)
    )


def experts_specialized(
    q: Tensor, scale: Tensor, prepared: PreparedExperts, topk_weights: Tensor,
    pairs: tuple[Tensor, Tensor], h: Tensor, h_scale: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """Write the experts' outputs of FP8 rows q [M, hidden] to out [M, top_k, hidden], and the
    intermediate result to h [M * top_k, width] with scales. `pairs` is the result of `sort_pairs`,
    with a list of tiles.
    """
    device, E = q.device, prepared.constants
    options = {
        "E": E, "TOP_K": out.shape[1], "CONSUMER_REGISTERS": _CONSUMER_REGISTERS,
        "PRODUCER_REGISTERS": _PRODUCER_REGISTERS, "num_warps": 4, **launch_options(device),
    }  # fmt: skip
    assert isinstance(prepared.gate_up, Tensor) and isinstance(prepared.down, Tensor)
    kernel = _specialized_large_m_kernel[(platform.platform_of(device).multiprocessors,)]
    side = [SIDE.value, SIDE.value]
    w1, w2, down_h = (
        TensorDescriptor.from_tensor(each, side, _TILE)
        for each in (prepared.gate_up.view(-1, E.HIDDEN), prepared.down.view(-1, E.WIDTH), h)
    )
    kernel(
        q, scale, w1, prepared.gate_up_scale, topk_weights, h, h_scale, *pairs, len(h),
        DOWN=False, UNITS=E.WIDTH // SIDE.value, **options,
    )  # fmt: skip
    kernel(
        down_h, h_scale, w2, prepared.down_scale, topk_weights, out, h_scale, *pairs,
        len(h), DOWN=True, UNITS=_units_of_down(E), **options,
    )  # fmt: skip
