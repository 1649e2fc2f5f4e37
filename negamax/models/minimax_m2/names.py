"""Tensor names of MiniMax-M2."""

from collections.abc import Iterator

from negamax.models.family import WeightSpec
from negamax.models.minimax_m2.config import MiniMaxM2Spec
from negamax.models.minimax_names import DECODER, attention_weights, moe, moe_weights, norms
from negamax.models.minimax_names import layer_of as layer_of
from negamax.models.minimax_names import place as place


def weights(spec: MiniMaxM2Spec) -> Iterator[WeightSpec]:
    hidden = spec.hidden_size
    yield WeightSpec(DECODER.embedding, (spec.vocab_size, hidden), is_table=True)
    for layer in range(spec.num_layers):
        yield from attention_weights(spec, layer, norms_heads=False)
        yield from moe_weights(moe(layer), spec)
        for name in norms(layer):
            yield WeightSpec(name, (hidden,), parts=1)
    yield WeightSpec(DECODER.norm, (hidden,), parts=1)
    yield WeightSpec(DECODER.head, (spec.vocab_size, hidden), is_head=True)
