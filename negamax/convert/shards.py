"""Checkpoints that are split for ranks. Each rank has files with its part of every tensor.

A part never splits an entry, such as a scale that several weights share. In both dimensions, a part
begins and ends at multiples of `TensorFormat.width_unit`, so every kind of device can use it. A
rank that needs a row or column of an entry stores the entry. If a rank reads no part of a tensor,
its files list the tensor with size 0, because the loader reports unlisted tensors as missing.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from negamax.checkpoint.reader import INDEX_NAME
from negamax.checkpoint.split import PARTS_KEY, RANK_INDEX_NAME
from negamax.config.model_spec import ModelSpec
from negamax.config.quantization import QuantizationSpec
from negamax.convert.layout import Piece
from negamax.convert.writer import Planned
from negamax.formats.floats import PLAIN
from negamax.formats.platform import CPU
from negamax.kernels.registry import resolve
from negamax.models.build import build_empty_slots
from negamax.parallel.layout import ParallelLayout
from negamax.parallel.split import check_split

Parts = tuple[range, ...]


@dataclass(frozen=True)
class Shard:
    """The part of a checkpoint that a rank stores."""

    layout: ParallelLayout | None = None  # None if the checkpoint is not split.
    # `regions`: slot name -> region that the rank stores; None: this rank stores all tensors whole.
    regions: Mapping[str, Parts] | None = None

    def file_name(self, number: int, count: int) -> str:
        if self.layout is None:
            return f"model-{number:05d}-of-{count:05d}.safetensors"
        return f"model-rank-{self.layout.rank}-part-{number:05d}.safetensors"

    @property
    def index_name(self) -> str:
        return INDEX_NAME if self.layout is None else RANK_INDEX_NAME.format(self.layout.rank)

    @property
    def metadata(self) -> dict[str, int]:
        """Return the metadata that describe the split in the index."""
        if self.layout is None:
            return {}
        return {
            "tensor_parallel_size": self.layout.tp,
            "expert_parallel_size": self.layout.ep,
            "rank": self.layout.rank,
        }

    def held(self, piece: Piece) -> Iterator[tuple[Planned, Parts]]:
        """Yield each tensor of `piece`, with the part of it that this shard's file contains."""
        stored = {tensor.name: tensor for tensor in piece.format.tensors}
        for planned in piece.tensors:
            whole = tuple(map(range, planned.shape))
            if self.regions is None or piece.slot is None:
                yield planned, whole
            elif piece.slot not in self.regions:
                yield planned, (range(0), *whole[1:]) if whole else whole
            elif piece.format == PLAIN:
                yield planned, self.regions[piece.slot]
            else:
                (rows, columns), (height, width) = self.regions[piece.slot], piece.shape
                unit = piece.format.width_unit
                region = piece.format.enclose((rows, columns), (height, width), unit=unit)
                yield planned, stored[planned.name.rpartition(".")[2]].part(region)

    def file_metadata(self, pieces: Iterable[Piece]) -> dict[str, str]:
        """Return metadata for the file's header: shape and offset of each split tensor."""
        parts = {
            planned.name: (planned.shape, [part.start for part in held])
            for piece in pieces
            for planned, held in self.held(piece)
            if tuple(map(len, held)) != planned.shape
        }
        return {PARTS_KEY: json.dumps(parts, separators=(",", ":"))} if parts else {}


def make_shards(
    spec: ModelSpec, quantization: QuantizationSpec | None, *, tp: int, ep: int
) -> list[Shard]:
    """Return one shard per rank for the model `spec`, whose weights have format `quantization`.

    Raises `ConfigError` for a split that the model does not support.
    """
    if tp == ep == 1:
        return [Shard()]
    # Write shards for sharded index keys: a rank then reads the index queries of all heads. Without
    # sharded index keys, a rank reads a part of such a shard.
    spec = replace(spec, quantization=quantization).shard_index()
    kernels = resolve(platform=CPU, dtype=torch.bfloat16)
    shards = []
    for rank in range(tp):
        layout = ParallelLayout(rank=rank, tp=tp, ep=ep)
        check_split(layout, spec)
        slots = build_empty_slots(spec, layout, kernels=kernels, keep_quantized=False)
        regions = {name: slot.region for name, slot in slots.items() if slot.needed}
        shards.append(Shard(layout, regions))
    return shards
