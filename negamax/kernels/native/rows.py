"""Implement ops by calls of `rows.c`, on contiguous bf16 or fp32 tensors of the CPU."""

import ctypes
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from negamax.kernels.activations import Hidden, SwiGlu, unquantized
from negamax.kernels.attention import cpu as attention_cpu
from negamax.kernels.attention import op as attention
from negamax.kernels.attention.metadata import AttentionMetadata, PagedShape
from negamax.kernels.attention.op import (
    DECODE,
    HEAD_NORM_ROPE_WRITE,
    QK_NORM_ROPE_WRITE,
    HeadNorm,
    QkNorm,
    prepare_qk_norm,
)
from negamax.kernels.block_sparse import op as block_sparse
from negamax.kernels.block_sparse.cpu import (
    PagedDecode,
    ScoredTokens,
    attention_kernels,
    products,
    select_kernels,
)
from negamax.kernels.block_sparse.op import BLOCK_SPARSE_NORM_ROPE_WRITE, SparseHeadNorm
from negamax.kernels.kvcache.op import KvCache, TokenPlaces
from negamax.kernels.mlp.op import SWIGLU
from negamax.kernels.moe import cpu as moe_cpu
from negamax.kernels.moe.cpu import SeparateExperts
from negamax.kernels.moe.op import EXPERTS, ROUTE, Router, SelectedExperts, complete
from negamax.kernels.native import library
from negamax.kernels.norm import op as norm_spec
from negamax.kernels.norm.op import ADD_RMS, NormWeight, sum_parts
from negamax.kernels.op import AnyKernel, Kernel, Op, P, R
from negamax.kernels.peers import Collective

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "add_rms": (*[_POINTER] * 4, _INT, _INT, _FLOAT, _INT),
    "qk_norm_rope_write": (*[_POINTER] * 8, *[_INT] * 5, _FLOAT),
    "head_norm_rope_write": (*[_POINTER] * 11, *[_INT] * 7, _FLOAT, *[_INT] * 3),
    "decode": (*[_POINTER] * 6, *[_INT] * 6),
    "block_scores": (*[_POINTER] * 5, *[_INT] * 7),
    "route": (*[_POINTER] * 5, *[_INT] * 4),
    "swiglu": (*[_POINTER] * 2, *[_INT] * 2, *[_FLOAT] * 3),
    "group_pairs": (*[_POINTER] * 4, *[_INT] * 4),
    "combine": (*[_POINTER] * 4, *[_INT] * 3),
}


@cache
def _function(name: str, dtype: torch.dtype) -> Callable[..., None]:
    loaded = library.load(fp32=dtype is torch.float32)
    assert loaded is not None, "the C library did not load, so its kernels must not be called"
    function = loaded[f"negamax_{name}"]
    function.argtypes, function.restype = _ARGUMENTS[name], None
    return function


# --- norms ---------------------------------------------------------------------------------------


def add_rms(x: Tensor, residual: Tensor, norm: NormWeight) -> Tensor:
    """Compute `norm.add_rms` like the reference; x is [T, width] or partial sums [T, P, width]."""
    x = sum_parts(x)
    assert x.is_contiguous() and residual.is_contiguous()
    out = torch.empty_like(residual)
    rows, width = residual.shape
    _function("add_rms", residual.dtype)(
        x.data_ptr(), residual.data_ptr(), norm.weight.data_ptr(), out.data_ptr(), rows, width,
        norm.eps, norm.gemma,
    )  # fmt: skip
    return out


# --- QK norm, rope, cache write ------------------------------------------------------------------


def qk_norm_rope_write(
    qkv: Tensor, norm: QkNorm, at: TokenPlaces, cache: KvCache, *, group: Collective | None = None
) -> Tensor:
    """Run `attention.qk_norm_rope_write`, in PyTorch if there are several ranks or KV scales."""
    if (group is not None and group.size > 1) or not cache.is_unscaled(qkv.dtype):
        return attention_cpu.qk_norm_rope_write(qkv, norm, at, cache, group=group)
    assert qkv.is_contiguous() and at.cos.is_contiguous() and at.sin.is_contiguous()
    num_tokens, head_dim = qkv.shape[0], cache.k.shape[-1]
    q = qkv.new_empty(num_tokens, norm.heads, head_dim)
    _function("qk_norm_rope_write", qkv.dtype)(
        *map(Tensor.data_ptr, (qkv, norm.weight, at.cos, at.sin, cache.k, cache.v, at.rows, q)),
        num_tokens, norm.heads, norm.kv_heads, head_dim, at.cos.shape[-1], norm.eps,
    )  # fmt: skip
    return q


