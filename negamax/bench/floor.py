"""The physical limit of a decode step: the bytes that it must read, over the bandwidth that the
memory has.
"""

from __future__ import annotations

from dataclasses import dataclass

from negamax.config.kv_cache import ELEMENT_BYTES, block_bytes
from negamax.config.model_spec import ModelSpec

ROUTER_BYTES = 4  # per weight: the router is kept in fp32


@dataclass(frozen=True)
class StepBytes:
    """What one decode step reads at least, in bytes over all ranks; every rank reads the whole
    router.
    """

    attention: float  # the projections of all layers
    experts: float  # of the distinct experts that are hit, all layers
    head: float
    kv: float
    router: float  # on each rank

    def seconds(self, *, ranks: int, bytes_per_second: float) -> float:
        """The time of the step on `ranks` GPUs that read `bytes_per_second` each, links and
        arithmetic for free.
        """
        shared = self.attention + self.experts + self.head + self.kv
        return (shared / ranks + self.router) / bytes_per_second


def expected_distinct_experts(spec: ModelSpec, num_tokens: int) -> float:
    """Experts of a layer that `num_tokens` tokens hit when every choice is uniform and independent
    of the other tokens'.
    """
    missed = (1 - spec.experts_per_token / spec.num_experts) ** num_tokens
    return spec.num_experts * (1 - missed)


def step_bytes(
    spec: ModelSpec, *, batch: int, context: float, dtype: str, kv_dtype: str
) -> StepBytes:
    """A step of `batch` sequences of `context` tokens (their mean) each, experts chosen uniformly.

    `dtype` is that of plain weights; quantised ones take one byte and their share of the scales.
    """
    plain = ELEMENT_BYTES[dtype]
    weight: float = plain
    if spec.quantization is not None:
        rows, columns = spec.quantization.weight_block_size
        weight = 1 + 4 / (rows * columns)
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    expert = 3 * spec.hidden_size * spec.intermediate_size * weight
    return StepBytes(
        attention=spec.num_layers * 2 * spec.hidden_size * (q_width + kv_width) * weight,
        experts=spec.num_layers * expected_distinct_experts(spec, batch) * expert,
        head=spec.vocab_size * spec.hidden_size * plain,
        kv=batch * context * block_bytes(spec.kv_caches(), 1, dtype=kv_dtype, ranks=1),
        router=spec.num_layers * spec.num_experts * spec.hidden_size * ROUTER_BYTES,
    )
