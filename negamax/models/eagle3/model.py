"""An EAGLE3 draft on one rank.

  h = fc(the target's residual streams of token t, concatenated)
  first layer:  h += attention([rms(embedding of token t + 1), rms(h)]);  h += mlp(rms(h))
  logits of token t + 2 = head(rms(h))

In each later pass, h is the hidden state that the previous pass returned, instead of the output of
fc. Layers after the first are Llama layers.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.config.model_spec import ModelSpec
from negamax.formats.tensor_format import Axis, Dim, Role, StoredTensor
from negamax.kernels.activations import SILU, concatenate
from negamax.kernels.attention.metadata import AttentionMetadata, PagedShape
from negamax.kernels.attention.op import DECODE, PREFILL, ROPE_WRITE
from negamax.kernels.drafts.op import EMBED_NORMS
from negamax.kernels.gemm.op import LinearOutput
from negamax.kernels.kvcache.op import KvCache, TokenPlaces
from negamax.kernels.rotary import signed_frequencies
from negamax.kernels.steps.op import EMBED_TOKENS
from negamax.layers.attention import GroupedQueryKind, GroupedQueryStep, KvCaches, prepare_attention
from negamax.layers.basic import RmsNorm, VocabEmbedding
from negamax.layers.linear import ColumnParallel, ProjectionPart, RowParallel, cat_columns
from negamax.layers.mlp import Mlp
from negamax.layers.weights import LayerSetup, StoredPart, WeightSlot, slots_by_name
from negamax.models.decoder import Decoder, apply_norm, attention_sizes
from negamax.models.eagle3 import names
from negamax.models.eagle3.config import Eagle3Spec
from negamax.parallel.collectives import Partial, SingleRank
from negamax.parallel.layout import shard
from negamax.quantization.scheme import WeightFormat

_ALONE = SingleRank()
_OFFSETS = StoredTensor(names.D2T, Role.PERMUTATION, ("int64", "int32"), (Dim(Axis.ROWS),))
_MARKS = StoredTensor(names.T2D, Role.PERMUTATION, ("bool",), (Dim(Axis.ROWS),))


class _Biases:
    """Biases of the Q, K, V and output projections."""

    def __init__(
        self,
        layer: int,
        parts: Sequence[ProjectionPart],
        hidden_size: int,
        *,
        rank: int,
        weights: WeightFormat,
    ) -> None:
        """`parts`: q, k, v projections. Only rank 0 adds the output bias. The bias is optional."""
        like: dict[str, Any] = {"dtype": weights.dtype, "device": weights.device}
        sizes = [len(part.rows) for part in parts]
        self.qkv, self.out = torch.empty(sum(sizes), **like), torch.zeros(hidden_size, **like)
        self.slots = []
        for part, target in zip(parts, self.qkv.split(sizes), strict=True):
            name = part.name.removesuffix("weight") + "bias"
            slot = WeightSlot(name, (part.total_rows,), target=target, region=(part.rows,))
            self.slots.append(slot)
        name = f"{names.projection(layer, 'o')}.bias"
        target = None if rank else self.out
        self.slots.append(WeightSlot(name, (hidden_size,), target=target, optional=True))


class _Attention:
    """Grouped-query attention without norms of queries and keys, split by heads over the ranks."""

    def __init__(self, spec: Eagle3Spec, layer: int, setup: LayerSetup) -> None:
        view, kernels = setup.context.layout.attention, setup.kernels
        heads, kv_heads = view.heads(spec.num_heads), view.kv_heads(spec.num_kv_heads)
        *qkv, out = (f"{names.projection(layer, part)}.weight" for part in "qkvo")
        sizes = attention_sizes(spec)
        parts = sizes.qkv(qkv, heads, kv_heads)
        inputs = spec.hidden_size if layer else 2 * spec.hidden_size
        self._qkv = ColumnParallel(parts, inputs, setup=setup)
        self._out = sizes.out(out, setup)
        self._rope_write = kernels[ROPE_WRITE].run
        self._decode, self._prefill = kernels[DECODE].run, kernels[PREFILL].run
        self._biases = None
        if spec.attention_bias:
            self._biases = _Biases(
                layer, parts, spec.hidden_size, rank=view.rank, weights=setup.weights
            )
        self.slots = [*self._qkv.slots, *self._out.slots]
        self.slots += self._biases.slots if self._biases else []

    def finish_loading(self) -> None:
        self._qkv.finish_loading()
        self._out.finish_loading()

    def __call__(self, x: Tensor, metadata: AttentionMetadata, kv: KvCaches) -> Partial:
        """Map x [T, inputs] to [T, hidden]; write the tokens' keys and values to `kv`."""
        step: GroupedQueryStep = metadata.prepared[GroupedQueryKind.name]
        q = self.write(x, metadata, kv)
        parts, decodes = [], metadata.num_decodes
        if step.decode is not None:
            parts.append(self._decode(q[:decodes], KvCache(kv["k"], kv["v"]), step.decode))
        if step.prefill is not None:
            parts.append(self._prefill(q[decodes:], KvCache(kv["k"], kv["v"]), step.prefill))
        out = self._out(concatenate(parts))
        return Partial(out.x + self._biases.out, out.group) if self._biases else out

    def write(self, x: Tensor, metadata: AttentionMetadata, kv: KvCaches) -> Tensor:
        """Return the queries of x [T, inputs]; write the tokens' keys and values to `kv`."""
        step: GroupedQueryStep = metadata.prepared[GroupedQueryKind.name]
        qkv = self._qkv(x)
        if self._biases:
            qkv = qkv + self._biases.qkv
        cache = KvCache(kv["k"], kv["v"])
        return self._rope_write(qkv, TokenPlaces(step.cos, step.sin, step.slot_mapping), cache)


