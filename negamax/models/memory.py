"""Bytes of a model's weights, from what its family says that it consists of. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable

from negamax.config.eagle3 import Eagle3Spec
from negamax.config.kv_cache import ELEMENT_BYTES
from negamax.config.model_spec import ModelSpec
from negamax.kernels.formats import PLAIN, Axis, TensorFormat
from negamax.models.family import WeightSpec, names_of
from negamax.parallel.layout import share
from negamax.quantization.detect import detect
from negamax.quantization.scheme import Scheme

Kept = Callable[[TensorFormat], bool]  # whether matrices of a format are kept as stored


def as_stored(stored: TensorFormat) -> bool:
    """All of them are."""
    return True


def dequantized(stored: TensorFormat) -> bool:
    """None of them is."""
    return False


def weight_bytes(
    spec: ModelSpec, *, dtype: str, kept: Kept = as_stored, ranks: int = 1, ep: int = 1
) -> int:
    """Bytes of the weights on each of `ranks`, `ep` of which split the experts, that compute in
    `dtype`. Matrices of the formats that are `kept` stay as the checkpoint stores them, padded to
    whole units where ranks cut the width of experts.
    """
    scheme = detect(spec.quantization)
    return round(
        sum(
            _bytes_on_rank(weight, scheme, dtype=dtype, kept=kept, ranks=ranks, ep=ep)
            for weight in names_of(spec).weights(spec)
        )
    )


def draft_bytes(spec: Eagle3Spec, *, dtype: str, kept: Kept = as_stored, ranks: int = 1) -> int:
    """Bytes of a draft's weights on each of `ranks`: all of its embedding, or of a copy of the
    model's where ranks split that.
    """
    copied = ranks > 1 and not spec.own_embedding
    table = spec.vocab_size * spec.hidden_size * ELEMENT_BYTES[dtype] if copied else 0
    return table + weight_bytes(spec, dtype=dtype, kept=kept, ranks=ranks)


def expert_padding(
    spec: ModelSpec, *, kept: Kept = as_stored, ranks: int = 1, ep: int = 1
) -> str | None:
    """What each of `ranks` computes and holds for nothing where they cut the width of experts, in
    words; None: nothing.
    """
    weights = names_of(spec).weights(spec)
    experts = next((each for each in weights if each.used is not None and each.splits), None)
    if experts is None or experts.splits is None:
        return None
    stored, width = _stored(experts, detect(spec.quantization)), experts.shape[experts.splits.value]

    def room(ep: int) -> tuple[int, int]:
        """Columns of an expert that a rank has room for, and their unit."""
        size = ranks // ep
        unit = stored.split_width(width // size, kept)[1] if kept(stored) else 1
        return share(width, rank=0, size=size, unit=unit).size, unit

    (held, unit), even = room(ep), width * ep // ranks
    if held == even:
        return None
    sizes = (n for n in range(1, ranks + 1) if ranks % n == 0 == experts.count % n)
    fitting = next((n for n in sizes if room(n)[0] == width * n // ranks), None)
    remedy = f" (none with --expert-parallel-size {fitting})" if fitting else ""
    return (
        f"{held} columns of each expert where {even} would be even, since {stored.name} is cut in "
        f"units of {unit}: {held / even - 1:.0%} more bytes and arithmetic in the experts{remedy}"
    )


def read_bytes(spec: ModelSpec, num_tokens: int, *, dtype: str, ranks: int) -> float:
    """Bytes of weights that each of `ranks` must read to run `num_tokens` tokens, experts chosen
    uniformly. Padding is not counted: nothing asks for it.
    """
    total, scheme = 0.0, detect(spec.quantization)
    for weight in names_of(spec).weights(spec):
        if not weight.is_table:
            share = _expected_distinct(weight, num_tokens) / weight.count
            whole = _bytes_on_rank(weight, scheme, dtype=dtype, kept=as_stored)
            total += share * whole / min(ranks, weight.parts or ranks)
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
    weight: WeightSpec,
    scheme: Scheme | None,
    *,
    dtype: str,
    kept: Kept,
    ranks: int = 1,
    ep: int = 1,
) -> float:
    """Of all `count`."""
    plain = ELEMENT_BYTES[weight.dtype or dtype]
    ranks = min(ranks, weight.parts or ranks)
    stored = _stored(weight, scheme)
    if stored is PLAIN or not kept(stored):
        return weight.num_elements * plain / ranks
    rows, columns = weight.shape
    if weight.splits is None:
        return weight.num_elements * stored.bytes_per_weight((rows, columns)) / ranks
    held, axis = [rows, columns], weight.splits.value
    if weight.used is None and not (weight.joins_experts and ep == 1):
        held[axis] //= ranks
        if ranks > 1 and held[axis] % stored.unit(weight.splits):  # dequantised at load
            return weight.num_elements * plain / ranks
    else:
        size = ranks // ep
        narrow, unit = stored.split_width(held[axis] // size, kept)
        held[axis] = share(held[axis], rank=0, size=size, unit=unit).size
        stored = narrow if weight.splits is Axis.COLUMNS else stored
    here = weight.count / (1 if weight.used is None else ep) * math.prod(held)
    return here * stored.bytes_per_weight((held[0], held[1]))


def _stored(weight: WeightSpec, scheme: Scheme | None) -> TensorFormat:
    """The format of the matrices `weight` in the checkpoint; the head is never held in one."""
    in_full = weight.dtype or weight.is_table or weight.is_head
    if scheme is None or in_full or len(weight.shape) != 2:
        return PLAIN
    return scheme.format_of(weight.name.replace("*", "0").removesuffix(".weight"))
