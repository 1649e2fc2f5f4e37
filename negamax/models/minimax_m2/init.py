"""Synthetic weights of MiniMax-M2, with realistic activations and even routing.

If all experts are equally likely and each token selects k of E experts, B independent tokens select
E (1 - (1 - k / E)^B) experts. Router rows of equal norm and almost equal router biases make experts
equally likely. Tokens select experts independently, as a layer adds little to a token's embedding.
"""

import math

from negamax.config.model_spec import MoeSpec
from negamax.models.family import Initializer

# The routing biases in MiniMax's checkpoints are 4.7 to 9.5. A standard deviation of 0.02 would
# make some experts 40 % likelier than others.
ROUTER_BIAS = Initializer(std=0.0005, mean=7.0)
NORM = Initializer(std=0.05, mean=1.0)
# Scale of the attention output, which is almost equal for all tokens of a sequence. With a larger
# scale, all tokens of a sequence would select the same experts.
ATTENTION_GAIN = 0.5


def draw(name: str, spec: MoeSpec) -> Initializer:
    """Choose the distribution of the values of weight `name`.

    The standard deviation 1 / sqrt(columns) preserves the magnitude of multiplied vectors. Matrices
    that add to the residual stream are divided by sqrt(2 * num_layers), so the stream does not grow
    with depth. Embedding rows have unit variance.
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