class _Layer:
    """One layer of the draft. The first layer also reads the embedding of the next token."""

    def __init__(self, spec: Eagle3Spec, layer: int, setup: LayerSetup) -> None:
        self._attention = _Attention(spec, layer, setup)
        hidden, width, own = spec.hidden_size, spec.intermediate_size, names.mlp(layer)
        self._mlp = Mlp(own, hidden_size=hidden, width=width, activation=SILU, setup=setup)
        norms = [
            RmsNorm(name, spec.hidden_size, eps=spec.rms_norm_eps, activation=None, setup=setup)
            for name in names.norms(layer)[: 2 if layer else 3]
        ]
        self._input_norm, self._post_norm, *others = norms
        self._hidden_norm = others[0] if others else None
        self._is_residual_normed = spec.norm_before_residual
        self._embed_norms = setup.kernels.fusion(*EMBED_NORMS.sequence)
        self._embed_tokens = setup.kernels[EMBED_TOKENS].run
        self.slots = [*self._attention.slots, *self._mlp.slots]
        self.slots += [slot for norm in norms for slot in norm.slots]

    def finish_loading(self) -> None:
        self._attention.finish_loading()
        self._mlp.finish_loading()

    def enter_first(
        self, x: Partial, token_ids: Tensor, embed: VocabEmbedding
    ) -> tuple[Tensor, Tensor]:
        """Return the first attention's input and the residual for the tokens token_ids [T]."""
        assert self._hidden_norm is not None
        fused, weight = self._embed_norms, None
        if fused and x.group.size == 1 and x.x.dim() == 2 and not self._is_residual_normed:
            hidden = residual = x.x
            weight = self._hidden_norm.weight
        else:
            residual = x.x.new_zeros(len(token_ids), x.x.shape[-1])
            hidden = apply_norm(self._hidden_norm, x, residual)
            if self._is_residual_normed:
                residual = hidden
        if fused:
            norm = self._input_norm
            joined = fused.run(token_ids, embed.table, hidden, norm.weight, weight, eps=norm.eps)
        else:
            embedded, _ = self._embed_tokens(token_ids, embed.table, first_id=0)
            joined = torch.cat([_run_norm(self._input_norm, embedded), hidden], dim=-1)
        return joined, residual

    def enter(self, x: Partial, residual: Tensor) -> Tensor:
        """Add `x` to the residual [T, hidden]; return the input of the attention."""
        return apply_norm(self._input_norm, x, residual)

    def __call__(
        self, hidden: Tensor, residual: Tensor, metadata: AttentionMetadata, kv: KvCaches
    ) -> Partial:
        """Run the layer on `enter`'s result. The next norm adds the returned sum to `residual`."""
        attended = self._attention(hidden, metadata, kv)
        return self._mlp(self._post_norm(attended, residual))

    def write(self, hidden: Tensor, metadata: AttentionMetadata, kv: KvCaches) -> None:
        """Write the keys and values of the attention's input, without computing attention."""
        self._attention.write(hidden, metadata, kv)


