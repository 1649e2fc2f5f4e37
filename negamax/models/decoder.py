"""A decoder-only model on one rank: embedding, layers, norm, head. Families provide the layers.

h = embed(tokens)
per layer:  h += attention(rms(h));  h += mlp(rms(h))
logits = head(rms(h))
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from negamax.base.progress import ShowProgress
from negamax.config.model_spec import ModelSpec, MoeSpec
from negamax.formats.tensor_format import ActivationFormat
from negamax.kernels.activations import QuantizedActivations
from negamax.kernels.attention.metadata import AttentionMetadata, PagedShape
from negamax.kernels.op import AnyKernel
from negamax.kernels.steps.op import EMBED_TOKENS, ImageRows
from negamax.layers.attention import AttentionKind, KvCaches, prepare_attention
from negamax.layers.basic import RmsNorm, VocabEmbedding, VocabHead
from negamax.layers.cache_shards import cache_shard
from negamax.layers.heads import AttentionSizes
from negamax.layers.mlp import Mlp
from negamax.layers.moe import SparseMoe
from negamax.layers.names import DecoderNames
from negamax.layers.weights import LayerSetup, WeightSlot, slots_by_name
from negamax.parallel.collectives import Partial
from negamax.parallel.layout import AttentionView


class AttentionBlock(Protocol):
    """The attention of a `DecoderLayer`."""

    slots: list[WeightSlot]
    # fused kernel that applies query and key norms; None: another kernel applies these norms
    norm_kernel: AnyKernel | None

    @property
    def activation(self) -> ActivationFormat | None:
        """The quantized format in which the attention accepts `x`; None if `x` is unquantized."""

    @property
    def gives_quantized(self) -> bool:
        """Whether attention kernels should return quantized activations."""

    def finish_loading(self) -> None:
        """Prepare the weights for their kernels."""

    def __call__(
        self, x: Tensor | QuantizedActivations, metadata: AttentionMetadata, kv: KvCaches
    ) -> Partial:
        """Map x [T, hidden] to [T, hidden]."""


class DecoderLayer:
    """A norm, attention, a second norm, and an MLP or experts, with a residual stream."""

    def __init__(
        self,
        attention: AttentionBlock,
        mlp: Mlp | SparseMoe,
        hidden_size: int,
        *,
        norms: tuple[str, str],
        eps: float,
        gemma: bool = False,
        setup: LayerSetup,
    ) -> None:
        """`norms` are the tensor names of the norms before the attention and before the MLP."""
        self.attention, self.mlp = attention, mlp
        shared: dict[str, Any] = {"eps": eps, "gemma": gemma, "setup": setup}
        self.input_norm, self.post_norm = (
            RmsNorm(name, hidden_size, activation=block.activation, **shared)
            for name, block in zip(norms, (attention, mlp), strict=True)
        )
        parts = (self.input_norm, attention, self.post_norm, mlp)
        self.slots = [slot for part in parts for slot in part.slots]

    def finish_loading(self) -> None:
        self.attention.finish_loading()
        self.mlp.finish_loading()

    def __call__(
        self,
        hidden: Tensor | QuantizedActivations,
        residual: Tensor,
        metadata: AttentionMetadata,
        kv: KvCaches,
    ) -> Partial:
        """Run the layer on hidden [T, hidden], the output of `input_norm`.

        Adds the attention's output to `residual` [T, hidden] in place. Returns the MLP's output.
        """
        x = self.attention(hidden, metadata, kv)
        if isinstance(self.mlp, SparseMoe):
            return self.mlp.run_after(self.post_norm, x, residual, metadata.step_tokens)
        return self.mlp(self.post_norm(x, residual))


@dataclass(frozen=True)
class PartialImages:
    """Image patches after some layers of a vision tower."""

    h: Tensor  # [patches, width]
    angles: tuple[Tensor, Tensor]  # cos and sin of the rotary embedding, each [patches, 1, R] fp32
    sizes: list[int]  # number of patches of each image


class ImageTower(Protocol):
    """The vision tower and projector of a model."""

    slots: list[WeightSlot]

    def __call__(self, images: Sequence[Tensor]) -> Tensor:
        """Run `start`, all parts and `finish`; return N token embeddings [N, hidden]."""

    def start(self, images: Sequence[Tensor]) -> PartialImages:
        """Embed the patches of `images`, each uint8 [height, width, 3]."""

    def run_part(
        self, images: PartialImages, first: int, stop: int, num_parts: int
    ) -> PartialImages:
        """Run parts `first` to `stop` - 1 of the `num_parts` parts of the layers."""

    def finish(self, images: PartialImages) -> Tensor:
        """Project the output of the last layer to N token embeddings [N, hidden]."""


def apply_norm(norm: RmsNorm, x: Partial, residual: Tensor) -> Tensor:
    """Add `x` to the residual [T, width], and return the norm, which is not quantized."""
    normed = norm(x, residual)
    assert isinstance(normed, Tensor)
    return normed


def attention_sizes(spec: ModelSpec) -> AttentionSizes:
    return AttentionSizes(
        spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rms_norm_eps
    )


def paged_shape(spec: ModelSpec, layers: Sequence[DecoderLayer], view: AttentionView) -> PagedShape:
    """Return the sizes for which the model's attention kernels are specialized."""
    kv_heads = len(view.kv_heads(spec.num_kv_heads))
    return PagedShape(
        kv_heads,
        len(view.cache_heads(spec.num_heads)) // kv_heads,
        block_size=0,
        cache=cache_shard(view),
        quantize=all(layer.attention.gives_quantized for layer in layers),
    )


