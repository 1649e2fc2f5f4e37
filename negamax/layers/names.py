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
class MlpNames:
    """The matrices of an MLP."""

    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class MoeNames:
    """Router and experts; an expert's number is * in the names of its matrices. `shared`: the MLP
    that all tokens pass beside their experts.
    """

    router: str
    router_bias: str
    gate: str
    up: str
    down: str
    shared: MlpNames | None = None

    def expert(self, number: int) -> MlpNames:
        """The names of one expert."""
        names = (name.replace("*", str(number)) for name in (self.gate, self.up, self.down))
        return MlpNames(*names)


@dataclass(frozen=True)
class IndexerNames:
    """What scores blocks of keys in block-sparse attention: projections and their norms."""

    q: str
    k: str
    q_norm: str
    k_norm: str
