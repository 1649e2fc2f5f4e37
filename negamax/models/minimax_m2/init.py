"""Synthetic weights of MiniMax-M2: activations of realistic magnitude and even routing.

Even routing: with independent tokens, B of them reach E (1 - (1 - k / E)^B) of E experts if and
only if all experts are equally likely. So router rows have one length, and router biases hardly
differ. Tokens stay independent in all layers because layers add little to a token's embedding.
"""

import math

from negamax.config.model_spec import MoeSpec
from negamax.models.family import Initializer

# MiniMax's own selection biases are 4.7 to 9.5. A spread of 0.02 would already make some experts
# 40 % likelier than others.
ROUTER_BIAS = Initializer(std=0.0005, mean=7.0)
NORM = Initializer(std=0.05, mean=1.0)
# Of the attention output: tokens of one sequence share most of it, and what they share makes them
# choose the same experts.
ATTENTION_GAIN = 0.5


def draw(name: str, spec: MoeSpec) -> Initializer:
    """Choose the distribution of a slot.

    1 / sqrt(columns) keeps the magnitude of a matrix's input. Matrices that add to the residual
    stream are smaller by sqrt(2 * num_layers), so that it does not grow with depth. Embedding rows
    have unit variance.
    """
    if name.endswith("norm.weight"):
        return NORM
    if name.endswith("e_score_correction_bias"):
        return ROUTER_BIAS
    if name.endswith("embed_tokens.weight"):
        return Initializer(std=1.0)
    depth = math.sqrt(2 * spec.num_layers)
    if name.endswith("o_proj.weight"):
        return Initializer(ATTENTION_GAIN / math.sqrt(spec.num_heads * spec.head_dim) / depth)
    if name.endswith("w2.weight"):
        return Initializer(1 / math.sqrt(spec.expert_width) / depth)
    return Initializer(1 / math.sqrt(spec.hidden_size), unit_rows=name.endswith(".gate.weight"))
