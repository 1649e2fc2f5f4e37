"""Bytes of a model's weights, from what its family says that it consists of. Imports no torch."""

from __future__ import annotations

from negamax.config.kv_cache import ELEMENT_BYTES
from negamax.config.model_spec import ModelSpec
from negamax.models.family import WeightSpec, names_of


def num_parameters(spec: ModelSpec) -> int:
    """Weights of the whole model (228,689,764,864 for MiniMax-M2)."""
    return sum(weight.num_elements for weight in names_of(spec).weights(spec))


def weight_bytes(
    spec: ModelSpec, *, dtype: str, keep_quantized: bool = True, ranks: int = 1
) -> int:
    """Bytes of the weights on each of `ranks` that compute in `dtype`; with `keep_quantized`
    matrices stay as the checkpoint stores them.
    """
    return round(
        sum(
            _bytes_on_rank(weight, spec, dtype=dtype, keep_quantized=keep_quantized, ranks=ranks)
            for weight in names_of(spec).weights(spec)
        )
    )


def read_bytes(spec: ModelSpec, num_tokens: int, *, dtype: str, ranks: int) -> float:
    """Bytes of weights that each of `ranks` must read to run `num_tokens` tokens, experts chosen
    uniformly.
    """
    total = 0.0
    for weight in names_of(spec).weights(spec):
        if not weight.is_table:
            share = _expected_distinct(weight, num_tokens) / weight.count
            total += share * _bytes_on_rank(
                weight, spec, dtype=dtype, keep_quantized=True, ranks=ranks
            )
    return total


def expected_distinct_experts(spec: ModelSpec, num_tokens: int) -> float | None:
    """Experts of a layer that `num_tokens` tokens hit when every choice is uniform and independent
    of the other tokens'; None in a model without experts.
    """
    for weight in names_of(spec).weights(spec):
        if weight.used is not None:
            return _expected_distinct(weight, num_tokens)
    return None


def _expected_distinct(weight: WeightSpec, num_tokens: int) -> float:
    used = weight.count if weight.used is None else weight.used
    return weight.count * (1 - (1 - used / weight.count) ** num_tokens)


def _bytes_on_rank(
    weight: WeightSpec, spec: ModelSpec, *, dtype: str, keep_quantized: bool, ranks: int
) -> float:
    element: float = ELEMENT_BYTES[weight.dtype or dtype]
    if keep_quantized and _is_quantized(weight, spec):
        assert spec.quantization is not None
        rows, columns = spec.quantization.weight_block_size
        element = 1 + ELEMENT_BYTES["float32"] / (rows * columns)
    return weight.num_elements * element / min(ranks, weight.parts or ranks)


def _is_quantized(weight: WeightSpec, spec: ModelSpec) -> bool:
    if spec.quantization is None or weight.dtype or weight.is_table or len(weight.shape) != 2:
        return False
    plain = spec.quantization.modules_to_not_convert
    return not any(f".{module}." in f".{weight.name}." for module in plain)
