"""The tensors of MiniMax-M3's text model."""

from collections.abc import Iterator
from dataclasses import replace

from negamax.formats.tensor_format import Axis
from negamax.layers.names import IndexerNames, MlpNames, MoeNames
from negamax.models import minimax_names
from negamax.models.family import WeightSpec, mlp_weights
from negamax.models.minimax_m3.config import MiniMaxM3Spec
from negamax.models.minimax_names import DECODER, attention_weights, moe_weights, norms
from negamax.models.minimax_names import layer_of as layer_of
from negamax.models.minimax_names import place as place


def indexer(layer: int) -> IndexerNames:
    """Name the projections and norms that score the blocks of a sparse layer."""
    prefix = f"model.layers.{layer}.self_attn"
    parts = ("q_proj", "k_proj", "q_norm", "k_norm")
    return IndexerNames(*(f"{prefix}.index_{part}.weight" for part in parts))


def mlp(layer: int) -> MlpNames:
    """Name the MLP of a layer without experts."""
    return _mlp(f"model.layers.{layer}.mlp")


def moe(layer: int) -> MoeNames:
    """Name the mixture of experts of a layer, and the expert that all tokens share."""
    shared = _mlp(f"model.layers.{layer}.block_sparse_moe.shared_experts")
    return replace(minimax_names.moe(layer), shared=shared)


def weights(spec: MiniMaxM3Spec) -> Iterator[WeightSpec]:
    """List all tensors of a model (see `WeightNames`)."""
    hidden, shared_width = spec.hidden_size, spec.shared_width
    yield WeightSpec(DECODER.embedding, (spec.vocab_size, hidden), is_table=True)
    for layer in range(spec.num_layers):
        yield from attention_weights(spec, layer, norms_heads=True)
        yield from _indexer_weights(spec, layer)
        own = moe(layer)
        if not spec.moe_layers[layer]:
            yield from mlp_weights(mlp(layer), hidden, spec.dense_width)
        else:
            yield from moe_weights(own, spec)
        if spec.moe_layers[layer] and own.shared and shared_width:
            joins = shared_width == spec.expert_width
            yield from mlp_weights(own.shared, hidden, shared_width, joins_experts=joins)
        for name in norms(layer):
            yield WeightSpec(name, (hidden,), parts=1)
    yield WeightSpec(DECODER.norm, (hidden,), parts=1)
    yield WeightSpec(DECODER.head, (spec.vocab_size, hidden), is_head=True)


def _indexer_weights(spec: MiniMaxM3Spec, layer: int) -> Iterator[WeightSpec]:
    sparse = spec.sparse
    if sparse is None or not sparse.layers[layer]:
        return
    index, index_rows = indexer(layer), sparse.index_heads * sparse.index_dim
    parts = 1 if sparse.is_sharded else sparse.index_heads
    yield WeightSpec(index.q, (index_rows, spec.hidden_size), parts=parts, splits=Axis.ROWS)
    yield WeightSpec(index.k, (sparse.index_dim, spec.hidden_size), parts=1)
    for name in (index.q_norm, index.k_norm):
        yield WeightSpec(name, (sparse.index_dim,), parts=1, dtype="float32")


def _mlp(prefix: str) -> MlpNames:
    return MlpNames(*(f"{prefix}.{part}_proj.weight" for part in ("gate", "up", "down")))
