"""The names of a layer's tensors in checkpoints, which its model's family gives it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecoderNames:
    """What stands around the layers."""

    embedding: str
    norm: str
    head: str


@dataclass(frozen=True)
class AttentionNames:
    """Projections, the norms of queries and keys, the scales of an FP8 cache."""

    q: str
    k: str
    v: str
    out: str
    q_norm: str
    k_norm: str
    k_scale: str
    v_scale: str


@dataclass(frozen=True)
class MoeNames:
    """Router and experts; an expert's number is * in the names of its matrices."""

    router: str
    router_bias: str
    gate: str
    up: str
    down: str
