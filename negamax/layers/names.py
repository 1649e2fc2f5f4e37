"""Tensor names of a layer in checkpoints, as the model family defines the names."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class DecoderNames:
    """Names of the checkpoint tensors outside the layers."""

    embedding: str
    norm: str
    head: str


@dataclass(frozen=True)
class AttentionNames:
    """Tensor names of projections, query and key norms, and scales of an FP8 cache."""

    q: str
    k: str
    v: str
    out: str
    q_norm: str
    k_norm: str
    k_scale: str
    v_scale: str

    @property
    def qkv(self) -> tuple[str, str, str]:
        return self.q, self.k, self.v


class MlpNames(NamedTuple):
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class MoeNames:
    """Tensor names of router and experts. In expert names, `*` stands for the expert's number."""

    router: str
    router_bias: str
    gate: str
    up: str
    down: str
    shared: MlpNames | None = None

    def expert(self, number: int) -> MlpNames:
        names = (name.replace("*", str(number)) for name in (self.gate, self.up, self.down))
        return MlpNames(*names)


@dataclass(frozen=True)
class IndexerNames:
    """Tensor names of the index projections and index norms of block-sparse attention."""

    q: str
    k: str
    q_norm: str
    k_norm: str
