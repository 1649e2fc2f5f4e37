"""Make tiny MiniMax-M2 models with random specs and weights, and run them on paged caches."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from negamax.config.kv_cache import split_over_holders
from negamax.config.model_spec import ModelSpec
from negamax.formats.platform import CPU, nvidia
from negamax.kernels.attention.metadata import attention_metadata
from negamax.kernels.registry import KernelTable, resolve
from negamax.models.build import build_model
from negamax.models.decoder import Decoder
from negamax.models.minimax_m2.config import ARCHITECTURE
from negamax.parallel.context import ParallelContext
from negamax.worker import kv_cache

H200 = nvidia((9, 0), name="NVIDIA H200", shared_memory=233472)


def tiny_config(seed: int, **overrides: int | float) -> dict[str, object]:
    rng = random.Random(seed)
    kv_heads = rng.randint(1, 4)
    heads = kv_heads * rng.choice([group for group in range(1, 13) if 2 <= kv_heads * group <= 12])
    head_dim = rng.choice((8, 10, 12, 16, 18, 20, 28, 32))
    num_experts = rng.choice((4, 5, 8, 16, 31, 32))
    rotary_dims = [dim for dim in (2, 4, 6, 8, head_dim // 4 * 2, head_dim) if dim <= head_dim]
    config: dict[str, object] = {
        "architectures": [ARCHITECTURE], "model_type": "minimax_m2",
        "vocab_size": rng.choice((61, 96, 128)), "hidden_size": rng.choice((37, 48, 56, 64, 72)),
        "num_hidden_layers": rng.randint(1, 3), "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "rotary_dim": rng.choice(rotary_dims), "rope_theta": rng.choice((1e4, 5e6)),
        "max_position_embeddings": 512, "intermediate_size": rng.choice((15, 24, 40)),
        "num_local_experts": num_experts,
        "num_experts_per_tok": rng.randint(1, min(8, num_experts)),
        "rms_norm_eps": rng.choice((1e-6, 1e-5)), "dtype": "float32", "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    return config | overrides


def random_weights(spec: ModelSpec, seed: int, *, router_bias: float = 6.0) -> dict[str, Tensor]:
    """Draw tensors by checkpoint name: norms around 1, router bias up to `router_bias`."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, slot in build(spec, loaded=False).weight_slots().items():
        if slot.optional:
            continue
        values = torch.randn(slot.shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            weights[name] = (torch.rand(slot.shape, generator=generator) * 2 - 1) * router_bias
        elif "norm" in name:
            weights[name] = 1 + 0.3 * values
        else:
            weights[name] = values * slot.shape[-1] ** -0.5
    return weights


def build(
    spec: ModelSpec,
    weights: Mapping[str, Tensor] | None = None,
    *,
    context: ParallelContext | None = None,
    dtype: torch.dtype = torch.float32,
    choices: Mapping[str, str] | None = None,
    kernels: KernelTable | None = None,
    loaded: bool = True,
) -> Decoder:
    """Return a model that holds `weights`, ready to run. If not `loaded`, the slots are empty."""
    kernels = kernels or resolve(platform=CPU, dtype=dtype)
    chosen = {
        op: tuple(kernel for kernel in kernels.candidates[op] if kernel.provider == provider)
        for op, provider in (choices or {}).items()
    }
    kernels = replace(kernels, candidates={**kernels.candidates, **chosen})
    context = context or ParallelContext.single()
    model = build_model(spec, context=context, device=torch.device("cpu"), kernels=kernels)
    if loaded:
        assert weights is not None
        for name, slot in model.weight_slots().items():
            if name in weights or not slot.optional:
                slot.write(weights[name])
        model.finish_loading()
    return model


def checkpoint_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    weights = {}
    for name, tensor in model.state_dict().items():
        name = name.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith("experts.gate_up_proj"):
            for expert, fused in enumerate(tensor):
                prefix = name.replace("gate_up_proj", str(expert))
                weights[f"{prefix}.w1.weight"], weights[f"{prefix}.w3.weight"] = fused.chunk(2)
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                weights[f"{name.replace('down_proj', str(expert))}.w2.weight"] = down
        else:
            weights[name] = tensor
    return weights


class PagedRun:
    def __init__(
        self,
        model: Decoder,
        *,
        ranks: int = 1,
        num_blocks: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device = torch.device("cpu"),  # noqa: B008  (the default is immutable)
        holders: int = 1,
    ) -> None:
        """Allocate caches. `holders` ranks have copies of a KV head, and split its blocks."""
        self.model, self.block_size, self.device = model, block_size, device
        self.kv = kv_cache.allocate(
            split_over_holders(model.spec.kv_caches(), holders), num_blocks, block_size=block_size,
            dtype=dtype, ranks=ranks, device=device,
        )  # fmt: skip
        for caches in self.kv:  # The previous contents of the caches must have no effect.
            caches["k"].fill_(7.0)
            caches["v"].fill_(-9.0)
        generator = torch.Generator().manual_seed(num_blocks)
        self.free = torch.randperm(num_blocks, generator=generator).tolist()
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.capture: tuple[int, ...] = ()  # layers whose residual streams `captured` holds
        self.captured: list[Tensor] = []

    def step(self, chunks: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Tensor]:
        """Run `chunks` (sequence, next tokens) in one step; return the logits of all tokens.

        Chunks of one token must come first.
        """
        token_ids: list[int] = []
        for name, tokens in chunks:
            table, end = self.tables.setdefault(name, []), self.lengths.get(name, 0) + len(tokens)
            while len(table) * self.block_size < end:
                table.append(self.free.pop())
            token_ids += tokens
            self.lengths[name] = end
        names = [name for name, _ in chunks]
        counts = [len(tokens) for _, tokens in chunks]
        num_decodes = next((i for i, count in enumerate(counts) if count != 1), len(counts))
        lengths, tables = [self.lengths[name] for name in names], self._padded_tables(names)
        metadata = attention_metadata(tables, lengths, counts, num_decodes=num_decodes)
        with torch.inference_mode():
            ids = torch.tensor(token_ids, dtype=torch.int64, device=self.device)
            hidden, self.captured = self.model.forward(ids, metadata, self.kv, capture=self.capture)
            logits = self.model.logits(hidden)
        return dict(zip(names, logits.split(counts), strict=True))

    def _padded_tables(self, names: Sequence[str]) -> Tensor:
        tables = [self.tables[name] for name in names]
        width = max(len(table) for table in tables)
        padded = [table + [0] * (width - len(table)) for table in tables]
        return torch.tensor(padded, device=self.device)
