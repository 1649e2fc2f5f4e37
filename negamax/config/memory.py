"""Bytes that a model takes, from its spec alone."""

from __future__ import annotations

from negamax.config.model_spec import ModelSpec


def weight_bytes(spec: ModelSpec, *, dtype_bytes: int, keep_quantized: bool) -> int:
    """Bytes of the whole model's weights in a compute dtype of `dtype_bytes`; with `keep_quantized`
    linear weights stay as the checkpoint stores them."""
    if spec.quantization is None or not keep_quantized:
        return spec.num_parameters * dtype_bytes
    plain = 2 * spec.vocab_size * spec.hidden_size
    router = spec.num_layers * spec.num_experts * spec.hidden_size
    return plain * dtype_bytes + 4 * router + (spec.num_parameters - plain - router)
