"""Sizes of an attention layer, and the projections of a rank's heads."""

from collections.abc import Sequence
from dataclasses import dataclass

from negamax.layers.linear import ProjectionPart, RowParallel
from negamax.layers.weights import LayerSetup


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of an attention layer before it is split over ranks. `eps`: epsilon of the QK norms."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    def rows(self, heads: range) -> range:
        """Return the rows of a projection that belong to `heads`."""
        return range(heads.start * self.head_dim, heads.stop * self.head_dim)

    def qkv(self, names: Sequence[str], queried: range, kv_heads: range) -> list[ProjectionPart]:
        """Return q, k, v projections with tensor names `names` and the rows of the given heads."""
        counts, own = (self.heads, self.kv_heads, self.kv_heads), (queried, kv_heads, kv_heads)
        return [
            ProjectionPart(name, count * self.head_dim, self.rows(heads))
            for name, count, heads in zip(names, counts, own, strict=True)
        ]

    def out(self, name: str, setup: LayerSetup) -> RowParallel:
        """Make the output projection of this rank's heads."""
        columns = self.rows(setup.context.layout.attention.heads(self.heads))
        shape = self.hidden_size, self.heads * self.head_dim
        return RowParallel(name, shape, columns=columns, setup=setup)
