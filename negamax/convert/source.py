"""Read the source of a conversion: check files as the loader does, read weights one by one."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.checkpoint.finite import check_tensor
from negamax.checkpoint.holes import ZeroMatrix, check_zeros, is_zero
from negamax.checkpoint.plan import Move, plan_tensors
from negamax.checkpoint.reader import SAFETENSORS_NAMES, CheckpointReader, TensorEntry, read_entries
from negamax.checkpoint.split import read_ranks
from negamax.config.json_file import read_json_object
from negamax.config.model_spec import ModelSpec
from negamax.convert.joined import JoiningReader, join
from negamax.formats.floats import PLAIN
from negamax.formats.tensor_format import TensorFormat
from negamax.kernels.quantize.stored import dequantize
from negamax.layers.weights import WeightSlot
from negamax.models.family import WeightSpec
from negamax.models.minimax_names import VISION_MODULES
from negamax.models.registry import import_names, read_spec
from negamax.parallel.layout import ParallelLayout
from negamax.quantization.detect import detect

# Scales of keys, values and queries. The loader may skip these scales, but other engines need them.
_OF_ATTENTION = re.compile(r"\.self_attn\.(?!.*(weight|input)_).*(scale|offset|zero_point)$")
_OF_VISION = re.compile(rf"(?:^|\.)(?:{'|'.join(VISION_MODULES)})\.")


def is_linear(spec: WeightSpec, layer: int | None) -> bool:
    """Return whether a conversion may quantize the weight.

    A conversion may quantize matrices that layers multiply in the compute dtype. Routers use fp32.
    """
    return len(spec.shape) == 2 and not spec.is_table and spec.dtype is None and layer is not None


@dataclass(frozen=True)
class Weight:
    """One weight of the model and its stored tensors."""

    name: str  # name of the weight slot
    spec: WeightSpec
    layer: int | None
    move: Move

    @property
    def module(self) -> str:
        """Name of the weight's module in quantization configs."""
        return self.name.removesuffix(f".{PLAIN.values.name}")

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.spec.shape
        return rows, columns

    @property
    def is_linear(self) -> bool:
        return is_linear(self.spec, self.layer)

    @property
    def format(self) -> TensorFormat:
        return self.move.slot.source if self.move.is_dequantized else PLAIN

    @property
    def is_as_described(self) -> bool:
        """Whether the tensor's dtype fits its format. Some files declare FNUZ as E4M3FN."""
        stored, source = self.move.tensors[0]
        names = [SAFETENSORS_NAMES[dtype] for dtype in stored.dtypes]
        return stored is PLAIN.values or source.entry.dtype in names

    def read(self, reader: CheckpointReader, rows: range | None = None) -> dict[str, Tensor]:
        """Read the stored tensors by name. `rows` selects rows of an unquantized matrix."""
        tensors = {}
        for stored, source in self.move.tensors:
            is_plain = stored is PLAIN.values
            part = tuple(map(range, self.spec.shape if is_plain else stored.shape(self.shape)))
            if is_plain and rows is not None:
                part = (rows, *part[1:])
            found = reader.read(source.entry, source.region(part)).reshape(list(map(len, part)))
            if not is_plain:
                source.check(stored, found, part, self.shape)
            check_tensor(found, source.entry, stored.role, self.move.stored_format)
            tensors[stored.name] = found
        return tensors

    def is_zero(self, reader: CheckpointReader) -> bool:
        """Return whether all bytes of the matrix's values are 0."""
        stored, source = self.move.tensors[0]
        rows, columns = map(range, stored.shape(self.shape))
        parts = ((rows[:1], columns), (rows, columns))
        return all(is_zero(reader.read(source.entry, source.region(part))) for part in parts)

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Dequantize `tensors` to fp32. Raises `CheckpointError` if a value is NaN or infinite."""
        if self.format is PLAIN:
            plain = tensors[PLAIN.values.name].float()
        else:
            kept = {one.name for one in self.format.tensors if one.is_kept}
            read = {name: tensor for name, tensor in tensors.items() if name in kept}
            plain = dequantize(self.format, read)
        if not math.isfinite(plain.sum().item()):
            names = ", ".join(entry.name for entry in self.move.entries)
            raise CheckpointError(
                f"the checkpoint has values that are NaN or infinite: {names}",
                hint="download the files again; if the error remains, the checkpoint is broken",
            )
        return plain


class Source:
    """The weights of the checkpoint in `folder`. The parts of a split checkpoint are joined.

    Like the loader, the constructor raises `ConfigError` or `CheckpointError`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: dict[str, Any] = read_json_object(folder / "config.json")
        whole = read_spec(self.config, folder)
        # Only the text model is converted. A vision tower is copied unchanged.
        self.spec: ModelSpec = replace(whole, vision=None)
        self.scheme = detect(self.spec.quantization)
        # layer numbers, followed by None for the tensors outside the layers
        self.layers: list[int | None] = [*range(self.spec.num_layers), None]
        names = import_names(self.spec)
        specs = {name: spec for spec in names.weights(self.spec) for name in spec.names()}
        slots = {
            name: WeightSlot(name, spec.shape, target=None, source=self._format(name, spec))
            for name, spec in specs.items()
        }
        self.ranks = read_ranks(folder)  # layout of each rank of a split checkpoint, else empty
        layouts = self.ranks or [ParallelLayout()]
        self._entries = [read_entries(folder, layout) for layout in layouts]
        entries = join(self._entries) if self.ranks else self._entries[0]
        plan = plan_tensors(entries, slots, self.spec)
        by_name = {move.slot.name: move for move in plan.moves}
        self.weights = [
            Weight(name, spec, names.layer_of(name), by_name[name]) for name, spec in specs.items()
        ]
        left = [(why, name) for why, those in plan.skipped.items() for name in those]
        scales = {name: why for why, name in left if _OF_ATTENTION.search(name)}
        # layer -> tensors that are copied unchanged
        self.carried: dict[int | None, list[TensorEntry]] = {}
        for name, placement in names.place(scales, num_layers=self.spec.num_layers).items():
            self.carried.setdefault(names.layer_of(placement.slots[0]), []).append(entries[name])
        tower = [name for _, name in left if whole.vision and _OF_VISION.search(name)]
        self.has_vision = bool(tower)
        self.carried.setdefault(None, []).extend(entries[name] for name in tower)
        copied = {*scales, *tower}
        self.skipped = [(why, name) for why, name in left if name not in copied]

    def _format(self, name: str, spec: WeightSpec) -> TensorFormat:
        if self.scheme is None or len(spec.shape) != 2 or spec.is_table or spec.dtype:
            return PLAIN
        return self.scheme.format_of(name.removesuffix(f".{PLAIN.values.name}"))

    def reader(self) -> CheckpointReader:
        return JoiningReader(self._entries) if self.ranks else CheckpointReader()

    def read_layer(self, layer: int | None) -> list[Weight]:
        return [weight for weight in self.weights if weight.layer == layer]

    def check_holes(self, layer: int | None) -> None:
        with self.reader() as reader:
            zeros = {}
            for weight in self.read_layer(layer):
                if len(weight.spec.shape) == 2 and weight.is_zero(reader):
                    entry = weight.move.entries[0]
                    zeros[weight.name] = ZeroMatrix(entry, weight.move.stored_format)
            check_zeros(reader, zeros)

    @property
    def formats(self) -> tuple[TensorFormat, ...]:
        found = (weight.format for weight in self.weights)
        return tuple(dict.fromkeys(stored for stored in found if stored is not PLAIN))

    @property
    def linear(self) -> dict[str, TensorFormat]:
        """The stored format of each module that a conversion may quantize."""
        return {one.module: one.format for one in self.weights if one.is_linear}
