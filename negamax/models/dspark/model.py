"""A block draft on one rank.

  context of token t:  c = rms(fc(the target's residual streams of t, concatenated))
                       each layer keeps k = rope(rms(k_proj c)) and v = v_proj c
  tokens of a block:   embeddings of the last known token at position L, and of masks at L + 1, ...
                       per layer h += attention(rms(h)); h += mlp(rms(h))
  logits of a token = head(rms(h)) + markov_w2 markov_w1[previous token]
  confidence of a token = sigmoid(proj [rms(h), markov_w1[previous token]] + bias)

The tokens of a block attend to the context and to one another. Keys and values of block tokens are
not cached. Token j of a DSpark block proposes the token at position L + 1 + j. Token j of a DFlash
block proposes the token at position L + j. DFlash has no Markov matrices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.config.model_spec import ModelSpec
from negamax.kernels.activations import QuantizedActivations, SwiGlu
from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.attention.op import HEAD_NORM_ROPE_WRITE, HeadNorm
from negamax.kernels.drafts.op import ATTEND_BLOCK, BlockContext
from negamax.kernels.gemm.op import LinearOutput
from negamax.kernels.kvcache.op import LOCATE, KvCache, TokenPlaces, cache_rows
from negamax.kernels.rotary import cos_sin, signed_frequencies
from negamax.kernels.steps.op import EMBED_TOKENS
from negamax.layers.attention import KvCaches
from negamax.layers.basic import RmsNorm, VocabEmbedding
from negamax.layers.linear import (
    ColumnParallel,
    ProjectionPart,
    RowParallel,
    cat_columns,
    stack_rows,
)
from negamax.layers.mlp import Mlp
from negamax.layers.qk_norm import PerHeadNorm
from negamax.layers.weights import LayerSetup, WeightSlot, slots_by_name
from negamax.models.decoder import Decoder, DecoderLayer, apply_norm, attention_sizes
from negamax.models.dspark import names
from negamax.models.dspark.config import BlockDraftSpec
from negamax.parallel.collectives import Partial
from negamax.parallel.layout import shard

_KIND = "draft block"  # key of draft blocks in `AttentionMetadata.prepared`


@dataclass(frozen=True)
class BlockStep:
    """Inputs of every layer in a pass over R blocks of N tokens."""

    rows: TokenPlaces  # rotary angles and cache positions of the R * N tokens in the blocks
    context: BlockContext


class BlockAttention:
    """Attention of block tokens to the context and the block, split by heads over the ranks."""

    gives_quantized = False

    def __init__(self, spec: BlockDraftSpec, layer: int, setup: LayerSetup) -> None:
        view, kernels, own = setup.context.layout.attention, setup.kernels, names.attention(layer)
        heads, kv_heads = view.heads(spec.num_heads), view.kv_heads(spec.num_kv_heads)
        sizes = attention_sizes(spec)
        self._qkv = ColumnParallel(
            sizes.qkv(own.qkv, heads, kv_heads), spec.hidden_size, setup=setup
        )
        self._out = sizes.out(own.out, setup)
        self._norms = PerHeadNorm(own, sizes, gemma=spec.is_gemma, setup=setup)
        weight, eps = self._norms.norm.weight, spec.rms_norm_eps
        self._row_norm = HeadNorm(weight, len(heads), len(kv_heads), eps)
        self._context_norm = HeadNorm(weight, 0, len(kv_heads), eps)
        self._write, self._attend = kernels[HEAD_NORM_ROPE_WRITE].run, kernels[ATTEND_BLOCK].run
        self._sliding_window, self._is_causal = spec.windows[layer], spec.is_causal
        self._rows, self._head_dim = spec.block_size, spec.head_dim
        self.activation = self._qkv.activation
        self.slots = [*self._qkv.slots, *self._out.slots, *self._norms.slots]

    def get_context_rows(self) -> tuple[ColumnParallel, range]:
        """Return the QKV projection, and the range of its output rows that are keys and values."""
        heads, kv_heads = self._row_norm.heads, self._row_norm.kv_heads
        return self._qkv, range(heads * self._head_dim, (heads + 2 * kv_heads) * self._head_dim)

    def finish_loading(self) -> None:
        self._norms.finish_loading()
        self._qkv.finish_loading()
        self._out.finish_loading()

    def __call__(
        self, x: Tensor | QuantizedActivations, metadata: AttentionMetadata, kv: KvCaches
    ) -> Partial:
        """Map x [R * N, hidden] to [R * N, hidden]."""
        step: BlockStep = metadata.prepared[_KIND]
        qkv, cached = self._qkv(x), kv["k"]
        shape = len(step.context.slots), cached.shape[1], self._rows, self._head_dim
        own = KvCache(qkv.new_empty(shape), qkv.new_empty(shape))
        q = self._write(qkv, self._row_norm, step.rows, own)
        attended = self._attend(
            q,
            own,
            KvCache(cached, kv["v"]),
            step.context,
            sliding_window=self._sliding_window,
            is_causal=self._is_causal,
        )
        return self._out(attended, in_parts=True)

    def write_context(self, projected: Tensor, at: TokenPlaces, kv: KvCaches) -> None:
        """Cache values, and keys after norm and rope; projected [T, rows of `get_context_rows`]."""
        self._write(projected, self._context_norm, at, KvCache(kv["k"], kv["v"]))


class BlockDraft:
    """A block draft. The loader fills `weight_slots`, then calls `finish_loading` once."""

    def __init__(self, spec: BlockDraftSpec, setup: LayerSetup) -> None:
        self.spec, layout, device = spec, setup.context.layout, setup.weights.device
        hidden, streams = spec.hidden_size, spec.num_aux * spec.target_hidden_size
        # Published drafts store `fc` unquantized, even if config.json has a quantization.
        plain = replace(setup, weights=replace(setup.weights, scheme=None))
        self._columns = shard(streams, rank=layout.tp_rank, size=layout.tp, what="streams")
        self._fc = RowParallel(names.FC, (hidden, streams), columns=self._columns, setup=plain)
        self._attentions = [BlockAttention(spec, layer, setup) for layer in range(spec.num_layers)]
        own: dict[str, Any] = {"eps": spec.rms_norm_eps, "gemma": spec.is_gemma, "setup": setup}
        self._layers = [
            DecoderLayer(
                attention,
                Mlp(
                    names.mlp(layer),
                    hidden_size=hidden,
                    width=spec.intermediate_size,
                    activation=SwiGlu(*spec.swiglu),
                    setup=setup,
                ),
                hidden,
                norms=names.norms(layer),
                **own,
            )
            for layer, attention in enumerate(self._attentions)
        ]
        read = {attention.activation for attention in self._attentions}
        activation = read.pop() if len(read) == 1 else None
        self._context_norm = RmsNorm(names.CONTEXT_NORM, hidden, activation=activation, **own)
        self._norm = RmsNorm(names.NORM, hidden, activation=None, **own)
        parts: list[Any] = [self._fc, *self._layers, self._context_norm, self._norm]
        slots = [slot for part in parts for slot in part.slots]
        self._embed, self._group = setup.kernels[EMBED_TOKENS].run, setup.context.attention_group
        self.vocab_range = layout.vocab(spec.vocab_size)
        table: dict[str, Any] = {"group": self._group, "weights": setup.weights}
        self._embedding: VocabEmbedding | None = None
        if spec.own_embedding:
            shape = spec.vocab_size, hidden
            self._embedding = VocabEmbedding(names.EMBEDDING, shape, rows=self.vocab_range, **table)
            slots += self._embedding.slots
        self._head = self._markov_out = None
        if spec.own_head:
            part = ProjectionPart(names.HEAD, spec.vocab_size, self.vocab_range)
            self._head = ColumnParallel([part], hidden, setup=plain)
            slots += self._head.slots
        if spec.markov_rank:
            shape = spec.vocab_size, spec.markov_rank
            self._markov_in = VocabEmbedding(names.MARKOV_IN, shape, rows=range(shape[0]), **table)
            part = ProjectionPart(names.MARKOV_OUT, spec.vocab_size, self.vocab_range)
            self._markov_out = ColumnParallel([part], spec.markov_rank, setup=plain)
            slots += [*self._markov_in.slots, *self._markov_out.slots]
            slots += self._make_confidence_slots(device)
        self._kv_heads = len(layout.attention.kv_heads(spec.num_kv_heads))
        self._frequencies = signed_frequencies(spec.rotary_dim, spec.rope_theta).to(device)
        self._locate = setup.kernels[LOCATE].run
        self._places = torch.arange(spec.block_size, device=device)
        self._slots = slots_by_name(slots)

    def _make_confidence_slots(self, device: torch.device) -> list[WeightSlot]:
        """Return the confidence head's slots, which are optional if the spec has no such head."""
        used = self.spec.confidence_width
        width = used or self.spec.hidden_size + self.spec.markov_rank
        parts = {names.CONFIDENCE: (1, width), names.CONFIDENCE_BIAS: (1,)}
        empty = {
            name: torch.empty(shape, dtype=torch.float32, device=device) if used else None
            for name, shape in parts.items()
        }
        self._confidence = tuple(empty.values())  # weight and bias of the confidence head
        return [
            WeightSlot(name, parts[name], target=target, optional=not used)
            for name, target in empty.items()
        ]

    def weight_slots(self) -> dict[str, WeightSlot]:
        return self._slots

    def finish_loading(self, target: Decoder, *, most_blocks: int) -> None:
        """Prepare all weights for kernels. A missing embedding or head is taken from `target`."""
        for name, slot in self._slots.items():
            assert slot.written or slot.optional or not slot.needed, f"{name} was not written"
        context = [attention.get_context_rows() for attention in self._attentions]
        self._project_context = stack_rows(context)
        for part in (self._fc, *self._layers, self._head, self._markov_out):
            if part is not None:
                part.finish_loading()
        self._target, size = target, self.spec.block_size
        rows = torch.arange(most_blocks * size, device=self._frequencies.device)
        self._cache_rows = cache_rows(rows, kv_heads=self._kv_heads, block_size=size)

    def write_context(
        self, streams: Sequence[Tensor], metadata: AttentionMetadata, kv: Sequence[KvCaches]
    ) -> None:
        """Cache the keys and values of T tokens; `streams` are residual streams [T, width] each."""
        x = self._fc(cat_columns(streams, self._columns))
        projected = self._project_context(self._context_norm(x, torch.zeros_like(x.x)))
        at = TokenPlaces(
            *self._locate(
                metadata.token_tables,
                self._frequencies,
                kv_heads=self._kv_heads,
                block_size=kv[0]["k"].shape[2],
            )
        )
        for attention, part, caches in zip(self._attentions, projected, kv, strict=True):
            attention.write_context(part, at, caches)

    def run_blocks(
        self,
        anchors: Tensor,
        context: BlockContext,
        metadata: AttentionMetadata,
        kv: Sequence[KvCaches],
    ) -> Tensor:
        """Run R blocks, each with its cached context. Return the inputs of the head [R, N, hidden].

        anchors [R] int64 are the tokens at `context.lengths`. The content of `metadata` is ignored.
        """
        num_blocks, rows = len(anchors), self.spec.block_size
        token_ids = anchors.new_full((num_blocks, rows), self.spec.mask_token_id)
        token_ids[:, 0] = anchors
        positions = (context.lengths.unsqueeze(1) + self._places).flatten()
        at = TokenPlaces(
            *cos_sin(positions, self._frequencies),
            self._cache_rows[: len(positions) * self._kv_heads],
        )
        metadata = replace(metadata, prepared={_KIND: BlockStep(at, context)})
        x, residual = self._embed_rows(token_ids.flatten())
        for layer, caches in zip(self._layers, kv, strict=True):
            x = layer(layer.input_norm(x, residual), residual, metadata, caches)
        return apply_norm(self._norm, x, residual).unflatten(0, (num_blocks, rows))

    def _embed_markov(self, previous: Tensor) -> Tensor:
        return self._embed(previous, self._markov_in.table, first_id=0)[0]

    def _embed_rows(self, token_ids: Tensor) -> tuple[Partial, Tensor]:
        if self._embedding is None:
            return self._target.embed(token_ids)
        first_id = self.vocab_range.start
        x, residual = self._embed(token_ids, self._embedding.table, first_id=first_id)
        return Partial(x, self._group), residual

    def local_logits(self, hidden: Tensor) -> Tensor:
        """Map hidden [R, hidden] to logits [R, len(vocab_range)] fp32 of this rank's vocabulary."""
        if self._head is None:
            return self._target.local_logits(hidden)
        return self._head(hidden, LinearOutput(torch.float32))

    def local_bias(self, previous: Tensor) -> Tensor:
        """Return the Markov bias [R, len(vocab_range)] that `previous` [R] int64 adds to logits.

        If the previous token is missing (-1), the bias is undefined.
        """
        assert self._markov_out is not None
        return self._markov_out(self._embed_markov(previous), LinearOutput(torch.float32))

    def estimate_acceptance(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Estimate the probability that a token is accepted if all earlier tokens are accepted.

        hidden [R, N, hidden] is from `run_blocks`; previous [R, N] int64 is the token before each
        proposed token. Returns [R, N] fp32.
        """
        weight, bias = self._confidence
        assert weight is not None
        if self.spec.confidence_width > self.spec.hidden_size:
            before = self._embed_markov(previous.flatten()).unflatten(0, previous.shape)
            hidden = torch.cat([hidden, before], dim=-1)
        return F.linear(hidden.float(), weight, bias).squeeze(-1).sigmoid()


def build(spec: ModelSpec, setup: LayerSetup) -> BlockDraft:
    """Build a draft without weights."""
    assert isinstance(spec, BlockDraftSpec)
    return BlockDraft(spec, setup)
