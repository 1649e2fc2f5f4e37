"""Bytes of a model's weights, from what its family says that it consists of. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable

from negamax.config.kv_cache import ELEMENT_BYTES
from negamax.config.model_spec import ModelSpec
from negamax.kernels.formats import PLAIN, TensorFormat
from negamax.models.family import WeightSpec, names_of
from negamax.quantization.detect import detect
from negamax.quantization.scheme import Scheme

Kept = Callable[[TensorFormat], bool]  # whether matrices of a format are kept as stored


def as_stored(stored: TensorFormat) -> bool:
    """All of them are."""
    return True


def dequantized(stored: TensorFormat) -> bool:
    """None of them is."""
    return False


def weight_bytes(spec: ModelSpec, *, dtype: str, kept: Kept = as_stored, ranks: int = 1) -> int:
    """Bytes of the weights on each of `ranks` that compute in `dtype`. Matrices of the formats that
    are `kept` stay as the checkpoint stores them.
    """
    scheme = detect(spec.quantization)
    return round(
        sum(
            _bytes_on_rank(weight, scheme, dtype=dtype, kept=kept, ranks=ranks)
            for weight in names_of(spec).weights(spec)
        )
    )


def read_bytes(spec: ModelSpec, num_tokens: int, *, dtype: str, ranks: int) -> float:
    """Bytes of weights that each of `ranks` must read to run `num_tokens` tokens, experts chosen
    uniformly.
    """
    total, scheme = 0.0, detect(spec.quantization)
    for weight in names_of(spec).weights(spec):
        if not weight.is_table:
            share = _expected_distinct(weight, num_tokens) / weight.count
            total += share * _bytes_on_rank(
                weight, scheme, dtype=dtype, kept=as_stored, ranks=ranks
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
    weight: WeightSpec, scheme: Scheme | None, *, dtype: str, kept: Kept, ranks: int
) -> float:
    element: float = ELEMENT_BYTES[weight.dtype or dtype]
    if scheme is not None and not weight.dtype and not weight.is_table and len(weight.shape) == 2:
        rows, columns = weight.shape
        stored = scheme.format_of(weight.name.replace("*", "0").removesuffix(".weight"))
        if stored is not PLAIN and kept(stored):
            element = stored.bytes_per_weight((rows, columns))
    return weight.num_elements * element / min(ranks, weight.parts or ranks)
