"""What MiniMax-M3's text model consists of.

Slots carry the names of MiniMax's own checkpoints without their prefix `language_model.`; other
spellings are in `models/spellings.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from negamax.formats.tensor_format import Axis
from negamax.layers.names import IndexerNames, MlpNames, MoeNames
from negamax.models import spellings
from negamax.models.family import WeightSpec
from negamax.models.minimax_m3.config import MiniMaxM3Spec
from negamax.models.spellings import DECODER as DECODER
from negamax.models.spellings import attention as attention
from negamax.models.spellings import layer_of as layer_of
from negamax.models.spellings import norms as norms
from negamax.models.spellings import place as place


def indexer(layer: int) -> IndexerNames:
    """What chooses the blocks of a sparse layer."""
    prefix = f"model.layers.{layer}.self_attn"
    return IndexerNames(
        q=f"{prefix}.index_q_proj.weight",
        k=f"{prefix}.index_k_proj.weight",
        q_norm=f"{prefix}.index_q_norm.weight",
        k_norm=f"{prefix}.index_k_norm.weight",
    )


def mlp(layer: int) -> MlpNames:
    """The MLP of a layer without experts."""
    return _mlp(f"model.layers.{layer}.mlp")


def moe(layer: int) -> MoeNames:
    """The mixture of experts of a layer, and the expert that all tokens share."""
    shared = _mlp(f"model.layers.{layer}.block_sparse_moe.shared_experts")
    return replace(spellings.moe(layer), shared=shared)


def weights(spec: MiniMaxM3Spec) -> Iterator[WeightSpec]:
    """All that a model consists of (see `models/family.py`)."""
    hidden = spec.hidden_size
    experts = {"count": spec.num_experts, "used": spec.experts_per_token}
    yield WeightSpec(DECODER.embedding, (spec.vocab_size, hidden), is_table=True)
    for layer in range(spec.num_layers):
        yield from _attention(spec, layer)
        if spec.moe_layers[layer]:
            its = moe(layer)
            yield WeightSpec(its.router, (spec.num_experts, hidden), parts=1, dtype="float32")
            yield WeightSpec(its.router_bias, (spec.num_experts,), parts=1, dtype="float32")
            matrices = MlpNames(its.gate, its.up, its.down)
            yield from _matrices(matrices, hidden, spec.expert_width, **experts)
            if its.shared and spec.shared_width:
                joins = spec.shared_width == spec.expert_width
                yield from _matrices(its.shared, hidden, spec.shared_width, joins_experts=joins)
        else:
            yield from _matrices(mlp(layer), hidden, spec.dense_width)
        for name in norms(layer):
            yield WeightSpec(name, (hidden,), parts=1)
    yield WeightSpec(DECODER.norm, (hidden,), parts=1)
    yield WeightSpec(DECODER.head, (spec.vocab_size, hidden), is_head=True)


def _attention(spec: MiniMaxM3Spec, layer: int) -> Iterator[WeightSpec]:
    hidden, heads, kv_heads = spec.hidden_size, spec.num_heads, spec.num_kv_heads
    q_rows, kv_rows = heads * spec.head_dim, kv_heads * spec.head_dim
    own = attention(layer)
    yield WeightSpec(own.q, (q_rows, hidden), parts=heads, splits=Axis.ROWS, is_query=True)
    yield WeightSpec(own.k, (kv_rows, hidden), parts=kv_heads, splits=Axis.ROWS)
    yield WeightSpec(own.v, (kv_rows, hidden), parts=kv_heads, splits=Axis.ROWS)
    yield WeightSpec(own.out, (hidden, q_rows), parts=heads, splits=Axis.COLUMNS)
    for name in (own.q_norm, own.k_norm):
        yield WeightSpec(name, (spec.head_dim,), parts=1, dtype="float32")
    sparse = spec.sparse
    if sparse is None or not sparse.layers[layer]:
        return
    index, index_rows = indexer(layer), sparse.index_heads * sparse.index_dim
    parts = 1 if sparse.is_sharded else sparse.index_heads
    yield WeightSpec(index.q, (index_rows, hidden), parts=parts, splits=Axis.ROWS)
    yield WeightSpec(index.k, (sparse.index_dim, hidden), parts=1)
    for name in (index.q_norm, index.k_norm):
        yield WeightSpec(name, (sparse.index_dim,), parts=1, dtype="float32")


def _matrices(names: MlpNames, hidden: int, width: int, **experts: Any) -> Iterator[WeightSpec]:
    for name in (names.gate, names.up):
        yield WeightSpec(name, (width, hidden), splits=Axis.ROWS, **experts)
    yield WeightSpec(names.down, (hidden, width), splits=Axis.COLUMNS, **experts)


def _mlp(prefix: str) -> MlpNames:
    return MlpNames(*(f"{prefix}.{part}_proj.weight" for part in ("gate", "up", "down")))
