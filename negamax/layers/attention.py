"""Grouped-query attention with full-width QK norm over a paged cache, split by heads over the
attention group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from negamax.kernels.activations import GROUP, QuantizedActivations, concatenate
from negamax.kernels.attention.spec import PagedQueries, PagedShape
from negamax.kernels.registry import KernelTable
from negamax.layers.linear import ColumnParallel, Part, RowParallel
from negamax.layers.weights import WeightSlot
from negamax.parallel.context import ParallelContext
from negamax.quantization.scheme import WeightFormat


@dataclass(frozen=True)
class KvView:
    """One layer's cache on this rank. Within a block the tokens of a head are adjacent
    (`kernels/kvcache/spec.py`).
    """

    k: Tensor  # [num_blocks, kv_heads, block_size, head_dim]
    v: Tensor  # [num_blocks, kv_heads, block_size, head_dim]
    k_scale: float = 1.0  # what an FP8 cache's values are multiplied by
    v_scale: float = 1.0


@dataclass(frozen=True)
class AttentionInputs:
    """Where the T tokens of a step stand: first those that are one query each, then the runs of
    several.
    """

    positions: Tensor  # [T] int64
    token_rows: Tensor  # [T] int64, row of block_tables of each token's sequence
    block_tables: Tensor  # [rows, max_blocks] int32 or int64
    decodes: PagedQueries | None  # of the first tokens, one query per sequence
    prefills: PagedQueries | None  # of the tokens behind them
    # [1] int32, tokens that are real, the others being padding; None: all
    active: Tensor | None = None


@dataclass(frozen=True)
class Step:
    """What every layer of a step shares, worked out once: angles, cache rows and the kernels' own
    plans.
    """

    cos: Tensor  # [T, 1, rotary_dim] fp32
    sin: Tensor  # [T, 1, rotary_dim] fp32
    rows: Tensor  # [T * kv_heads] int64
    num_decodes: int  # tokens
    # plan of the attention.decode kernel for the first num_decodes tokens; None: there are none
    decode: Any
    # plan of the attention.prefill kernel for the tokens behind them; None: there are none
    prefill: Any
    active: Tensor | None  # [1] int32, tokens that are real; None: all


def begin_step(
    inputs: AttentionInputs,
    *,
    frequencies: Tensor,
    shape: PagedShape,
    quantize: bool,
    kernels: KernelTable,
) -> Step:
    """Prepare a step. `frequencies` from `rope.spec.signed_frequencies`; `quantize`: the output
    projections are FP8.
    """
    plan_decode, plan_prefill = (
        kernels["attention.decode"].prepare,
        kernels["attention.prefill"].prepare,
    )
    assert plan_decode is not None and plan_prefill is not None
    cos, sin, rows = kernels["kvcache.locate"].run(
        inputs.positions,
        inputs.token_rows,
        inputs.block_tables,
        frequencies,
        kv_heads=shape.kv_heads,
        block_size=shape.block_size,
    )
    decodes, prefills, options = (
        inputs.decodes,
        inputs.prefills,
        {"dtype": kernels.dtype, "quantize": quantize},
    )
    return Step(
        cos=cos,
        sin=sin,
        rows=rows,
        num_decodes=decodes.table_rows.shape[0] if decodes else 0,
        decode=plan_decode(decodes, shape, **options) if decodes else None,
        prefill=plan_prefill(prefills, shape, **options) if prefills else None,
        active=inputs.active,
    )


class QkNormAttention:
    """q, k, v projection; RMS norm over all q heads and over all k heads; rope; attention; output
    projection.

    A rank holds `heads / tp` query heads and `kv_heads / tp` KV heads; with more ranks than KV
    heads, neighbouring ranks hold copies of one KV head (and of its slice of the K-norm weight).
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
        weights: WeightFormat,
    ) -> None:
        view = context.layout.attention
        q_rows = _rows(view.heads(heads), head_dim)
        kv_rows = _rows(view.kv_heads(kv_heads), head_dim)
        q_total, kv_total = heads * head_dim, kv_heads * head_dim
        group = context.attention_group
        self._group = group if group.size > 1 else None
        self._decode, self._prefill = (
            kernels["attention.decode"].run,
            kernels["attention.prefill"].run,
        )
        qkv = (
            Part(f"{prefix}.q_proj.weight", q_total, q_rows),
            Part(f"{prefix}.k_proj.weight", kv_total, kv_rows),
            Part(f"{prefix}.v_proj.weight", kv_total, kv_rows),
        )
        self._qkv = ColumnParallel(qkv, hidden_size, kernels=kernels, weights=weights)
        self._out = RowParallel(
            f"{prefix}.o_proj.weight",
            (hidden_size, q_total),
            columns=q_rows,
            kernels=kernels,
            weights=weights,
        )
        self.takes_quantized = self._qkv.quantized
        # a head is what shares a scale
        self.gives_quantized = self._out.quantized and head_dim == GROUP
        norm_weight = torch.empty(
            len(q_rows) + len(kv_rows), dtype=torch.float32, device=weights.device
        )
        q_norm, k_norm = torch.split(norm_weight, [len(q_rows), len(kv_rows)])
        fused = kernels["attention.qk_norm_rope_write"]
        assert fused.prepare is not None
        self._qk_norm_rope_write = fused.run
        self._norm = fused.prepare(
            norm_weight,
            heads=len(q_rows) // head_dim,
            kv_heads=len(kv_rows) // head_dim,
            eps=eps,
            ranks=view.size,
        )
        self._kv_scales = torch.ones(2)  # of the keys and of the values, on the host
        self.slots = [
            *self._qkv.slots,
            *self._out.slots,
            WeightSlot(f"{prefix}.q_norm.weight", (q_total,), target=q_norm, region=(q_rows,)),
            WeightSlot(f"{prefix}.k_norm.weight", (kv_total,), target=k_norm, region=(kv_rows,)),
            WeightSlot(f"{prefix}.k_scale", (), target=self._kv_scales[0], optional=True),
            WeightSlot(f"{prefix}.v_scale", (), target=self._kv_scales[1], optional=True),
        ]

    @property
    def kv_scales(self) -> tuple[float, float]:
        """The checkpoint's scales of an FP8 cache's keys and values; 1.0 where it has none."""
        k_scale, v_scale = self._kv_scales.tolist()
        return k_scale, v_scale

    def finish_loading(self) -> None:
        """Put the weights into their kernels' layout."""
        self._qkv.finish_loading()
        self._out.finish_loading()

    def __call__(self, x: Tensor | QuantizedActivations, step: Step, kv: KvView) -> Tensor:
        """x [T, hidden] -> [T, hidden], to be summed over the ranks; the tokens' keys and values
        are in `kv` afterwards.
        """
        q = self._qk_norm_rope_write(
            self._qkv(x),
            self._norm,
            step.cos,
            step.sin,
            kv.k,
            kv.v,
            step.rows,
            group=self._group,
            kv_scales=(kv.k_scale, kv.v_scale),
        )
        return self._out(self._attend(q, step, kv))

    def _attend(self, q: Tensor, step: Step, kv: KvView) -> Tensor | QuantizedActivations:
        """q [T, heads, head_dim] -> [T, heads * head_dim]."""
        scales, parts = (kv.k_scale, kv.v_scale), []
        if step.decode is not None:
            parts.append(
                self._decode(q[: step.num_decodes], kv.k, kv.v, step.decode, kv_scales=scales)
            )
        if step.prefill is not None:
            parts.append(
                self._prefill(q[step.num_decodes :], kv.k, kv.v, step.prefill, kv_scales=scales)
            )
        return concatenate(parts)


def kv_cache_shape(
    num_blocks: int, block_size: int, *, kv_heads: Sequence[int], head_dim: int
) -> tuple[int, int, int, int]:
    """The shape of a layer's key (and value) cache for this rank's `kv_heads`."""
    return num_blocks, len(kv_heads), block_size, head_dim


def _rows(heads: range, head_dim: int) -> range:
    """The rows of a projection that belong to `heads`."""
    return range(heads.start * head_dim, heads.stop * head_dim)
