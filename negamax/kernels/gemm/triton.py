"""Products with FP8-block and 16-bit weights on NVIDIA GPUs, in Triton.

Few tokens: the time is that of reading the weight once, 1 byte per FP8 weight and 2 per 16-bit one,
and of starting up. Then

- one token: no tensor cores, plain activations. A program owns a few rows of the weight, fetches
  all their columns before it uses the first, and sums in fp32 registers;
- few tokens: a program has 16 rows of the weight and each of its warps its share of the blocks of
  128 columns (a batched product whose batch is the warps), all of it in registers before the kernel
  before this one has ended. All programs run at once, so a weight of up to 25 MB arrives while the
  GPU computes a norm or attention;
- more: tiles of the weight are the tall operand of the tensor cores and the tokens the short one.
  Where that leaves multiprocessors idle, programs share the columns of a tile and the last to
  arrive adds up, in a fixed order;
- many: tokens are the tall operand, and both come through the tensor memory accelerator; from some
  size on cuBLAS.

FP8 weights meet FP8 activations in all but the first: the tensor cores add up 128 columns, then the
sum takes the scales of the block and of the token's 128 columns and is added in fp32. Measured:
||error|| / ||y|| 1.7e-3 with bf16 results, which is their rounding, and 2.6e-4 with fp16 ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from negamax.kernels import platform
from negamax.kernels.activations import GROUP, QuantizedActivations, model_dtype, unquantized
from negamax.kernels.formats import (
    E4M3_BLOCKS,
    E4M3_GROUPS,
    KEPT_FORMATS,
    PLAIN,
    StoredWeight,
    reads_e4m3_blocks,
)
from negamax.kernels.gemm import cublas, tiles
from negamax.kernels.launch.ptx import launch_dependents, wait_for_predecessor
from negamax.kernels.launch.triton import launch_options, wait_for_inputs, wait_then_start_next
from negamax.kernels.op import AnyKernel, Kernel
from negamax.kernels.platform import Feature
from negamax.kernels.quantize import triton as quantize
from negamax.kernels.quantize.native import to_native
from negamax.kernels.signatures import LINEAR

_BLOCK: tl.constexpr = tl.constexpr(GROUP)  # columns that share a scale
_VECTOR: tl.constexpr = tl.constexpr(16)  # FP8 weights of one load of a thread


@dataclass(frozen=True)
class PreparedLinear:
    """A weight [N, K] as stored, contiguous, and with FP8 what belongs to it."""

    weight: Tensor  # e4m3, bf16 or fp16
    scale: Tensor | None  # [ceil(N / 128), K / 128] fp32; None: 16-bit weights
    # [multiprocessors] int32, how many programs of a tile are done; zero between calls
    arrivals: Tensor


@triton.jit
def _dot_products(
    x,  # [K]
    weight,  # [N, K] e4m3
    scale,  # [ceil(N / 128), K / 128] fp32
    out,  # [N]
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    LEVELS: tl.constexpr,  # log2 of ROWS
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)  # this early: what the next kernel fetches at its start is a weight, too
    span: tl.constexpr = THREADS * _VECTOR
    steps: tl.constexpr = (K + span - 1) // span
    first = tl.program_id(0) * ROWS
    thread = tl.arange(0, THREADS)
    columns = thread[:, None] * _VECTOR + tl.arange(0, _VECTOR)[None, :]
    tiles = ()
    for i in tl.static_range(steps):
        for row in tl.static_range(ROWS):
            at = weight + tl.minimum(first + row, N - 1).to(tl.int64) * K + i * span + columns
            if i * span + span <= K:
                tiles += (tl.load(at),)
            else:
                tiles += (tl.load(at, mask=columns < K - i * span, other=0.0),)
    factors = ()
    for i in tl.static_range(steps):
        column = i * span + thread * _VECTOR
        at = scale + (first // _BLOCK) * (K // _BLOCK) + column // _BLOCK
        factors += (tl.load(at, mask=column < K, other=0.0),)
    wait_for_predecessor(PDL)
    sums = ()
    for _ in tl.static_range(ROWS):
        sums += (tl.zeros((THREADS,), tl.float32),)
    for i in tl.static_range(steps):
        more = ()
        values = tl.load(x + i * span + columns, mask=columns < K - i * span, other=0.0).to(
            tl.float32
        )
        for row in tl.static_range(ROWS):
            more += (
                sums[row]
                + tl.sum(tiles[i * ROWS + row].to(tl.float32) * values, axis=1) * factors[i],
            )
        sums = more
    # One reduction over the threads for all rows: [threads, 2, 2, ...]
    for level in tl.static_range(LEVELS):
        more = ()
        for i in tl.static_range(ROWS >> (level + 1)):
            more += (tl.join(sums[i], sums[i + (ROWS >> (level + 1))]),)
        sums = more
    y = tl.reshape(tl.sum(sums[0], axis=0), (ROWS,))
    row = first + tl.arange(0, ROWS)
    tl.store(out + row, y.to(out.dtype.element_ty), mask=row < N)


# What a step of `_few_tokens` takes from a matrix of FP8 rows, ROWS of them and 128 columns for
# each warp, is fetched as [8, WARPS, 2, ROWS / 8, 64]: a thread has 16 neighbouring columns, four
# THREADS 64, and eight times four 8 rows. The tensor cores give a thread the same row but other
# columns. The order of the columns is no matter as long as weights and activations share it, so
# they are renumbered: every thread multiplies what it fetched, and nothing passes through shared
# memory.


@triton.jit
def _step_rows(ROWS: tl.constexpr):
    """[8, 1, 1, ROWS / 8, 1]"""
    return (tl.arange(0, 8)[:, None] + tl.arange(0, ROWS // 8)[None, :] * 8)[:, None, None, :, None]


@triton.jit
def _step_columns(WARPS: tl.constexpr):
    """[1, WARPS, 2, 1, 64]"""
    halves = tl.arange(0, WARPS)[:, None] * _BLOCK + tl.arange(0, 2)[None, :] * (_BLOCK // 2)
    return (halves[:, :, None] + tl.arange(0, _BLOCK // 2)[None, None, :])[None, :, :, None, :]


@triton.jit
def _fetch(at, i: tl.constexpr, K: tl.constexpr, WARPS: tl.constexpr):
    """Step i of the K columns of the rows at `at`; the last one may not have a block for every
    warp.
    """
    if (i + 1) * (WARPS * _BLOCK) <= K:
        fetched = tl.load(at + i * (WARPS * _BLOCK))
    else:
        fetched = tl.load(
            at + i * (WARPS * _BLOCK),
            mask=_step_columns(WARPS) < K - i * (WARPS * _BLOCK),
            other=0.0,
        )
    return fetched


@triton.jit
def _operand(fetched, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """[8, WARPS, 2, ROWS / 8, 64] -> [WARPS, ROWS, 128], the columns of each half in the order of
    the tensor cores' threads.
    """
    pieces = tl.reshape(fetched, (8, WARPS, 2, ROWS // 8, 4, 4, 4))
    return tl.reshape(tl.permute(pieces, (1, 3, 0, 2, 5, 4, 6)), (WARPS, ROWS, _BLOCK))


@triton.jit(do_not_specialize=["num_tokens"])
def _few_tokens(
    values,  # [T, K] e4m3
    scales,  # [T, K / 128] fp32
    weight,  # [N, K] e4m3
    scale,  # [ceil(N / 128), K / 128] fp32
    out,  # [T, N]
    num_tokens,
    N,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)  # as early as in `_dot_products`
    blocks: tl.constexpr = K // _BLOCK
    steps: tl.constexpr = (blocks + WARPS - 1) // WARPS
    first = tl.program_id(0) * ROWS
    rows = first + tl.arange(0, ROWS)
    tokens = tl.arange(0, TOKENS)
    warp = tl.arange(0, WARPS)
    weights_at = (
        weight + tl.minimum(first + _step_rows(ROWS), N - 1).to(tl.int64) * K + _step_columns(WARPS)
    )
    scale_at = scale + (first // _BLOCK) * blocks + warp
    weights, weight_scales = (), ()
    for i in tl.static_range(steps):
        weights += (_fetch(weights_at, i, K, WARPS),)
        weight_scales += (tl.load(scale_at + i * WARPS, mask=warp < blocks - i * WARPS, other=0.0),)
    wait_for_predecessor(PDL)
    # Past the end from the start again: many reads of one row would wait for each other, and masks
    # take registers
    values_at = values + _step_rows(TOKENS) % num_tokens * K + _step_columns(WARPS)
    scales_at = scales + (tokens % num_tokens)[None, :] * blocks + warp[:, None]
    acc = tl.zeros((WARPS, ROWS, TOKENS), tl.float32)
    for i in tl.static_range(steps):
        x = tl.permute(_operand(_fetch(values_at, i, K, WARPS), TOKENS, WARPS), (0, 2, 1))
        factor = tl.load(
            scales_at + i * WARPS, mask=(warp < blocks - i * WARPS)[:, None], other=0.0
        )
        factor *= weight_scales[i][:, None]
        acc += tl.dot(_operand(weights[i], ROWS, WARPS), x) * factor[:, None, :]
    y = tl.sum(acc, axis=0)
    inside = (tokens < num_tokens)[None, :] & (rows < N)[:, None]
    tl.store(out + tokens[None, :] * N + rows[:, None], y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _narrow(
    x,  # [T, K], e4m3 if FP8, else the dtype of the weight
    scales,  # [T, K / 128] fp32; `scales` and `scale` are not read unless FP8
    weight,  # [N, K]
    scale,  # [ceil(N / 128), K / 128] fp32
    out,  # [T, N]
    parts,  # [tiles, SPLITS, ROWS, TOKENS] fp32, unless SPLITS == 1
    arrivals,  # [tiles] int32, zero
    num_tokens,
    N,
    K,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    FP8: tl.constexpr,
    WHOLE: tl.constexpr,  # whether K is a multiple of COLUMNS
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    rows = first + tl.arange(0, ROWS)
    tokens = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    # past the end from the start again: many reads of one row would wait for each other
    token = tokens % num_tokens
    columns = tl.arange(0, COLUMNS)
    steps = tl.cdiv(K, COLUMNS)
    share = tl.cdiv(steps, SPLITS)
    start = tl.program_id(1) * share
    stop = tl.minimum(start + share, steps)
    weights_at = weight + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * K + columns[None, :]
    x_at = x + token[None, :] * K + columns[:, None]
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    if FP8:
        # this order gains up to 1.3 us for qkv and o_proj; for the head it has not been measured
        wait_for_inputs(PDL)
        scale += (first // _BLOCK) * steps
        scales_at = scales + token * steps
        factor = tl.load(scale + tl.minimum(start, steps - 1)) * tl.load(
            scales_at + tl.minimum(start, steps - 1)
        )
    else:
        wait_then_start_next(PDL)
    for step in range(start, stop):
        if WHOLE:
            w = tl.load(weights_at + step * COLUMNS)
            v = tl.load(x_at + step * COLUMNS)
        else:
            inside = columns < K - step * COLUMNS
            w = tl.load(weights_at + step * COLUMNS, mask=inside[None, :], other=0.0)
            v = tl.load(x_at + step * COLUMNS, mask=inside[:, None], other=0.0)
        if FP8:
            # its scales arrive while this step computes
            following = tl.minimum(step + 1, steps - 1)
            next_factor = tl.load(scale + following) * tl.load(scales_at + following)
            acc += tl.dot(w, v) * factor[None, :]
            factor = next_factor
        else:
            acc = tl.dot(w.to(DOT_DTYPE), v.to(DOT_DTYPE), acc)
    out_at = out + tokens.to(tl.int64)[:, None] * N + rows[None, :]
    inside = (tokens < num_tokens)[:, None] & (rows < N)[None, :]
    if SPLITS == 1:
        tl.store(out_at, tl.trans(acc).to(out.dtype.element_ty), mask=inside)
    else:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        part_at = parts + tile * (SPLITS * ROWS * TOKENS)
        part_at += tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        tl.store(part_at + tl.program_id(1) * (ROWS * TOKENS), acc)
        tl.debug_barrier()  # all threads have written before one of them reports
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros((ROWS, TOKENS), tl.float32)
            for part in tl.static_range(SPLITS):
                total += tl.load(part_at + part * (ROWS * TOKENS), cache_modifier=".cg")
            tl.store(out_at, tl.trans(total).to(out.dtype.element_ty), mask=inside)
            tl.store(arrivals + tile, 0)


@triton.jit(do_not_specialize=["num_tokens"])
def _wide(
    values,  # descriptor of [T, K] e4m3, blocks [TOKENS, 128]
    scales,  # [T, K / 128] fp32
    weight,  # descriptor of [N, K] e4m3, blocks [ROWS, 128]
    scale,  # [ceil(N / 128), K / 128] fp32
    out,  # [T, N]
    num_tokens,
    N,
    K,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    row_tiles = tl.cdiv(N, ROWS)
    span = GROUP_TILES * row_tiles
    first_tile = tl.program_id(0) // span * GROUP_TILES
    group_tiles = tl.minimum(tl.cdiv(num_tokens, TOKENS) - first_tile, GROUP_TILES)
    first_token = (first_tile + tl.program_id(0) % span % group_tiles) * TOKENS
    first_row = tl.program_id(0) % span // group_tiles * ROWS
    tokens = first_token + tl.arange(0, TOKENS)
    rows = first_row + tl.arange(0, ROWS)
    blocks = K // _BLOCK
    scales_at = scales + tl.minimum(tokens, num_tokens - 1) * blocks
    scale += first_row // _BLOCK * blocks
    acc = tl.zeros((TOKENS, ROWS), tl.float32)
    wait_for_inputs(PDL)
    for block in range(blocks):
        x = values.load([first_token, block * _BLOCK])
        w = weight.load([first_row, block * _BLOCK])
        factor = tl.load(scales_at + block) * tl.load(scale + block)
        acc += tl.dot(x, w.T) * factor[:, None]
    inside = (tokens < num_tokens)[:, None] & (rows < N)[None, :]
    tl.store(
        out + tokens.to(tl.int64)[:, None] * N + rows[None, :],
        acc.to(out.dtype.element_ty),
        mask=inside,
    )


def prepare(weight: StoredWeight) -> PreparedLinear:
    """weight [N, K], plain in the activations' dtype, or E4M3 blocks with K a multiple of 128."""
    values, scale = weight.values, None
    if weight.format is not PLAIN:
        columns = values.shape[1]
        assert columns % GROUP == 0, (
            f"FP8 weights need a multiple of {GROUP} columns, not {columns}"
        )
        values, scale = to_native(values, weight.scale.contiguous())
    multiprocessors = tiles.tiles_for(values.device).multiprocessors
    arrivals = torch.zeros(multiprocessors, dtype=torch.int32, device=values.device)
    return PreparedLinear(values.contiguous(), scale, arrivals)