class Eagle3Draft:
    """An EAGLE3 draft. The loader fills `weight_slots`, then calls `finish_loading` once."""

    def __init__(self, spec: Eagle3Spec, setup: LayerSetup) -> None:
        self.spec, layout, weights = spec, setup.context.layout, setup.weights
        hidden, streams = spec.hidden_size, spec.num_aux * spec.target_hidden_size
        self._columns = shard(streams, rank=layout.tp_rank, size=layout.tp, what="streams")
        self._fc = RowParallel(names.FC, (hidden, streams), columns=self._columns, setup=setup)
        normed: dict[str, int] = {names.FC_INPUT_NORM: streams} if spec.norm_before_fc else {}
        for number in range(spec.num_aux if spec.fc_norm else 0):
            normed[names.fc_norm(number)] = spec.target_hidden_size
        own: dict[str, Any] = {"eps": spec.rms_norm_eps, "activation": None, "setup": setup}
        self._aux_norms = {name: RmsNorm(name, width, **own) for name, width in normed.items()}
        self.layers = [_Layer(spec, layer, setup) for layer in range(spec.num_layers)]
        self._norm = RmsNorm(names.NORM, hidden, **own)
        parts: list[Any] = [self._fc, *self._aux_norms.values(), *self.layers, self._norm]
        slots = [slot for part in parts for slot in part.slots]
        self._embed: VocabEmbedding | None = None
        if spec.own_embedding:  # every rank stores the whole embedding
            shape = spec.vocab_size, hidden
            self._embed = VocabEmbedding(
                names.EMBEDDING, shape, rows=range(shape[0]), group=_ALONE, weights=weights
            )
            slots += self._embed.slots
        self.vocab_range = layout.vocab(spec.draft_vocab_size)
        self._head: ColumnParallel | None = None
        self._offsets = torch.zeros(spec.draft_vocab_size, dtype=torch.int64, device=weights.device)
        if spec.own_head:
            rows = ProjectionPart(names.HEAD, spec.draft_vocab_size, self.vocab_range)
            self._head = ColumnParallel([rows], hidden, setup=setup)
            offsets: dict[str, Any] = {"target": self._offsets, "stored": StoredPart(_OFFSETS)}
            shape, optional = (spec.draft_vocab_size,), not spec.is_pruned
            slots += self._head.slots
            slots.append(WeightSlot(names.D2T, shape, optional=optional, **offsets))
        self._marks = torch.zeros(spec.vocab_size, dtype=torch.bool, device=weights.device)
        marks: dict[str, Any] = {"target": self._marks, "stored": StoredPart(_MARKS)}
        slots.append(WeightSlot(names.T2D, (spec.vocab_size,), optional=True, **marks))
        view = layout.attention
        kv_heads = len(view.kv_heads(spec.num_kv_heads))
        self._kind = GroupedQueryKind(
            PagedShape(kv_heads, len(view.heads(spec.num_heads)) // kv_heads, block_size=0),
            frequencies=signed_frequencies(spec.head_dim, spec.rope_theta).to(weights.device),
            kernels=setup.kernels,
        )
        self._slots = slots_by_name(slots)
        self._target: Decoder | None = None
        self._rotation_back: Tensor | None = None  # transpose of the target's rotation matrix

    def weight_slots(self) -> dict[str, WeightSlot]:
        return self._slots

    def finish_loading(self, target: Decoder, rotation: Tensor | None = None) -> None:
        """Prepare all weights for kernels. A missing embedding or head is taken from `target`.

        `rotation` is the rotation of the target's residual stream (`checkpoint/quarot.py`). Raises
        `CheckpointError` if tensor d2t has unknown or repeated tokens, or contradicts tensor t2d.
        """
        for name, slot in self._slots.items():
            assert slot.written or slot.optional or not slot.needed, f"{name} was not written"
        self._fc.finish_loading()
        for layer in self.layers:
            layer.finish_loading()
        if self._head is not None:
            self._head.finish_loading()
        if self._embed is None:
            self._embed = target.embedding.whole()
            if rotation is not None:
                rotation = rotation.to(self._offsets.device)
                self._embed = self._embed.map_rows(partial(_rotate_back, rotation=rotation))
        if rotation is not None:
            self._rotation_back = rotation.T.to(self._embed.table).contiguous()
        self._target = target
        size = self.spec.draft_vocab_size
        self._token_ids = torch.arange(size, device=self._offsets.device) + self._offsets
        # target token id of each draft token, followed by -1
        self.target_ids = F.pad(self._token_ids, (0, 1), value=-1)
        lowest, highest = (int(end) for end in self._token_ids.aminmax())  # host-sync: at loading
        distinct = len(self._token_ids.unique())
        if lowest < 0 or highest >= self.spec.vocab_size or distinct < size:
            raise CheckpointError(
                f"tensor {names.D2T} maps {size} draft tokens to {distinct} ids from {lowest} to "
                f"{highest}; it needs {size} different ids from 0 to {self.spec.vocab_size - 1}",
                hint="export the draft again",
            )
        self._check_marks()

    def _check_marks(self) -> None:
        """Compare d2t with t2d, if stored, because valid, distinct ids in d2t may be wrong."""
        marks = self._marks
        del self._marks
        if not self._slots[names.T2D].written:
            return
        named = torch.zeros_like(marks).index_fill_(0, self._token_ids, True)
        surplus, absent = int((marks & ~named).sum()), int((named & ~marks).sum())
        if surplus or absent:
            raise CheckpointError(
                f"tensor {names.T2D} marks {int(marks.sum())} tokens, and tensor {names.D2T} lists "
                f"{len(self._token_ids)}: {surplus} are only in {names.T2D}, {absent} are only in "
                f"{names.D2T}",
                hint=f"export the draft again, or remove {names.T2D} from the files if you know "
                f"that {names.D2T} is correct",
            )

    def combine(self, streams: Sequence[Tensor]) -> Partial:
        """Combine the target's residual streams of T tokens, each [T, width] -> [T, hidden]."""
        norms = self._aux_norms
        if self._rotation_back is not None:
            streams = [stream @ self._rotation_back for stream in streams]
        if self.spec.fc_norm:
            own = (norms[names.fc_norm(number)] for number in range(len(streams)))
            streams = [_run_norm(norm, stream) for norm, stream in zip(own, streams, strict=True)]
        columns = self._columns
        if self.spec.norm_before_fc:
            joined = _run_norm(norms[names.FC_INPUT_NORM], torch.cat(list(streams), dim=-1))
            return self._fc(joined[:, columns.start : columns.stop].contiguous())
        return self._fc(cat_columns(streams, columns))

    def forward(
        self, x: Partial, token_ids: Tensor, metadata: AttentionMetadata, kv: Sequence[KvCaches]
    ) -> tuple[Tensor, Tensor]:
        """Run the draft on T hidden states and the tokens after them.

        x comes from `combine` or the previous pass and may be overwritten. token_ids is [T].
        Returns the input of the head and the input of the next pass, both [T, hidden].
        """
        metadata = prepare_attention(metadata, [(self._kind, kv[0])])
        hidden, residual = self._enter_last(x, token_ids, metadata, kv)
        left = self.layers[-1](hidden, residual, metadata, kv[-1])
        normed = apply_norm(self._norm, left, residual)
        if self.spec.norm_output:
            return normed, normed
        return normed, self._norm.complete(residual, left.group, copy=False)

    def fill_caches(
        self, x: Partial, token_ids: Tensor, metadata: AttentionMetadata, kv: Sequence[KvCaches]
    ) -> None:
        """Fill the caches as `forward` does, but return no hidden states."""
        metadata = prepare_attention(metadata, [(self._kind, kv[0])])
        hidden, _ = self._enter_last(x, token_ids, metadata, kv)
        self.layers[-1].write(hidden, metadata, kv[-1])

    def _enter_last(
        self, x: Partial, token_ids: Tensor, metadata: AttentionMetadata, kv: Sequence[KvCaches]
    ) -> tuple[Tensor, Tensor]:
        """Run all layers except the last. Return the input of the last layer, and the residual."""
        assert self._embed is not None
        hidden, residual = self.layers[0].enter_first(x, token_ids, self._embed)
        for layer, above, caches in zip(self.layers, self.layers[1:], kv, strict=False):
            hidden = above.enter(layer(hidden, residual, metadata, caches), residual)
        return hidden, residual

    def local_logits(self, hidden: Tensor) -> Tensor:
        """Map hidden [R, hidden] to logits [R, len(vocab_range)] fp32 of this rank's vocabulary."""
        if self._head is None:
            assert self._target is not None
            return self._target.local_logits(hidden)
        return self._head(hidden, LinearOutput(torch.float32))

    def scatter_logits(self, logits: Tensor) -> Tensor:
        """Scatter `local_logits` into target logits [R, vocab] fp32; other ids get -infinity."""
        ids = self._token_ids[self.vocab_range.start : self.vocab_range.stop]
        every = logits.new_full((len(logits), self.spec.vocab_size), -torch.inf)
        return every.index_copy_(1, ids, logits)


def _run_norm(norm: RmsNorm, x: Tensor) -> Tensor:
    """Return the norm of x [T, width], which is not a sum over ranks."""
    return apply_norm(norm, Partial(x, _ALONE), torch.zeros_like(x))


def _rotate_back(rows: Tensor, rotation: Tensor) -> Tensor:
    """Return rows [n, hidden] times the transposed rotation, accumulated in fp32."""
    return (rows.float() @ rotation.T).to(rows.dtype)


def build(spec: ModelSpec, setup: LayerSetup) -> Eagle3Draft:
    """Build a draft without weights."""
    assert isinstance(spec, Eagle3Spec)
    return Eagle3Draft(spec, setup)