def moe_sizes(spec: MoeSpec) -> dict[str, Any]:
    """Return the sizes in `spec` as arguments for `SparseMoe`."""
    return {
        "hidden_size": spec.hidden_size,
        "width": spec.expert_width,
        "num_experts": spec.num_experts,
        "top_k": spec.experts_per_token,
    }


class Decoder:
    """A model, or one pipeline stage of a model, on one rank.

    The loader writes weights through `weight_slots`, then calls `finish_loading` once. Blocks
    return partial sums over the ranks, and the next norm completes these sums. The first stage also
    contains the embedding, and the last stage contains the last norm and the head. A stage sends
    the complete residual stream to the next stage.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[DecoderLayer],
        kinds: Sequence[tuple[AttentionKind, int]],
        *,
        names: DecoderNames,
        eps: float,
        gemma: bool = False,
        vision: ImageTower | None = None,
        setup: LayerSetup,
    ) -> None:
        """`kinds` pairs each kind of attention with the index of one of its layers in `layers`.

        `eps` and `gemma` are arguments of the last norm (see `RmsNorm`). Only the first stage has a
        `vision` tower.
        """
        self.spec, self.layers, self._kinds = spec, layers, kinds
        layout, weights = setup.context.layout, setup.weights
        self.dtype, self._numbers = weights.dtype, layout.layers(spec.num_layers)
        self.vocab_range = rows = layout.vocab(spec.vocab_size)
        vocab_shape = (spec.vocab_size, spec.hidden_size)
        self._group, self._embed = setup.context.attention_group, setup.kernels[EMBED_TOKENS].run
        self.is_first_stage, self.is_last_stage = layout.is_first_stage, layout.is_last_stage
        slots = [slot for layer in layers for slot in layer.slots]
        self.vision = vision
        slots += vision.slots if vision is not None else []
        if self.is_first_stage:
            self.embedding = VocabEmbedding(
                names.embedding, vocab_shape, rows=rows, group=self._group, weights=weights
            )
            slots += self.embedding.slots
        # On stages before the last, `_norm` has no weight and only sums the residual stream.
        own: dict[str, Any] = {"eps": eps, "gemma": gemma, "setup": setup}
        self._norm = RmsNorm(names.norm, spec.hidden_size, activation=None, **own)
        if self.is_last_stage:
            self._head = VocabHead(names.head, vocab_shape, rows=rows, setup=setup)
            slots += [*self._norm.slots, *self._head.slots]
        self._slots = slots_by_name(slots)

    def forward(
        self,
        token_ids: Tensor,
        metadata: AttentionMetadata,
        kv: Sequence[KvCaches],
        *,
        capture: Sequence[int] = (),
        out: Sequence[Tensor] = (),
        entering: Tensor | None = None,
        images: ImageRows | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run this rank's layers on token_ids [T] int64.

        Returns the final hidden states [T, hidden] and the captured residual streams. `kv` lists
        the caches of each layer. Only the first len(kv) layers of this rank run.

        `capture` lists layer numbers. The residual stream [T, hidden] that enters each layer in
        `capture` is summed over the ranks and returned. If `out` is given, each stream is also
        written to the tensor of its layer in `out`. In `capture`, `spec.num_layers` selects the
        output of the last layer. For a layer of another stage, the tensor in `out` is returned
        unchanged. `images` are the image embeddings for the first stage.

        All stages except the first run on `entering` [T, hidden] instead of tokens. The sum of
        `entering` over the ranks is the residual stream of the previous stage. `forward` overwrites
        `entering`. All stages except the last return the residual stream instead of hidden states.
        """
        streams: dict[int, Tensor | None] = dict.fromkeys(capture)
        streams.update(zip(capture, out, strict=False))
        if entering is None:
            x, residual = self.embed(token_ids, images)
        else:
            x, residual = Partial(entering, self._group), torch.zeros_like(entering)
        metadata = self.prepare(metadata, kv)
        for number, layer, caches in zip(self._numbers, self.layers, kv, strict=False):
            entered = layer.input_norm(x, residual)
            if number in streams:
                streams[number] = layer.input_norm.complete(residual, x.group, out=streams[number])
            x = layer(entered, residual, metadata, caches)
        hidden = self.last_norm(x, residual)
        last = self.spec.num_layers
        if not self.is_last_stage:
            hidden = self._norm.complete(residual, x.group)
        elif last in streams:
            streams[last] = self._norm.complete(residual, x.group, out=streams[last])
        return hidden, [stream for stream in streams.values() if stream is not None]

    def embed(self, token_ids: Tensor, images: ImageRows | None = None) -> tuple[Partial, Tensor]:
        """Embed token_ids [T] int64; return the first layer's input and a zero residual."""
        first_id = self.vocab_range.start
        x, residual = self._embed(token_ids, self.embedding.table, images, first_id=first_id)
        return Partial(x, self._group), residual

    def prepare(self, metadata: AttentionMetadata, kv: Sequence[KvCaches]) -> AttentionMetadata:
        """Prepare the attention metadata of a step for the first `len(kv)` layers."""
        kinds = [(kind, kv[at]) for kind, at in self._kinds if at < len(kv)]
        return prepare_attention(metadata, kinds)

    def last_norm(self, x: Partial, residual: Tensor) -> Tensor:
        """Return final hidden states [T, hidden]."""
        return apply_norm(self._norm, x, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, vocab] fp32 of hidden [R, hidden], over the full vocabulary."""
        return self._head(hidden)

    def local_logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return this rank's logits [R, len(vocab_range)] fp32, written to `out` if given."""
        return self._head.local(hidden, out=out)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Return the slot of each checkpoint tensor, by its name."""
        return self._slots

    def finish_loading(self, progress: ShowProgress | None = None) -> None:
        """Prepare all weights for their kernels; call `progress` after each layer."""
        for name, slot in self._slots.items():
            assert slot.written or slot.optional or not slot.needed, f"{name} was not written"
        for number, layer in enumerate(self.layers):
            layer.finish_loading()
            if progress:
                progress(number + 1, len(self.layers))
        if self.is_last_stage:
            self._head.finish_loading()