def head_norm_rope_write(
    qkv: Tensor, norm: HeadNorm, at: TokenPlaces, cache: KvCache, *, group: Collective | None = None
) -> Tensor:
    if not cache.is_unscaled(qkv.dtype):
        return attention.head_norm_rope_write(qkv, norm, at, cache)
    q = qkv.new_empty(qkv.shape[0], norm.heads, cache.k.shape[-1])
    _write_heads(qkv, norm, None, at, (cache.k, cache.v, None), q, None)
    return q


def sparse_norm_rope_write(
    projected: Tensor,
    norm: SparseHeadNorm,
    at: TokenPlaces,
    cache: KvCache,
    index_cache: Tensor,
    *,
    index_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    is_plain = cache.is_unscaled(projected.dtype) and index_cache.dtype == projected.dtype
    if not is_plain or index_rows is not None:
        return block_sparse.norm_rope_write(
            projected, norm, at, cache, index_cache, index_rows=index_rows
        )
    q = projected.new_empty(projected.shape[0], norm.heads, cache.k.shape[-1])
    caches = (cache.k, cache.v, index_cache)
    index_q = projected.new_empty(projected.shape[0], norm.index_heads, index_cache.shape[-1])
    _write_heads(
        projected, norm, norm.index_weight, at, caches, q, index_q,
        of_index=(norm.index_heads, norm.shard.rank, norm.shard.ranks),
    )  # fmt: skip
    return q, index_q


def _write_heads(
    projected: Tensor,
    norm: HeadNorm | SparseHeadNorm,
    index_weight: Tensor | None,
    at: TokenPlaces,
    caches: tuple[Tensor, Tensor, Tensor | None],
    q: Tensor,
    index_q: Tensor | None,
    of_index: tuple[int, int, int] = (0, 0, 1),  # number of index heads, rank, number of ranks
) -> None:
    assert at.cos.is_contiguous() and at.sin.is_contiguous()
    projected = projected.contiguous()
    tensors = (
        projected, norm.weight, index_weight, at.cos, at.sin, *caches, at.rows, q, index_q
    )  # fmt: skip
    _function("head_norm_rope_write", projected.dtype)(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        projected.shape[0], norm.heads, norm.kv_heads, norm.weight.shape[-1],
        0 if index_weight is None else index_weight.shape[-1], at.cos.shape[-1], caches[0].shape[2],
        norm.eps, *of_index,
    )  # fmt: skip


# --- decode --------------------------------------------------------------------------------------


def plan_decode(queries: AttentionMetadata, shape: PagedShape) -> tuple[Tensor, Tensor]:
    """Return int64 block tables [S, blocks] and lengths [S] of S sequences with one query each."""
    assert not shape.quantize, "CPU kernels have no FP8 output; set quantize=False"
    lengths = torch.tensor(queries.host_seq_lens, dtype=torch.int64)
    return queries.used_tables(shape.block_size), lengths


def decode(q: Tensor, cache: KvCache, plan: tuple[Tensor, Tensor]) -> Tensor:
    """Attend with q [S, heads, head_dim]; gathering k and v would move 3 times the bytes."""
    assert q.is_contiguous()
    assert cache.is_unscaled(q.dtype), "CPU kernels cannot read caches with KV scales"
    tables, lengths = plan
    num_seqs, heads, head_dim = q.shape
    _, kv_heads, block_size, _ = cache.k.shape
    out = q.new_empty(num_seqs, heads * head_dim)
    _function("decode", q.dtype)(
        *map(Tensor.data_ptr, (q, cache.k, cache.v, tables, lengths, out)),
        num_seqs, heads, kv_heads, head_dim, block_size, tables.shape[1],
    )  # fmt: skip
    return out


def _block_scores(index_q: Tensor, index_cache: Tensor, tokens: ScoredTokens, size: int) -> Tensor:
    """Score blocks without copying keys; call `products` for sequences with several tokens."""
    sequences, count, heads, dim = index_q.shape
    if count > 1 or index_cache.dtype != index_q.dtype:
        return products(index_q, index_cache, tokens, size)
    block_size, (_, width) = index_cache.shape[2], tokens.tables.shape
    queries, tables = index_q.contiguous(), tokens.tables.contiguous()
    scores = torch.zeros(sequences, 1, heads, width * block_size // size)
    _function("block_scores", index_q.dtype)(
        queries.data_ptr(), index_cache.data_ptr(), tables.data_ptr(), tokens.before.data_ptr(),
        scores.data_ptr(), sequences, heads, dim, block_size, size, width, scores.shape[-1],
    )  # fmt: skip
    return scores


# --- mixture of experts --------------------------------------------------------------------------


def route(
    x: Hidden, router: Router, *, top_k: int, active: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    gate, bias = router.gate, router.bias
    x = unquantized(x)
    assert x.is_contiguous()
    num_tokens, hidden = x.shape
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32)
    _function("route", x.dtype)(
        *map(Tensor.data_ptr, (x, gate, bias, ids, weights)),
        num_tokens, hidden, gate.shape[0], top_k,
    )  # fmt: skip
    return complete(ids, weights, router, active)


def swiglu(gate_up: Tensor, *, activation: SwiGlu, quantize: bool = False) -> Tensor:
    """Apply `activation` to gate_up [T, 2 * width], gate columns first -> [T, width]."""
    assert not quantize, "CPU kernels have no FP8 output; set quantize=False"
    assert gate_up.is_contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    limit = float("inf") if activation.limit is None else activation.limit
    _function("swiglu", gate_up.dtype)(
        gate_up.data_ptr(), out.data_ptr(), rows, width, activation.alpha, limit, activation.beta
    )
    return out


def experts_kernel(linear: AnyKernel) -> AnyKernel:
    """Make a `moe.experts` kernel of C functions; `linear`, a `gemm.linear` kernel, runs GEMMs."""
    product = linear.run

    def run(x: Hidden, selected: SelectedExperts, experts: SeparateExperts) -> Tensor:
        ids, weights, first, count = selected
        gate_up, down, activation = experts.gate_up, experts.down, experts.activation
        x = unquantized(x)
        num_tokens, top_k = ids.shape
        pairs = num_tokens * top_k
        plan = torch.empty(2 * pairs + count + 1, dtype=torch.int64)  # results of `group_pairs`
        source = plan.data_ptr()
        place, bounds = source + 8 * pairs, source + 16 * pairs
        _function("group_pairs", x.dtype)(
            ids.data_ptr(), source, place, bounds, num_tokens, top_k, first, count
        )
        edges = plan[2 * pairs :].tolist()  # host-sync: reads the number of rows of each expert
        if edges[-1] == 0:
            return torch.zeros_like(x)
        rows = x.index_select(0, plan[: edges[-1]]) if num_tokens > 1 else x.expand(edges[-1], -1)
        y = torch.cat(
            [
                product(
                    swiglu(product(rows[start:stop], gate_up[expert]), activation=activation),
                    down[expert],
                )
                for expert, (start, stop) in enumerate(pairwise(edges))
                if stop > start
            ]
        )
        out = torch.empty_like(x)
        _function("combine", x.dtype)(
            y.data_ptr(), place, weights.data_ptr(), out.data_ptr(), num_tokens, top_k, x.shape[1]
        )
        return out

    return Kernel(
        EXPERTS,
        f"native+{linear.provider}",
        run,
        moe_cpu.kernel(linear).prepare,
        dtypes=linear.dtypes,
        available=lambda: _available(linear.dtypes[0]) and linear.available(),
    )


def kernels(linear: AnyKernel) -> tuple[AnyKernel, ...]:
    """Make this file's kernels in the dtype of `linear`, which runs the GEMMs of the experts."""
    (dtype,) = linear.dtypes
    options: Any = {"dtypes": (dtype,), "available": lambda: _available(dtype)}
    pages = PagedDecode(
        plan=lambda lengths, shape: lengths,
        run=lambda q, cache, tables, lengths: decode(q, cache, (tables, lengths)),
    )

    def kernel(op: Op[P, R], run: R, prepare: P) -> Kernel[P, R]:
        return Kernel(op, "native", run, prepare, **options)

    return (
        kernel(ADD_RMS, add_rms, norm_spec.prepare),
        kernel(QK_NORM_ROPE_WRITE, qk_norm_rope_write, prepare_qk_norm),
        kernel(DECODE, decode, plan_decode),
        kernel(HEAD_NORM_ROPE_WRITE, head_norm_rope_write, HeadNorm),
        kernel(BLOCK_SPARSE_NORM_ROPE_WRITE, sparse_norm_rope_write, SparseHeadNorm),
        *select_kernels(_block_scores, "native", **options),
        *attention_kernels(pages, "native", **options),
        kernel(ROUTE, route, Router),
        kernel(SWIGLU, swiglu, None),
        experts_kernel(linear),
    )


def _available(dtype: torch.dtype) -> bool:
    return library.load(fp32=dtype is torch.float32) is not None
