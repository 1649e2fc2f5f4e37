"""The draft in its training form: an EAGLE3 head as `negamax/models/eagle3` runs it, unrolled.

Row p of step 0 has the target's streams of token p and the embedding of token p + 1. Step i
replaces the streams by the hidden states of step i - 1, and uses the embedding of token p + 1 + i
at position p + i. A row attends to rows up to p of step 0, and to its own row of the later steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from nano import model

# q, k, v [B, heads, S, D] -> attention output and log-sum-exp of the weights [B, heads, S]
Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
LAYERS = (2, 3, 5)  # layers of the target whose inputs are read; 5 is the last output
STEPS = 4


@dataclass(frozen=True)
class DraftConfig:
    """Sizes of the draft."""

    hidden_size: int = 256
    num_streams: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 128
    intermediate_size: int = 384
    draft_vocab_size: int = 1024
    rope_theta: float = 5_000_000.0
    rms_norm_eps: float = 1e-6


class DraftModel(nn.Module):
    """Run one layer with given embeddings."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        hidden, dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
        q_size, kv_size = config.num_attention_heads * dim, config.num_key_value_heads * dim

        def matrix(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns) * columns**-0.5)

        self.fc = matrix(hidden, config.num_streams * hidden)
        self.q, self.k, self.v = (matrix(rows, 2 * hidden) for rows in (q_size, kv_size, kv_size))
        self.o = matrix(hidden, q_size)
        self.gate, self.up = matrix(inner, hidden), matrix(inner, hidden)
        self.down = matrix(hidden, inner)
        self.head = matrix(config.draft_vocab_size, hidden)
        self.input_norm, self.hidden_norm, self.post_norm, self.norm = (
            nn.Parameter(torch.ones(hidden)) for _ in range(4)
        )

    def forward(
        self, streams: Tensor, embeddings: Tensor, positions: Tensor, attend: Attend
    ) -> list[Tensor]:
        """Map streams [B, S, streams * hidden] to the head's input in each of STEPS [B, S, hidden].

        embeddings [B, S, hidden]; positions [S] or [B, 1, S].
        """
        hidden, out = self._linear(streams, self.fc), []
        own: list[tuple[Tensor, Tensor]] = []  # keys and values of each step
        for step in range(STEPS):
            following = embeddings.roll(-1 - step, dims=1)
            hidden = self._step(hidden, following, positions + step, attend, own)
            out.append(self._norm(hidden, self.norm))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [..., hidden] to [..., draft vocabulary]."""
        return self._linear(hidden, self.head)

    def _step(
        self,
        hidden: Tensor,
        following: Tensor,
        positions: Tensor,
        attend: Attend,
        own: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        x = torch.cat(
            (self._norm(following, self.input_norm), self._norm(hidden, self.hidden_norm)), -1
        )
        q, k, v = (
            self._linear(x, weight).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            for weight in (self.q, self.k, self.v)
        )
        cos, sin = self._angles(positions)
        q, k = model.apply_rope(q, cos, sin), model.apply_rope(k, cos, sin)
        own.append((k, v))
        mixed = self._mixed(q, own, attend).transpose(1, 2).flatten(2)
        hidden = hidden + self._linear(mixed, self.o)
        x = self._norm(hidden, self.post_norm)
        inner = F.silu(self._linear(x, self.gate)) * self._linear(x, self.up)
        return hidden + self._linear(inner, self.down)

    def _mixed(self, q: Tensor, own: list[tuple[Tensor, Tensor]], attend: Attend) -> Tensor:
        """Attend to rows of the first step up to the own row, and to the own row of later steps."""
        group = q.shape[1] // own[0][0].shape[1]
        first, weight = attend(q, *own[0])
        parts, scores = [first.float()], [weight.float()]
        for k, v in own[1:]:
            k, v = (x.repeat_interleave(group, dim=1).float() for x in (k, v))
            scores.append((q.float() * k).sum(-1) * self.config.head_dim**-0.5)
            parts.append(v)
        shares = torch.stack(scores, -1).softmax(-1)
        mixed = sum(part * shares[..., i, None] for i, part in enumerate(parts))
        assert isinstance(mixed, Tensor)
        return mixed.to(q.dtype)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        half = torch.arange(0, config.head_dim, 2, device=positions.device) / config.head_dim
        angles = positions.float().unsqueeze(-1) * config.rope_theta**-half
        return angles.cos(), angles.sin()

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight.to(x.dtype))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return model.rms_norm(x, weight, self.config.rms_norm_eps)


def attend_with(mask: Tensor | BlockMask) -> Attend:
    """Attend by a bool mask [B, 1, S, S] (True: visible), or by a block mask of flex attention."""
    if isinstance(mask, Tensor):
        return lambda q, k, v: _by_definition(q, k, v, mask)

    def flex(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        asked = AuxRequest(lse=True)
        found, more = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_aux=asked)
        assert more.lse is not None
        return found, more.lse

    return flex


def _by_definition(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1).float() for x in (k, v))
    scores = (q.float() @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    weight = scores.logsumexp(-1)
    return (scores - weight.unsqueeze(-1)).exp() @ v, weight
