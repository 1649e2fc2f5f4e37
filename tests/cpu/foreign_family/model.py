from dataclasses import dataclass

import torch
from torch import Tensor

from foreign_family import names
from foreign_family.config import ForeignSpec
from negamax.kernels.activations import SILU, QuantizedActivations
from negamax.kernels.attention.metadata import AttentionMetadata, PagedShape
from negamax.kernels.attention.op import split_heads
from negamax.kernels.kvcache.op import KvCache, cache_rows, store, write
from negamax.kernels.rotary import half_split, signed_frequencies
from negamax.layers.attention import Attention, GroupedQueryKind, KvCaches
from negamax.layers.linear import ColumnParallel, ProjectionPart
from negamax.layers.mlp import Mlp
from negamax.layers.moe import SparseMoe
from negamax.layers.qk_norm import PerHeadNorm
from negamax.layers.weights import LayerSetup
from negamax.models.decoder import Decoder, DecoderLayer, attention_sizes, moe_sizes
from negamax.parallel.collectives import Partial


class SelectedAttention:
    """Attention of each query to the `index_top_k` keys with the highest index scores."""

    def __init__(self, spec: ForeignSpec, setup: LayerSetup) -> None:
        own, view, sizes = names.attention(1), setup.context.layout.attention, attention_sizes(spec)
        heads, kv_heads = view.heads(spec.num_heads), view.kv_heads(spec.num_kv_heads)
        self._heads, self._kv_heads, self._top_k = len(heads), len(kv_heads), spec.index_top_k
        parts = sizes.qkv(own.qkv, heads, kv_heads)
        self._qkv = ColumnParallel(parts, spec.hidden_size, setup=setup)
        width = spec.index_width
        index = [ProjectionPart(name, width, range(width)) for name in names.INDEX]
        self._index = ColumnParallel(index, spec.hidden_size, setup=setup)
        self._out = sizes.out(own.out, setup)
        self._qk_norm = PerHeadNorm(own, sizes, gemma=False, setup=setup)
        self.activation = self.norm_kernel = None
        self.gives_quantized = False
        parts = (self._qkv, self._index, self._out, self._qk_norm)
        self.slots = [slot for part in parts for slot in part.slots]

    def finish_loading(self) -> None:
        for part in (self._qkv, self._index, self._out):
            part.finish_loading()

    def __call__(
        self, x: Tensor | QuantizedActivations, metadata: AttentionMetadata, kv: KvCaches
    ) -> Partial:
        full, own = (metadata.prepared[kind.name] for kind in (GroupedQueryKind, SelectedKind))
        qkv = self._qkv(x)
        q, k, v = split_heads(qkv, heads=self._heads, kv_heads=self._kv_heads)
        q, k = self._qk_norm(q, k)
        q, k = half_split(q, full.cos, full.sin), half_split(k, full.cos, full.sin)
        write(k, v, KvCache(kv["k"], kv["v"]), full.slot_mapping)
        index_q, index_k = self._index(x).float().chunk(2, dim=-1)
        store(index_k.unsqueeze(1), kv["index"], own.slot_mapping)
        out, first = [], 0
        for table, length, count in own.sequences:
            mine, first = slice(first, first + count), first + count
            keys, values, index = (gathered(kv[name], table, length) for name in kv)
            allowed = selected(index_q[mine], index[0], self._top_k)
            out.append(attended(q[mine], keys, values, allowed))
        return self._out(torch.cat(out).to(qkv.dtype))


@dataclass(frozen=True)
class SelectedStep:
    """Hold the index-cache positions of a step's tokens, and the block tables of its sequences."""

    slot_mapping: Tensor  # [T]
    sequences: list[tuple[Tensor, int, int]]


class SelectedKind:
    name = "selected"

    def prepare(self, metadata: AttentionMetadata, kv: KvCaches) -> SelectedStep:
        block_size, positions = kv["index"].shape[2], metadata.positions
        blocks = metadata.block_tables[metadata.token_slots, positions // block_size].long()
        slots = blocks * block_size + positions % block_size
        tables = metadata.used_tables(block_size)
        lengths = metadata.host_seq_lens, metadata.host_query_lens
        return SelectedStep(
            cache_rows(slots, kv_heads=1, block_size=block_size),
            list(zip(tables, *lengths, strict=True)),
        )


def gathered(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Return the first `length` tokens of a sequence, [heads, length, width] fp32."""
    blocks = cache[table[: -(-length // cache.shape[2])].long()].float()
    return blocks.transpose(0, 1).flatten(1, 2)[:, :length]


def selected(index_q: Tensor, index_k: Tensor, top_k: int) -> Tensor:
    """Return the keys that each of the last tokens attends to, [queries, keys] bool."""
    scores = index_q @ index_k.T
    count, length = scores.shape
    seen = torch.arange(length) <= torch.arange(length - count, length)[:, None]
    best = scores.masked_fill(~seen, -torch.inf).topk(min(top_k, length), dim=-1).indices
    return torch.zeros_like(seen).scatter(1, best, True) & seen


def attended(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Map q [queries, heads, dim], k, v [kv_heads, keys, dim] to [queries, heads * dim]."""
    group = q.shape[1] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q.transpose(0, 1) @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    probabilities = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return (probabilities @ v).transpose(0, 1).flatten(1)


def build(spec: ForeignSpec, setup: LayerSetup) -> Decoder:
    view = setup.context.layout.attention
    kv_heads = len(view.kv_heads(spec.num_kv_heads))
    shape = PagedShape(kv_heads, len(view.heads(spec.num_heads)) // kv_heads, block_size=0)
    frequencies = signed_frequencies(spec.rotary_dim, spec.rope_theta).to(setup.weights.device)
    full = GroupedQueryKind(shape, frequencies=frequencies, kernels=setup.kernels)
    sizes = attention_sizes(spec)
    attention = Attention(names.attention(0), sizes, norm_per_head=True, setup=setup)
    hidden = spec.hidden_size
    mlp = Mlp(names.MLP, hidden_size=hidden, width=spec.mlp_width, activation=SILU, setup=setup)
    moe = SparseMoe(names.MOE, layer=1, **moe_sizes(spec), setup=setup)
    blocks = ((attention, mlp), (SelectedAttention(spec, setup), moe))
    eps = spec.rms_norm_eps
    layers = [
        DecoderLayer(*parts, spec.hidden_size, norms=names.norms(layer), eps=eps, setup=setup)
        for layer, parts in enumerate(blocks)
    ]
    kinds = [(full, 0), (SelectedKind(), 1)]
    return Decoder(spec, layers, kinds, names=names.DECODER, eps=eps, setup=setup)
