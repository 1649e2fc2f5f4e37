"""The training model: MiniMax-M2 in plain PyTorch, with all experts for all tokens.

Weights are float32. A forward pass rounds weights to the checkpoint's FP8 blocks with a
straight-through gradient, and uses them in bfloat16. The export therefore loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FP8_MAX = 448.0
BLOCK = 128


@dataclass(frozen=True)
class NanoConfig:
    """Sizes of the model, with the names of config.json."""

    vocab_size: int = 4160
    hidden_size: int = 256
    num_hidden_layers: int = 5
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 128
    rotary_dim: int = 64
    rope_theta: float = 5_000_000.0
    intermediate_size: int = 512
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    rms_norm_eps: float = 1e-6


# (q [B,H,S,D], k and v [B,Hkv,S,D]) -> [B,H,S,D]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Cast = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Precision:
    """Hold the functions that round FP8 weights and the inputs of their GEMMs."""

    weight: Cast
    activation: Cast


def block_scales(weight: Tensor) -> Tensor:
    """Return float32 scales [..., rows/128, columns/128] that map each block to float8_e4m3fn."""
    rows, columns = weight.shape[-2:]
    blocks = weight.unflatten(-2, (rows // BLOCK, BLOCK)).unflatten(-1, (columns // BLOCK, BLOCK))
    return blocks.abs().amax(dim=(-3, -1)).clamp(min=1e-8) / FP8_MAX


def spread(scales: Tensor) -> Tensor:
    """Repeat block scales to the shape of the weight."""
    return scales.repeat_interleave(BLOCK, dim=-2).repeat_interleave(BLOCK, dim=-1)


class _FakeQuant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, weight: Tensor) -> Tensor:
        scales = spread(block_scales(weight))
        return ((weight / scales).to(torch.float8_e4m3fn).float() * scales).to(torch.bfloat16)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.float()


def fake_quant(weight: Tensor) -> Tensor:
    """Return the bfloat16 weight of the FP8 checkpoint, with a straight-through gradient."""
    result: Tensor = _FakeQuant.apply(weight)
    return result


class _FakeQuantActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        groups = x.float().unflatten(-1, (-1, BLOCK))
        scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-8) / FP8_MAX
        return ((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2).to(x.dtype)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def fake_quant_activation(x: Tensor) -> Tensor:
    """Round the input of a GEMM per token in groups of 128, as dynamic activation scales do."""
    result: Tensor = _FakeQuantActivation.apply(x)
    return result


def precision(dtype: torch.dtype, *, weights: bool, activations: bool) -> Precision:
    """Return the precision of a forward pass in `dtype`, with optional FP8 rounding."""
    return Precision(
        weight=(lambda weight: fake_quant(weight).to(dtype))
        if weights
        else (lambda weight: weight.to(dtype)),
        activation=fake_quant_activation if activations else (lambda x: x),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x * rsqrt(mean(x^2) + eps) * weight`, with float32 statistics, in the dtype of x."""
    wide = x.float()
    return (
        wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype).float()
    ).to(x.dtype)