def linear(
    x: Tensor | QuantizedActivations,
    prepared: PreparedLinear,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [T, K] -> x W^T [T, N] in `out_dtype` (None: that of the plain activations), rounded once
    from fp32 sums.

    `out`: contiguous, of that shape and dtype; for 16-bit weights.
    """
    dtype = out_dtype or model_dtype(x)
    num_tokens, rows = (
        (x.q if isinstance(x, QuantizedActivations) else x).shape[0],
        prepared.weight.shape[0],
    )
    if num_tokens == 0:
        return prepared.weight.new_empty((0, rows), dtype=dtype)
    if prepared.scale is None:
        values = unquantized(x).contiguous()
        if num_tokens > tiles.NARROW_TOKENS_16BIT:
            product = cublas.linear(values, prepared.weight, out_dtype=dtype)
            return product if out is None else out.copy_(product)
        out = values.new_empty((num_tokens, rows), dtype=dtype) if out is None else out
        tile = tiles.tiles_for(values.device).narrow_16bit(num_tokens)
        _launch_narrow(values, None, prepared, out, tile=tile)
        return out
    assert out is None, "products with FP8 weights make their own result"
    if num_tokens > tiles.DOT_TOKENS and not isinstance(x, QuantizedActivations):
        x = quantize.rows(x.contiguous())
    if (
        isinstance(x, QuantizedActivations)
        and dtype is torch.bfloat16
        and Feature.CUBLAS_BLOCK_FP8 in platform.platform_of(x.q.device).features
        and tiles.cublas_is_faster(num_tokens, prepared.weight.numel())
    ):
        return cublas.linear_blocks(x, prepared.weight, prepared.scale)
    out = prepared.weight.new_empty((num_tokens, rows), dtype=dtype)
    _multiply_fp8(x, prepared, prepared.scale, out)
    return out


def _multiply_fp8(
    x: Tensor | QuantizedActivations, prepared: PreparedLinear, scale: Tensor, out: Tensor
) -> None:
    """out = x W^T with the kernel for its sizes; more than DOT_TOKENS are
    `QuantizedActivations`."""
    weight = prepared.weight
    (num_tokens, rows), columns = out.shape, weight.shape[1]
    options, here = launch_options(out.device), platform.platform_of(out.device)
    sizes = tiles.tiles_for(out.device)
    if num_tokens <= tiles.DOT_TOKENS:
        dots = sizes.dot_products(columns)
        _dot_products[(triton.cdiv(rows, dots.rows),)](
            unquantized(x).contiguous(), weight, scale, out, rows,
            K=columns, ROWS=dots.rows, LEVELS=dots.rows.bit_length() - 1,
            THREADS=dots.warps * here.warp_size, num_warps=dots.warps, **options,
        )  # fmt: skip
        return
    assert isinstance(x, QuantizedActivations)
    assert x.q.is_contiguous() and x.scale.is_contiguous(), (
        "activations are read as they lie in memory"
    )
    if few := sizes.few_tokens(num_tokens=num_tokens, rows=rows, columns=columns):
        _few_tokens[(triton.cdiv(rows, few.rows),)](
            x.q, x.scale, weight, scale, out, num_tokens, rows,
            K=columns, TOKENS=few.tokens, ROWS=few.rows, WARPS=few.warps, num_warps=few.warps,
            **launch_options(out.device, registers=few.registers),
        )  # fmt: skip
    elif num_tokens > tiles.NARROW_TOKENS and (
        tile := sizes.wide(num_tokens=num_tokens, rows=rows)
    ):
        _wide[(triton.cdiv(rows, tile.rows) * triton.cdiv(num_tokens, tile.tokens),)](
            TensorDescriptor.from_tensor(x.q, [tile.tokens, tile.columns]), x.scale,
            TensorDescriptor.from_tensor(weight, [tile.rows, tile.columns]), scale, out, num_tokens,
            rows, columns,
            TOKENS=tile.tokens, ROWS=tile.rows, GROUP_TILES=tiles.WIDE_GROUP, num_warps=tile.warps,
            num_stages=tile.stages,
            **(options if weight.numel() <= tiles.DEPENDENT_WIDE_WEIGHTS else {"PDL": False}),
        )  # fmt: skip
    else:
        tile = sizes.narrow(num_tokens=num_tokens, rows=rows, columns=columns)
        _launch_narrow(x.q, x.scale, prepared, out, tile=tile)


def _launch_narrow(
    x: Tensor, scales: Tensor | None, prepared: PreparedLinear, out: Tensor, *, tile: tiles.Tile
) -> None:
    (num_tokens, rows), columns = out.shape, x.shape[1]
    grid = (triton.cdiv(rows, tile.rows), tile.splits, triton.cdiv(num_tokens, tile.tokens))
    fp8, parts = scales is not None, out
    if tile.splits > 1:
        parts = out.new_empty(
            (grid[0] * grid[2], tile.splits, tile.rows, tile.tokens), dtype=torch.float32
        )
        assert grid[0] * grid[2] <= prepared.arrivals.shape[0], grid
    _narrow[grid](
        x, scales if fp8 else out, prepared.weight, prepared.scale if fp8 else out, out, parts,
        prepared.arrivals,
        num_tokens, rows, columns,
        ROWS=tile.rows, TOKENS=tile.tokens, COLUMNS=tile.columns, SPLITS=tile.splits, FP8=fp8,
        WHOLE=columns % tile.columns == 0, DOT_DTYPE=_dot_dtype(x.dtype), num_warps=tile.warps,
        num_stages=tile.stages,
        **launch_options(out.device),
    )  # fmt: skip


def _dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """What `tl.dot` multiplies: the operands' own dtype, but fp32 in the interpreter, whose bf16
    products are wrong.
    """
    if triton.knobs.runtime.interpret:
        return tl.float32
    return tl.bfloat16 if dtype is torch.bfloat16 else tl.float16


_GPU = frozenset({Feature.TRITON})
_DTYPES = (torch.bfloat16, torch.float16)
KERNELS: tuple[AnyKernel, ...] = (
    Kernel(LINEAR, "triton", linear, prepare, requires=_GPU, dtypes=_DTYPES),
    Kernel(
        LINEAR, "triton", linear, prepare, requires=KEPT_FORMATS[E4M3_BLOCKS],
        dtypes=_DTYPES, reads=reads_e4m3_blocks, activation=E4M3_GROUPS,
    ),
)  # fmt: skip
