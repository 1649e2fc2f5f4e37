"""The training model of nano-m3: MiniMax-M3 in plain PyTorch, with all experts for all tokens.

Sparse layers attend to the blocks that an index selects. The selection has no gradient.
`index_loss` trains the index to select the blocks that the attention of its KV head prefers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nano.model import Precision, apply_rope


@dataclass(frozen=True)
class M3Config:
    """Sizes of the model, with the names of config.json."""

    vocab_size: int = 4160
    hidden_size: int = 256
    num_hidden_layers: int = 5
    # number of first layers with full attention and an MLP without experts
    num_dense_layers: int = 2
    num_attention_heads: int = 8
    num_key_value_heads: int = 2  # also the number of index heads
    head_dim: int = 128
    rotary_dim: int = 64
    rope_theta: float = 5_000_000.0
    dense_intermediate_size: int = 512
    intermediate_size: int = 256  # width of a routed expert and of the shared expert
    num_local_experts: int = 4
    num_experts_per_tok: int = 2
    routed_scaling_factor: float = 2.0
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    rms_norm_eps: float = 1e-6
    index_dim: int = 128
    block_size: int = 128
    topk_blocks: int = 4  # includes the query's own block
    max_position_embeddings: int = 8192


@dataclass(frozen=True)
class Heads:
    """Inputs of a layer's attention. Sparse layers also have queries and keys of the index."""

    q: Tensor  # [B, heads, S, head_dim]
    k: Tensor  # [B, kv heads, S, head_dim]
    v: Tensor  # [B, kv heads, S, head_dim]
    index_q: Tensor | None = None  # [B, kv heads, S, index_dim]
    index_k: Tensor | None = None  # [B, S, index_dim]


# (number of the layer, its heads) -> [B, heads, S, head_dim]
Attend = Callable[[int, Heads], Tensor]


