"""Run the frozen targets of the drafts, nano and nano-m3, on batches of their text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nano import export, m3_export, m3_model, m3_train, model, train
from nano.draft_model import LAYERS, attend_with
from nano.m3_model import Chooser, Heads, M3Model
from nano.model import NanoModel, Precision

# inputs of the read layers, normed hidden states, and embeddings, each [B, S, ...]
States = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class M3Batch(train.Batch):
    """Hold a batch with block selection."""

    layout: m3_model.Layout


class Target(Protocol):
    """Describe a frozen model."""

    vocab_size: int
    window: int
    head: Tensor  # [vocab, hidden]
    norm: Tensor  # weight [hidden] of the last norm

    def batches(self, data: Path, **sizes: int) -> Iterator[train.Batch]:
        """Load batches from the shards in `data`, with the sizes of `train.Loader`."""
        ...

    def states(self, batch: train.Batch, mask: Any) -> States:
        """Run the model. `mask` is a mask that `attend_with` accepts."""
        ...


def _precision(net: torch.nn.Module, device: torch.device) -> tuple[torch.dtype, Precision]:
    net.requires_grad_(False).to(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return dtype, model.precision(dtype, weights=True, activations=True)


class NanoTarget:
    """Run the target nano, which has MiniMax-M2's architecture."""

    def __init__(
        self, net: NanoModel, device: torch.device, *, layers: tuple[int, ...] = LAYERS,
        use: Precision | None = None,
    ) -> None:  # fmt: skip
        self.net, self.device, self.layers = net, device, layers
        self.dtype, precision = _precision(net, device)
        self.use = use or precision
        self.vocab_size, self.window = net.config.vocab_size, 4096
        self.head, self.norm = net.head, net.norm
        self._run = torch.compile(self.run) if device.type == "cuda" else self.run

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> NanoTarget:
        return cls(export.load(folder, device, torch.float32), device)

    def batches(self, data: Path, **sizes: int) -> Iterator[train.Batch]:
        loader = train.Loader(data, **sizes)
        while True:
            yield loader.next(self.device)

    @torch.no_grad()
    def states(self, batch: train.Batch, mask: Any) -> States:
        return self._run(batch.tokens, mask)

    def run(self, tokens: Tensor, mask: Any) -> States:
        attend, net = attend_with(mask), self.net
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        cos, sin = model.rope_tables(positions, net.config)
        embeddings = F.embedding(tokens, net.embed.to(self.dtype))
        streams = [embeddings]
        for layer in net.layers:
            mixed = lambda q, k, v: attend(q, k, v)[0].to(q.dtype)  # noqa: E731
            streams.append(layer(streams[-1], cos, sin, mixed, self.use)[0])
        hidden = model.rms_norm(streams[-1], net.norm, net.config.rms_norm_eps)
        return torch.cat([streams[layer] for layer in self.layers], -1), hidden, embeddings


class NanoM3Target:
    """Run nano-m3, whose sparse layers attend to the blocks that the index selects."""

    def __init__(self, net: M3Model, device: torch.device, *, use: Precision | None = None) -> None:
        self.net, self.device = net, device
        self.dtype, precision = _precision(net, device)
        self.use = use or precision
        self.vocab_size, self.window = net.config.vocab_size, net.config.max_position_embeddings
        self.head, self.norm = net.head, 1 + net.norm
        self.chooser, self.tools = Chooser(net.config), None
        if device.type == "cuda":
            net.compile()
            self.tools = m3_train.Compiled()
            self.chooser.scores = self.tools.block_scores

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> NanoM3Target:
        return cls(m3_export.load(folder), device)

    def batches(self, data: Path, **sizes: int) -> Iterator[train.Batch]:
        loader = m3_train.Loader(data, self.net.config, **sizes)
        while True:
            batch = loader.take(self.device, widened=True)
            window = torch.full_like(batch.layout.window, sizes["row_tokens"])
            # Dense layers attend to the whole document.
            layout = replace(batch.layout, window=window)
            yield M3Batch(batch.tokens, layout.documents, batch.inputs, batch.targets, layout)

    @torch.no_grad()
    def states(self, batch: train.Batch, mask: Any) -> States:
        """Run the model. The batch contains the mask."""
        assert isinstance(batch, M3Batch)
        net, tokens = self.net, batch.tokens
        attend = m3_train.PackedAttention(net.config, batch.layout, self.chooser, self.tools)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        cos, sin = m3_model.rope_tables(positions, net.config)
        embeddings = F.embedding(tokens, net.embed.to(self.dtype))
        streams = [embeddings]
        for index, layer in enumerate(net.layers):
            mixed = attend(index, Heads(*layer.project(streams[-1], cos, sin, self.use)))
            streams.append(layer.finish(streams[-1], mixed, self.use)[0])
        hidden = m3_model.gemma_norm(streams[-1], net.norm, net.config.rms_norm_eps)
        return torch.cat([streams[layer] for layer in LAYERS], -1), hidden, embeddings
