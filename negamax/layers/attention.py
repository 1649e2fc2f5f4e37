"""Grouped-query attention with full-width QK norm over a paged cache, split by heads over the attention group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from negamax.kernels.attention.spec import PagedShape
from negamax.kernels.kvcache.spec import cache_rows
from negamax.kernels.registry import KernelTable
from negamax.kernels.rope.spec import cos_sin
from negamax.layers.linear import ColumnParallel, Part, RowParallel
from negamax.layers.weights import WeightSlot
from negamax.parallel.context import ParallelContext


@dataclass(frozen=True)
class KvView:
    """One layer's cache on this rank. Within a block the tokens of a head are adjacent (`kernels/kvcache/spec.py`)."""

    k: Tensor  # [num_blocks, kv_heads, block_size, head_dim]
    v: Tensor  # [num_blocks, kv_heads, block_size, head_dim]


@dataclass(frozen=True)
class AttentionInputs:
    """Where the tokens of a step stand. T tokens of S sequences; the first `num_decodes` sequences run exactly one token."""

    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64, block_id * block_size + offset
    block_tables: Tensor  # [S, max_blocks] int64
    query_starts: tuple[int, ...]  # [S + 1] first token of each sequence among the T, then T
    seq_lens: tuple[int, ...]  # [S] tokens including this step
    num_decodes: int


@dataclass(frozen=True)
class AttentionStep:
    """What every layer of a step shares, worked out once: angles, cache rows and the kernels' own plans."""

    cos: Tensor  # [T, 1, rotary_dim] fp32
    sin: Tensor  # [T, 1, rotary_dim] fp32
    rows: Tensor  # [T * kv_heads] int64
    num_decodes: int
    decode: Any  # plan of the attention.decode kernel for the first num_decodes sequences; None: there are none
    prefills: tuple[tuple[int, int, Any], ...]  # (first token, last token + 1, plan of the attention.prefill kernel)


def begin_step(inputs: AttentionInputs, *, frequencies: Tensor, shape: PagedShape, kernels: KernelTable) -> AttentionStep:
    """Prepare a step. `frequencies` from `rope.spec.signed_frequencies`."""
    plan_decode, plan_prefill = kernels["attention.decode"].prepare, kernels["attention.prefill"].prepare
    assert plan_decode is not None and plan_prefill is not None
    cos, sin = cos_sin(inputs.positions, frequencies)
    num_decodes = inputs.num_decodes
    decode = None
    if num_decodes:
        decode = plan_decode(inputs.block_tables[:num_decodes], inputs.seq_lens[:num_decodes], shape, dtype=kernels.dtype)
    prefills = []
    for row in range(num_decodes, len(inputs.seq_lens)):
        first, last = inputs.query_starts[row : row + 2]
        start = inputs.seq_lens[row] - (last - first)
        plan = plan_prefill(inputs.block_tables[row], shape, start=start, count=last - first, dtype=kernels.dtype)
        prefills.append((first, last, plan))
    return AttentionStep(
        cos=cos,
        sin=sin,
        rows=cache_rows(inputs.slot_mapping, kv_heads=shape.kv_heads, block_size=shape.block_size),
        num_decodes=num_decodes,
        decode=decode,
        prefills=tuple(prefills),
    )


class QkNormAttention:
    """q, k, v projection; RMS norm over all q heads and over all k heads; rope; attention; output projection.

    A rank holds `heads / tp` query heads and `kv_heads / tp` KV heads; with more ranks than KV heads, neighbouring ranks hold
    copies of one KV head (and of its slice of the K-norm weight).
    """

    def __init__(
        self,
        prefix: str,
        *,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        context: ParallelContext,
        kernels: KernelTable,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        view = context.layout.attention
        q_rows = _rows(view.heads(heads), head_dim)
        kv_rows = _rows(view.kv_heads(kv_heads), head_dim)
        q_total, kv_total = heads * head_dim, kv_heads * head_dim
        group = context.attention_group
        self._all_reduce = group.all_reduce if group.size > 1 else None
        self._decode, self._prefill = kernels["attention.decode"].run, kernels["attention.prefill"].run
        qkv = (
            Part(f"{prefix}.q_proj.weight", q_total, q_rows),
            Part(f"{prefix}.k_proj.weight", kv_total, kv_rows),
            Part(f"{prefix}.v_proj.weight", kv_total, kv_rows),
        )
        self._qkv = ColumnParallel(qkv, hidden_size, kernels=kernels, dtype=dtype, device=device)
        self._out = RowParallel(
            f"{prefix}.o_proj.weight",
            (hidden_size, q_total),
            columns=q_rows,
            group=group,
            kernels=kernels,
            dtype=dtype,
            device=device,
        )
        norm_weight = torch.empty(len(q_rows) + len(kv_rows), dtype=torch.float32, device=device)
        q_norm, k_norm = torch.split(norm_weight, [len(q_rows), len(kv_rows)])
        fused = kernels["attention.qk_norm_rope_write"]
        assert fused.prepare is not None
        self._qk_norm_rope_write = fused.run
        self._norm = fused.prepare(
            norm_weight, heads=len(q_rows) // head_dim, kv_heads=len(kv_rows) // head_dim, eps=eps, ranks=view.size
        )
        self.slots = [
            *self._qkv.slots,
            *self._out.slots,
            WeightSlot(f"{prefix}.q_norm.weight", (q_total,), target=q_norm, region=(q_rows,)),
            WeightSlot(f"{prefix}.k_norm.weight", (kv_total,), target=k_norm, region=(kv_rows,)),
        ]

    def finish_loading(self) -> None:
        """Put the weights into their kernels' layout."""
        self._qkv.finish_loading()
        self._out.finish_loading()

    def __call__(self, x: Tensor, step: AttentionStep, kv: KvView) -> Tensor:
        """x [T, hidden] -> [T, hidden]; the tokens' keys and values are in `kv` afterwards."""
        q = self._qk_norm_rope_write(
            self._qkv(x),
            self._norm,
            step.cos,
            step.sin,
            kv.k,
            kv.v,
            step.rows,
            all_reduce=self._all_reduce,
        )
        return self._out(self._attend(q, step, kv))

    def _attend(self, q: Tensor, step: AttentionStep, kv: KvView) -> Tensor:
        """q [T, heads, head_dim] -> [T, heads * head_dim]."""
        parts: list[Tensor] = []
        if step.num_decodes:
            parts.append(self._decode(q[: step.num_decodes], kv.k, kv.v, step.decode))
        parts += [self._prefill(q[first:last], kv.k, kv.v, plan) for first, last, plan in step.prefills]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def kv_cache_shape(num_blocks: int, block_size: int, *, kv_heads: Sequence[int], head_dim: int) -> tuple[int, int, int, int]:
    """The shape of a layer's key (and value) cache for this rank's `kv_heads`."""
    return num_blocks, len(kv_heads), block_size, head_dim


def _rows(heads: range, head_dim: int) -> range:
    """The rows of a projection that belong to `heads`."""
    return range(heads.start * head_dim, heads.stop * head_dim)
