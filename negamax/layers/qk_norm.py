"""RMS norms of queries and keys, over all heads together or over each head alone."""

import torch
from torch import Tensor

from negamax.kernels.attention import op as spec
from negamax.layers.heads import AttentionSizes
from negamax.layers.names import AttentionNames
from negamax.layers.weights import LayerSetup, WeightSlot


class FullWidthNorm:
    """RMS norm over the query heads of all ranks, and over the key heads of all ranks."""

    op = "attention.qk_norm"

    def __init__(
        self, names: AttentionNames, sizes: AttentionSizes, *, gemma: bool, setup: LayerSetup
    ) -> None:
        assert not gemma, "norms over all heads do not support gemma; set norm_per_head"
        view, self._group = setup.context.layout.attention, setup.context.attention_group
        heads, kv_heads = view.cache_heads(sizes.heads), view.kv_heads(sizes.kv_heads)
        q, kv = sizes.rows(heads), sizes.rows(kv_heads)
        weight = torch.empty(len(q) + len(kv), dtype=torch.float32, device=setup.weights.device)
        q_weight, k_weight = weight.split([len(q), len(kv)])
        self.norm = spec.prepare_qk_norm(
            weight, heads=len(heads), kv_heads=len(kv_heads), eps=sizes.eps, ranks=view.size
        )
        q_total, k_total = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.slots = [
            WeightSlot(names.q_norm, (q_total,), target=q_weight, region=(q,)),
            WeightSlot(names.k_norm, (k_total,), target=k_weight, region=(kv,)),
        ]

    def finish_loading(self) -> None:
        """Do nothing: the norm weights need no change after loading."""

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalize this rank's q and k [T, heads, head_dim] fp32."""
        return spec.qk_norm(q, k, self.norm, group=self._group)


class PerHeadNorm:
    """RMS norm over each head. `gemma`: scale by 1 + the checkpoint's weights."""

    op = "attention.head_norm"

    def __init__(
        self, names: AttentionNames, sizes: AttentionSizes, *, gemma: bool, setup: LayerSetup
    ) -> None:
        view, width = setup.context.layout.attention, sizes.head_dim
        own = len(view.cache_heads(sizes.heads)), len(view.kv_heads(sizes.kv_heads))
        weight = torch.empty(2, width, dtype=torch.float32, device=setup.weights.device)
        self.norm, self._gemma = spec.HeadNorm(weight, *own, sizes.eps), gemma
        self.slots = [
            WeightSlot(name, (width,), target=target)
            for name, target in zip((names.q_norm, names.k_norm), weight, strict=True)
        ]

    def finish_loading(self) -> None:
        if self._gemma:
            self.norm.weight.add_(1)

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        (q_weight, k_weight), eps = self.norm.weight, self.norm.eps
        return spec.head_norm(q, q_weight, eps), spec.head_norm(k, k_weight, eps)
