"""All names of MiniMax-M2's checkpoints: what a model consists of, and from a tensor's name in a
checkpoint to the model's slot, or to the reason to skip it.

Slots carry the names of MiniMax's own checkpoints
(`model.layers.0.block_sparse_moe.experts.0.w1.weight`); other spellings are in
`models/spellings.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from negamax.formats.tensor_format import Axis
from negamax.models.family import WeightSpec
from negamax.models.minimax_m2.config import MiniMaxM2Spec
from negamax.models.spellings import DECODER as DECODER
from negamax.models.spellings import attention as attention
from negamax.models.spellings import layer_of as layer_of
from negamax.models.spellings import moe as moe
from negamax.models.spellings import norms as norms
from negamax.models.spellings import place as place


def weights(spec: MiniMaxM2Spec) -> Iterator[WeightSpec]:
    """All that a model consists of (see `models/family.py`)."""
    hidden, heads, kv_heads = spec.hidden_size, spec.num_heads, spec.num_kv_heads
    q_rows, kv_rows = heads * spec.head_dim, kv_heads * spec.head_dim
    experts = {"count": spec.num_experts, "used": spec.experts_per_token}
    yield WeightSpec(DECODER.embedding, (spec.vocab_size, hidden), is_table=True)
    for layer in range(spec.num_layers):
        own, its = attention(layer), moe(layer)
        yield WeightSpec(own.q, (q_rows, hidden), parts=heads, splits=Axis.ROWS, is_query=True)
        yield WeightSpec(own.k, (kv_rows, hidden), parts=kv_heads, splits=Axis.ROWS)
        yield WeightSpec(own.v, (kv_rows, hidden), parts=kv_heads, splits=Axis.ROWS)
        yield WeightSpec(own.out, (hidden, q_rows), parts=heads, splits=Axis.COLUMNS)
        yield WeightSpec(own.q_norm, (q_rows,), parts=heads, dtype="float32", is_query=True)
        yield WeightSpec(own.k_norm, (kv_rows,), parts=kv_heads, dtype="float32")
        yield WeightSpec(its.router, (spec.num_experts, hidden), parts=1, dtype="float32")
        yield WeightSpec(its.router_bias, (spec.num_experts,), parts=1, dtype="float32")
        for name in (its.gate, its.up):
            yield WeightSpec(name, (spec.intermediate_size, hidden), splits=Axis.ROWS, **experts)
        down = (hidden, spec.intermediate_size)
        yield WeightSpec(its.down, down, splits=Axis.COLUMNS, **experts)
        for name in norms(layer):
            yield WeightSpec(name, (hidden,), parts=1)
    yield WeightSpec(DECODER.norm, (hidden,), parts=1)
    yield WeightSpec(DECODER.head, (spec.vocab_size, hidden), is_head=True)
