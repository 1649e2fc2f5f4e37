"""Synthetic weights for block drafts, which keep activations at a realistic magnitude."""

import math

from negamax.models.dspark import names
from negamax.models.dspark.config import BlockDraftSpec
from negamax.models.family import Initializer


def draw(name: str, spec: BlockDraftSpec) -> Initializer:
    """Return a slot's distribution; a std of 1 / sqrt(columns) preserves the activations' scale."""
    if "norm" in name:
        return Initializer(std=0.05, mean=0.0 if spec.is_gemma else 1.0)
    if name in (names.EMBEDDING, names.MARKOV_IN):
        return Initializer(std=1.0)
    columns = {
        "fc": spec.num_aux * spec.target_hidden_size,
        "o_proj": spec.num_heads * spec.head_dim,
        "down_proj": spec.intermediate_size,
        "markov_w2": spec.markov_rank,
    }
    module = name.removesuffix(".weight").rpartition(".")[2]
    return Initializer(1 / math.sqrt(columns.get(module, spec.hidden_size)))