def gemma_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x * rsqrt(mean(x^2) + eps) * (1 + weight)`, computed in float32 and rounded once."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (1 + weight.to(x.dtype).float())).to(x.dtype)


def rope_tables(positions: Tensor, config: M3Config) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [*positions.shape, rotary_dim/2]."""
    steps = torch.arange(0, config.rotary_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float().unsqueeze(-1) * config.rope_theta ** -(steps / config.rotary_dim)
    return angles.cos(), angles.sin()


class Layer(nn.Module):
    """Run one decoder layer in two halves, before and after its attention."""

    expert_bias: Tensor

    def __init__(self, config: M3Config, *, is_sparse: bool) -> None:
        super().__init__()
        self.config, self.is_sparse = config, is_sparse
        hidden, head = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

        def matrix(*shape: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape) * scale * shape[-1] ** -0.5)

        def norm(size: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(size))

        residual = (2 * config.num_hidden_layers) ** -0.5
        self.q, self.k, self.v = (
            matrix(heads * head, hidden),
            matrix(kv_heads * head, hidden),
            matrix(kv_heads * head, hidden),
        )
        self.o = matrix(hidden, heads * head, scale=residual)
        self.input_norm, self.post_norm = norm(hidden), norm(hidden)
        self.q_norm, self.k_norm = norm(head), norm(head)
        # The last expert is the shared one. A dense layer has no other expert.
        inner = config.intermediate_size if is_sparse else config.dense_intermediate_size
        experts = config.num_local_experts + 1 if is_sparse else 1
        self.w1, self.w3 = matrix(experts, inner, hidden), matrix(experts, inner, hidden)
        self.w2 = matrix(experts, hidden, inner, scale=residual)
        self.register_buffer("expert_bias", torch.zeros(experts - 1))
        if is_sparse:
            self.index_q = matrix(kv_heads * config.index_dim, hidden)
            self.index_k = matrix(config.index_dim, hidden)
            self.index_q_norm, self.index_k_norm = norm(config.index_dim), norm(config.index_dim)
            self.gate = matrix(config.num_local_experts, hidden)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor, use: Precision) -> tuple[Tensor, ...]:
        """Project x [B, S, hidden] to normed, rotated `Heads`. The index gives x no gradient."""
        config = self.config
        x = use.activation(gemma_norm(x, self.input_norm, config.rms_norm_eps))

        def heads(source: Tensor, weight: Tensor, size: int, norm: Tensor | None) -> Tensor:
            made = F.linear(source, use.weight(weight)).unflatten(-1, (-1, size)).transpose(1, 2)
            if norm is None:
                return made
            return apply_rope(gemma_norm(made, norm, config.rms_norm_eps), cos, sin)

        q = heads(x, self.q, config.head_dim, self.q_norm)
        k = heads(x, self.k, config.head_dim, self.k_norm)
        v = heads(x, self.v, config.head_dim, None)
        if not self.is_sparse:
            return q, k, v
        x = x.detach()
        index_q = heads(x, self.index_q, config.index_dim, self.index_q_norm)
        index_k = heads(x, self.index_k, config.index_dim, self.index_k_norm)[:, 0]
        return q, k, v, index_q, index_k

    def finish(self, x: Tensor, mixed: Tensor, use: Precision) -> tuple[Tensor, Tensor]:
        """Finish the layer from x [B, S, hidden] and the attention output.

        Return (x, tokens per routed expert).
        """
        x = x + F.linear(use.activation(mixed.transpose(1, 2).flatten(2)), use.weight(self.o))
        update, load = self.experts(gemma_norm(x, self.post_norm, self.config.rms_norm_eps), use)
        return x + update, load

    def experts(self, x: Tensor, use: Precision) -> tuple[Tensor, Tensor]:
        """Run the routed experts, weighted by a scaled sigmoid router, and the shared expert.

        The router's bias affects only the selection.
        """
        config = self.config
        weights = torch.ones(*x.shape[:-1], 1, device=x.device)
        load = self.expert_bias
        if self.is_sparse:
            scores = torch.sigmoid(F.linear(x.float(), self.gate))
            chosen = (scores.detach() + self.expert_bias).topk(config.num_experts_per_tok).indices
            selected = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
            routed = scores * selected
            routed = routed / routed.sum(-1, keepdim=True) * config.routed_scaling_factor
            weights, load = torch.cat((routed, weights), -1), selected.flatten(0, -2).sum(0)
        x = use.activation(x)
        gate = F.linear(x, use.weight(self.w1).flatten(0, 1)).clamp(max=config.swiglu_limit)
        up = F.linear(x, use.weight(self.w3).flatten(0, 1))
        up = up.clamp(-config.swiglu_limit, config.swiglu_limit)
        inner = use.activation(gate * torch.sigmoid(config.swiglu_alpha * gate) * (up + 1))
        inner = inner.unflatten(-1, (self.w1.shape[0], -1)) * weights.to(x.dtype).unsqueeze(-1)
        w2 = use.weight(self.w2).transpose(0, 1).flatten(1)  # [hidden, experts * inner]
        return F.linear(inner.flatten(-2), w2), load


class M3Model(nn.Module):
    """Map token ids to hidden states. The loss applies the head only to trained positions."""

    def __init__(self, config: M3Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Parameter(torch.randn(config.vocab_size, config.hidden_size) * 0.5)
        self.layers = nn.ModuleList(
            Layer(config, is_sparse=index >= config.num_dense_layers)
            for index in range(config.num_hidden_layers)
        )
        self.norm = nn.Parameter(torch.zeros(config.hidden_size))
        self.head = nn.Parameter(torch.randn(config.vocab_size, config.hidden_size) * 0.02)

    def compile(self) -> None:  # type: ignore[override]
        """Compile both halves of each layer with fixed shapes."""
        for layer in self.layers:
            layer.project = torch.compile(layer.project, dynamic=False)
            layer.finish = torch.compile(layer.finish, dynamic=False)

    def forward(
        self, tokens: Tensor, attend: Attend, *, dtype: torch.dtype, use: Precision
    ) -> tuple[Tensor, list[Tensor]]:
        """Map tokens [B, S] to (normed hidden [B, S, hidden], tokens per routed expert)."""
        cos, sin = rope_tables(torch.arange(tokens.shape[1], device=tokens.device), self.config)
        x = F.embedding(tokens, self.embed.to(dtype))
        loads: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            mixed = attend(index, Heads(*layer.project(x, cos, sin, use)))
            x, load = layer.finish(x, mixed, use)
            loads.append(load)
        return gemma_norm(x, self.norm, self.config.rms_norm_eps), loads

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [..., hidden] to [..., vocab] in the dtype of the hidden states."""
        return F.linear(hidden, self.head.to(hidden.dtype))


@dataclass(frozen=True)
class Layout:
    """The documents of a packed batch.

    A document of more than `topk_blocks` blocks starts at a multiple of the block size. A shorter
    document has full attention.
    """

    documents: Tensor  # int32 [B, S], ascending in each row
    is_short: Tensor  # bool [B, S], whether the token's document is short
    window: Tensor  # int32 [B], reach of the dense layers in each row

    def to(self, device: torch.device) -> Layout:
        return Layout(self.documents.to(device), self.is_short.to(device), self.window.to(device))


def _block_scores(index_q: Tensor, index_k: Tensor, documents: Tensor, block: int) -> Tensor:
    """Score the blocks of one row by their best visible key; -inf if no key is visible.

    index_q [H, Q, D], index_k [S, D], `documents` [S] -> [H, S, S / block].
    """
    size = documents.shape[0]
    scores = (index_q.flatten(0, 1) @ index_k.mT).unflatten(0, (-1, size)).float()
    at = torch.arange(size, device=documents.device)
    visible = (documents[:, None] == documents) & (at[:, None] >= at)
    return scores.masked_fill(~visible, -torch.inf).unflatten(-1, (-1, block)).amax(-1)


def _pick(scores: Tensor, config: M3Config) -> Tensor:
    """Select the query's own block and the best others, at most `topk_blocks` in all.

    Maps block scores [..., S, blocks] to bool of the same shape.
    """
    size, blocks = scores.shape[-2:]
    local = torch.arange(size, device=scores.device) // config.block_size
    forced = local[:, None] == torch.arange(blocks, device=scores.device)
    best = scores.masked_fill(forced, torch.inf).topk(min(config.topk_blocks, blocks)).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & (
        scores > -torch.inf
    )


@dataclass
class Chooser:
    """Select the blocks of a sparse layer. `mode` is "all" or "index"."""

    config: M3Config
    mode: str = "index"
    scores: Callable[..., Tensor] = field(default=_block_scores)

    @torch.no_grad()
    def choose(self, heads: Heads, layout: Layout) -> Tensor:
        """Return bool [B, kv heads, S, blocks]. In short documents all blocks are selected."""
        assert heads.index_q is not None and heads.index_k is not None
        rows, config = [], self.config
        for q, k, documents in zip(heads.index_q, heads.index_k, layout.documents, strict=True):
            rows.append(_pick(self.scores(q, k, documents, config.block_size), config))
        chosen = torch.stack(rows) | layout.is_short[:, None, :, None]
        return torch.ones_like(chosen) if self.mode == "all" else chosen


def index_loss(
    q: Tensor, k: Tensor, index_q: Tensor, index_k: Tensor, documents: Tensor, sample: Tensor,
    weight: Tensor, block: int,
) -> Tensor:  # fmt: skip
    """Return the distance of the index from the attention at sampled queries.

    `sample` [B, M] has weights [B, M]; `Heads` gives the shapes of heads. For one query and KV
    head, p(b) is the mean over the query heads of the mass that full causal attention gives block
    b. q(b) is the softmax over blocks of max_{j in b} iq . ik_j / sqrt(d), the score at inference.
    The loss is the mean of KL(p || q). Only the index gets a gradient.
    """
    batch, kv_heads, size, dim = index_q.shape
    at = torch.arange(size, device=sample.device)
    rows = torch.arange(batch, device=sample.device)[:, None]
    visible = (documents[rows, sample][..., None] == documents[:, None]) & (sample[..., None] >= at)
    visible = visible[:, None]  # [B, 1, M, S]
    with torch.no_grad():
        # [B, M, group, kv heads, D] -> [B, kv heads, M * group, D]
        some = q.unflatten(1, (kv_heads, -1)).transpose(1, 3)[rows, sample]
        group = some.shape[2]
        some = some.permute(0, 3, 1, 2, 4).flatten(2, 3)
        logits = (some @ k.mT).unflatten(2, (-1, group)).float() * q.shape[-1] ** -0.5
        mass = torch.softmax(logits.masked_fill(~visible[:, :, :, None], -torch.inf), -1).mean(3)
        mass = mass.unflatten(-1, (-1, block)).sum(-1)  # [B, kv heads, M, blocks]
    asking = index_q.transpose(1, 2)[rows, sample].transpose(1, 2)
    scores = (asking @ index_k[:, None].mT).float() * dim**-0.5
    scores = scores.masked_fill(~visible, -torch.inf).unflatten(-1, (-1, block)).amax(-1)
    seen = scores > -torch.inf
    predicted = torch.log_softmax(scores, -1).masked_fill(~seen, 0.0)
    entropy = torch.xlogy(mass, mass)
    divergence = (entropy - mass * predicted).sum(-1).mean(1)  # [B, M]
    return (divergence * weight).sum() / weight.sum().clamp(min=1)


def masked_attention(heads: Heads, visible: Tensor) -> Tensor:
    """Attend by an explicit mask [B, 1 or kv heads, S, S]. Use this function for small sizes."""
    group = heads.q.shape[1] // heads.k.shape[1]
    if visible.shape[1] > 1:
        visible = visible.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(
        heads.q, heads.k, heads.v, attn_mask=visible, enable_gqa=True
    )


def dense_mask(layout: Layout, *, windowed: bool) -> Tensor:
    """Return bool [B, 1, S, S]: earlier tokens of the same document within the row's reach."""
    at = torch.arange(layout.documents.shape[1], device=layout.documents.device)
    back = at[:, None] - at
    visible = (layout.documents[:, :, None] == layout.documents[:, None]) & (back >= 0)
    if windowed:
        visible = visible & (back < layout.window[:, None, None])
    return visible[:, None]
