"""Tensor names of MiniMax-M3."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from negamax.config.vision import VisionSpec
from negamax.formats.tensor_format import Axis
from negamax.layers.names import IndexerNames, MlpNames, MoeNames
from negamax.models import minimax_names
from negamax.models.family import WeightSpec, mlp_names, mlp_weights
from negamax.models.minimax_m3.config import MiniMaxM3Spec
from negamax.models.minimax_names import DECODER, attention_weights, moe_weights, norms
from negamax.models.minimax_names import layer_of as layer_of
from negamax.models.minimax_names import place as place


def indexer(layer: int) -> IndexerNames:
    """Return the names of the projections and norms that score the blocks of a sparse layer."""
    prefix = f"model.layers.{layer}.self_attn"
    parts = ("q_proj", "k_proj", "q_norm", "k_norm")
    return IndexerNames(*(f"{prefix}.index_{part}.weight" for part in parts))


def mlp(layer: int) -> MlpNames:
    """Return the tensor names of the MLP in a layer without experts."""
    return mlp_names(f"model.layers.{layer}.mlp")


def moe(layer: int) -> MoeNames:
    """Return the tensor names of a layer's routed experts and shared expert."""
    shared = mlp_names(f"model.layers.{layer}.block_sparse_moe.shared_experts")
    return replace(minimax_names.moe(layer), shared=shared)


@dataclass(frozen=True)
class VisionLayerNames:
    """Module names of one layer of the vision tower. Each module has a weight and a bias."""

    norms: tuple[str, str]  # norms before attention and before the MLP
    qkv: tuple[str, str, str]
    out: str
    mlp: tuple[str, str]


_TOWER = "vision_tower.vision_model"
PATCHES = f"{_TOWER}.embeddings.patch_embedding.weight"
PATCH_NORM = f"{_TOWER}.pre_layrnorm"  # checkpoints spell "layernorm" this way
PROJECTOR = "multi_modal_projector.linear_1", "multi_modal_projector.linear_2"
MERGE = "patch_merge_mlp.linear_1", "patch_merge_mlp.linear_2"


def vision_layer(layer: int) -> VisionLayerNames:
    """Return the module names of a layer of the vision tower."""
    prefix = f"{_TOWER}.encoder.layers.{layer}"
    q, k, v = (f"{prefix}.self_attn.{part}_proj" for part in "qkv")
    return VisionLayerNames(
        (f"{prefix}.layer_norm1", f"{prefix}.layer_norm2"),
        (q, k, v),
        f"{prefix}.self_attn.out_proj",
        (f"{prefix}.mlp.fc1", f"{prefix}.mlp.fc2"),
    )


def weights(spec: MiniMaxM3Spec) -> Iterator[WeightSpec]:
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
    if spec.vision is not None:
        yield from _vision_weights(spec.vision)


@cache
def vision_shapes(vision: VisionSpec) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of the tensors of the vision tower and the projector, by name."""
    return {each.name: each.shape for each in _vision_weights(vision)}


def _vision_weights(vision: VisionSpec) -> Iterator[WeightSpec]:
    """List the tensors of the vision tower and the projector."""
    hidden, middle, text = vision.hidden_size, vision.projector_hidden_size, vision.text_hidden
    frames, side = vision.temporal_patch_size, vision.patch_size
    yield WeightSpec(PATCHES, (hidden, 3, frames, side, side), parts=1, is_vision=True)
    modules: list[tuple[str, tuple[int, ...]]] = [(PATCH_NORM, (hidden,))]
    for layer in range(vision.num_layers):
        own, width = vision_layer(layer), vision.intermediate_size
        modules += [(norm, (hidden,)) for norm in own.norms]
        modules += [(name, (hidden, hidden)) for name in (*own.qkv, own.out)]
        modules += [(own.mlp[0], (width, hidden)), (own.mlp[1], (hidden, width))]
    merged = text * vision.patches_per_token
    modules += [(PROJECTOR[0], (middle, hidden)), (PROJECTOR[1], (text, middle))]
    modules += [(MERGE[0], (middle, merged)), (MERGE[1], (text, middle))]
    for name, shape in modules:
        yield WeightSpec(f"{name}.weight", shape, parts=1, is_vision=True)
        yield WeightSpec(f"{name}.bias", shape[:1], parts=1, is_vision=True)


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