def rope_tables(positions: Tensor, config: NanoConfig) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [*positions.shape, rotary_dim/2]."""
    exponents = (
        torch.arange(0, config.rotary_dim, 2, device=positions.device, dtype=torch.float32)
        / config.rotary_dim
    )
    angles = positions.float().unsqueeze(-1) * config.rope_theta**-exponents
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `rotary_dim` dimensions of x [..., S, D] in half-split pairs.

    cos and sin are [S, rotary_dim/2].
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    return torch.cat(
        ((first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype), rest),
        dim=-1,
    )


class Layer(nn.Module):
    """One decoder layer: attention and a mixture of experts, with a norm before each."""

    expert_bias: Tensor

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config
        hidden, experts, inner = (
            config.hidden_size,
            config.num_local_experts,
            config.intermediate_size,
        )
        q_size, kv_size = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )

        def matrix(*shape: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape) * scale * shape[-1] ** -0.5)

        residual = (2 * config.num_hidden_layers) ** -0.5
        self.q, self.k, self.v = (
            matrix(q_size, hidden),
            matrix(kv_size, hidden),
            matrix(kv_size, hidden),
        )
        self.o = matrix(hidden, q_size, scale=residual)
        self.w1, self.w3 = matrix(experts, inner, hidden), matrix(experts, inner, hidden)
        self.w2 = matrix(experts, hidden, inner, scale=residual)
        self.gate = matrix(experts, hidden)
        self.register_buffer("expert_bias", torch.zeros(experts))
        self.input_norm, self.post_norm = (
            nn.Parameter(torch.ones(hidden)),
            nn.Parameter(torch.ones(hidden)),
        )
        self.q_norm, self.k_norm = (
            nn.Parameter(torch.ones(q_size)),
            nn.Parameter(torch.ones(kv_size)),
        )

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attention, use: Precision
    ) -> tuple[Tensor, Tensor]:
        """Map x [B, S, hidden] to (x, tokens per expert [experts])."""
        x = x + self.attention(
            rms_norm(x, self.input_norm, self.config.rms_norm_eps), cos, sin, attend, use
        )
        update, load = self.experts(rms_norm(x, self.post_norm, self.config.rms_norm_eps), use)
        return x + update, load

    def attention(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attention, use: Precision
    ) -> Tensor:
        """Run grouped-query attention with RMS norm over the whole q and k vectors."""
        config = self.config
        x = use.activation(x)
        q = rms_norm(F.linear(x, use.weight(self.q)), self.q_norm, config.rms_norm_eps)
        k = rms_norm(F.linear(x, use.weight(self.k)), self.k_norm, config.rms_norm_eps)
        v = F.linear(x, use.weight(self.v))
        q, k, v = (part.unflatten(-1, (-1, config.head_dim)).transpose(1, 2) for part in (q, k, v))
        mixed = attend(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v)
        return F.linear(use.activation(mixed.transpose(1, 2).flatten(2)), use.weight(self.o))

    def experts(self, x: Tensor, use: Precision) -> tuple[Tensor, Tensor]:
        """Run the experts that a sigmoid router selects by score and selection bias."""
        config = self.config
        scores = torch.sigmoid(F.linear(x.float(), self.gate))
        chosen = torch.topk(
            scores.detach() + self.expert_bias, config.num_experts_per_tok, dim=-1
        ).indices
        selected = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        weights = scores * selected
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        x = use.activation(x)
        # [experts * inner, hidden]
        w1, w3 = use.weight(self.w1).flatten(0, 1), use.weight(self.w3).flatten(0, 1)
        inner = F.silu(F.linear(x, w1)) * F.linear(x, w3)
        inner = use.activation(inner)
        inner = (
            inner.unflatten(-1, (config.num_local_experts, -1)) * weights.unsqueeze(-1)
        ).flatten(-2)
        w2 = use.weight(self.w2).transpose(0, 1).flatten(1)  # [hidden, experts * inner]
        return F.linear(inner, w2), selected.flatten(0, -2).sum(0)


class NanoModel(nn.Module):
    """Map token ids to hidden states. The loss applies the head only to trained positions."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Parameter(torch.randn(config.vocab_size, config.hidden_size) * 0.5)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.head = nn.Parameter(torch.randn(config.vocab_size, config.hidden_size) * 0.02)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attention,
        *,
        dtype: torch.dtype,
        use: Precision,
    ) -> tuple[Tensor, Tensor]:
        """Map tokens [B, S] to (normed hidden [B, S, hidden], tokens per expert [layers, experts]).

        positions [S] or [B, 1, S].
        """
        cos, sin = rope_tables(positions, self.config)
        x = F.embedding(tokens, self.embed.to(dtype))
        loads: list[Tensor] = []
        for layer in self.layers:
            x, load = layer(x, cos, sin, attend, use)
            loads.append(load)
        return rms_norm(x, self.norm, self.config.rms_norm_eps), torch.stack(loads)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [..., hidden] to [..., vocab] in the dtype of the hidden states."""
        return F.linear(hidden, self.head.to(hidden.dtype))


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
