"""Load plans: which tensor of a checkpoint fills which slot of a model.

A plan must contain every tensor of the checkpoint and every weight slot of the model exactly once.
Planning reads only file headers, and also works for a model on the meta device. A fused tensor
joins matrices (q, k and v; gate and up; a layer's experts), whose slices fill one slot each.
"""

import gc
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count as count_from
from itertools import takewhile
from pathlib import Path
from typing import Self

from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.base.progress import ShowProgress
from negamax.checkpoint.reader import (
    SAFETENSORS_NAMES,
    TensorEntry,
    describe_lost_files,
    list_first,
    read_entries,
)
from negamax.config.model_spec import ModelSpec
from negamax.config.spellings import other_scale
from negamax.formats.floats import PLAIN
from negamax.formats.tensor_format import Axis, Region, Role, StoredTensor, TensorFormat
from negamax.kernels.quantize.stored import check_entries
from negamax.layers.weights import WeightSlot
from negamax.models.family import Placement, WeightNames
from negamax.models.registry import import_names
from negamax.parallel.layout import ParallelLayout

PLAIN_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of a checkpoint, or a slice of a fused tensor. The slice contains one matrix."""

    entry: TensorEntry
    shape: tuple[int, ...]
    index: tuple[int, ...] = ()  # Index in each leading dimension of `entry`.
    start: tuple[int, ...] = ()  # Offset in each dimension after `index`; (): all offsets are 0.
    # A tensor of role SHAPE must contain the shape `matrix`; None: the shape of the slot's matrix.
    matrix: tuple[int, int] | None = None

    def region(self, part: tuple[range, ...]) -> tuple[range, ...]:
        """Convert `part` (one range per dimension of this tensor) to ranges in `entry`."""
        if len(part) != len(self.shape):  # scalars may have shape [] or [1]
            part = tuple(map(range, self.shape))
        start = self.start or (0,) * len(part)
        moved = (range(p.start + s, p.stop + s) for p, s in zip(part, start, strict=True))
        return (*(range(at, at + 1) for at in self.index), *moved)

    def check(
        self, stored: StoredTensor, found: Tensor, part: tuple[range, ...], shape: tuple[int, int]
    ) -> None:
        """Call `check_entries` for `found`, which contains the ranges `part` of a matrix."""
        check_entries(stored, found, part, self.matrix or shape, name=self.entry.name)

    def num_bytes(self, part: tuple[range, ...]) -> int:
        elements = math.prod(map(len, part))
        return self.entry.num_bytes * elements // max(1, math.prod(self.entry.held))


@dataclass(frozen=True, slots=True)
class Move:
    """A slot and its tensors: one tensor, or all tensors of a matrix that is dequantized."""

    slot: WeightSlot
    # each tensor of the slot's format with its source; the tensor of values is first
    tensors: tuple[tuple[StoredTensor, SourceTensor], ...]
    layer: int = 0

    @property
    def is_dequantized(self) -> bool:
        """Whether a quantized matrix fills an unquantized slot."""
        is_plain = self.is_quantized or self.tensors[0][0] is PLAIN.values
        return self.slot.stored is None and not is_plain

    @property
    def is_quantized(self) -> bool:
        """Whether the loader quantizes the matrix. Values and scales have separate slots."""
        return self.slot.source.is_online

    @property
    def is_of_values(self) -> bool:
        """Whether the slot stores the values of a matrix, not scales."""
        return self.slot.stored in (None, self.slot.source.values)

    @property
    def stored_format(self) -> TensorFormat:
        """The format of the matrix in the checkpoint's files."""
        is_plain = self.tensors[0][0] is PLAIN.values
        return PLAIN if is_plain else self.slot.source.made_of or self.slot.source

    @property
    def position(self) -> tuple[str, int, tuple[int, ...], tuple[int, ...]]:
        source = self.tensors[0][1]
        return str(source.entry.file), source.entry.offset, source.index, source.start

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        return tuple(source.entry for _, source in self.tensors)

    def parts(self) -> Iterator[tuple[StoredTensor, SourceTensor, tuple[range, ...]]]:
        """Yield each stored tensor with the ranges to read: one range per dimension."""
        if not (self.is_dequantized or self.is_quantized):
            ((stored, source),) = self.tensors
            yield stored, source, self.slot.region
            return
        for stored, source in self.tensors:
            if stored.role is not Role.ACTIVATION:
                yield stored, source, stored.part(self.read_region)

    @property
    def read_region(self) -> Region:
        """The region of a matrix from which the loader computes the rank's part."""
        source, shape = self.slot.source, self.slot.matrix_shape
        if source.made_of is None:
            return source.enclose(self.slot.matrix_region, shape)
        alone = source.quantized_alone(self.slot.matrix_region, shape)
        return source.made_of.enclose(alone, shape)

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank reads, or 0 for scales of a matrix that the loader quantizes."""
        if self.is_quantized and not self.is_of_values:
            return 0
        return sum(source.num_bytes(part) for _, source, part in self.parts())

    def split(self, num_bytes: int) -> Iterator[Self]:
        """Split this move into moves of at most `num_bytes`. A move of one row may be larger.

        Only a tensor that is copied unchanged is split. Each new move fills a slot for its rows.
        """
        rows = len(self.slot.region[0]) if self.slot.region else 0
        is_whole = self.is_dequantized or len(self.tensors) > 1
        if is_whole or rows < 2 or self.num_bytes <= num_bytes:
            yield self
            return
        for slot in self.slot.split_rows(max(1, num_bytes * rows // self.num_bytes)):
            yield replace(self, slot=slot)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """All moves of one rank in the order of reading, and the names of skipped tensors."""

    moves: list[Move]
    skipped: Mapping[str, tuple[str, ...]]  # Reason -> names of skipped tensors.
    num_tensors: int  # Number of tensors in the checkpoint that are not skipped.

    @property
    def needed(self) -> list[Move]:
        return [move for move in self.moves if move.slot.needed]


def plan_load(
    slots: Mapping[str, WeightSlot],
    spec: ModelSpec,
    folder: Path,
    layout: ParallelLayout | None = None,
    *,
    progress: ShowProgress | None = None,
) -> LoadPlan:
    """Plan how the safetensors files in `folder` fill the `slots` of a model of `spec`.

    `layout` describes the rank; None means a single rank. `progress` is called after each file.
    Raises `CheckpointError` if files or tensors are missing, unknown, surplus or duplicate, or if
    the shape or dtype of a tensor does not match its slot.
    """
    # Turn garbage collection off, because it would scan the plan's many objects repeatedly.
    collects = gc.isenabled()
    gc.disable()
    layers = layout.layers(spec.num_layers) if layout and layout.pp > 1 else None
    try:
        entries = read_entries(folder, layout, progress=progress)
        return plan_tensors(entries, slots, spec, layers=layers)
    finally:
        if collects:
            gc.enable()


def plan_tensors(
    entries: Mapping[str, TensorEntry],
    slots: Mapping[str, WeightSlot],
    spec: ModelSpec,
    *,
    layers: range | None = None,
) -> LoadPlan:
    """Plan how `entries` fill the `slots`. `layers` are the layers of this pipeline stage."""
    names, num_layers = import_names(spec), spec.num_layers
    places = _map_places(slots.values())
    if layers is not None:
        entries = _of_stage(entries, places, spec, layers)
    found, skipped = _find(entries, places, names, num_layers=num_layers)
    moves: list[Move] = []
    problems, used = _Problems(), set[str]()
    for slot in slots.values():
        wanted = _list_wanted(slot, found)
        there = {name: found[name] for name in wanted if name in found}
        used.update(there)
        tensors = tuple((wanted[name], source) for name, source in there.items())
        for stored, source in tensors:
            _check_tensor(source, stored, slot, problems)
        absent = [n for n, stored in wanted.items() if n not in there and not stored.optional]
        if tensors and not absent:
            moves.append(Move(slot, tensors, names.layer_of(slot.name) or 0))
        elif tensors:
            first = tensors[0][1].entry.name
            text = f"tensor {first} has the format {slot.source.name}, but {list_first(absent)}"
            problems.misfits.setdefault(first, (f"{text} is missing", _INCOMPLETE))
        elif not slot.optional:
            problems.missing |= dict.fromkeys(absent)
    problems.unknown = {name: source for name, source in found.items() if name not in used}
    problems.lost_files = describe_lost_files(entry.file for entry in entries.values())
    problems.check(slots, names, num_layers=num_layers, is_empty=not moves)
    moves.sort(key=lambda move: (move.layer, *move.position))
    skips = {reason: tuple(those) for reason, those in skipped.items()}
    return LoadPlan(moves, skips, len(entries) - sum(map(len, skips.values())))


# --- names ----------------------------------------------------------------------------------------

Places = Mapping[str, tuple[WeightSlot, StoredTensor]]  # tensor name -> slot, stored tensor


def _map_places(slots: Iterable[WeightSlot]) -> Places:
    """Map the name of each stored tensor that may fill a slot to this slot."""
    places: dict[str, tuple[WeightSlot, StoredTensor]] = {}
    for slot in slots:
        if slot.source.made_of is not None:
            for name, stored in _tensors_of(slot, slot.source.made_of).items():
                places.setdefault(name, (slot, stored))
            continue
        if slot.stored is None and slot.source is not PLAIN:
            for name, stored in _tensors_of(slot, slot.source).items():
                places[name] = slot, stored
        places.setdefault(slot.name, (slot, slot.stored or PLAIN.values))
    return places


def _list_wanted(slot: WeightSlot, found: Mapping[str, SourceTensor]) -> dict[str, StoredTensor]:
    if slot.source.made_of is not None:
        return _tensors_of(slot, slot.source.made_of)
    if slot.stored is not None or slot.source is PLAIN:
        return {slot.name: slot.stored or PLAIN.values}
    wanted = _tensors_of(slot, slot.source)
    # Accept plain values, because some quantization configs do not list all unquantized modules.
    source = found.get(slot.name)
    is_plain = source is not None and source.entry.dtype in PLAIN_DTYPES
    if is_plain and not any(name in found for name in wanted if name != slot.name):
        return {slot.name: PLAIN.values}
    return wanted


def _of_stage(
    entries: Mapping[str, TensorEntry], places: Places, spec: ModelSpec, layers: range
) -> dict[str, TensorEntry]:
    """Drop the entries of other pipeline stages. Each stage checks its own entries."""
    names, here = import_names(spec), {_module(name) for name in places}
    outer = {_module(weight.name) for weight in names.weights(spec)} - here

    def is_here(slot: str) -> bool:
        layer = names.layer_of(slot)
        if layer is None:
            return _module(slot) not in outer
        return layer in layers or layer >= spec.num_layers

    placed = names.place(entries, num_layers=spec.num_layers)
    return {name: entry for name, entry in entries.items() if any(map(is_here, placed[name].slots))}


def _find(
    entries: Mapping[str, TensorEntry], places: Places, names: WeightNames, *, num_layers: int
) -> tuple[dict[str, SourceTensor], dict[str, list[str]]]:
    """Match the tensors in the files with the tensors in `places`.

    Returns the found tensors. Also returns reason -> names of tensors that are skipped. A found
    tensor's key is its name in `places`, or its name in the file if `places` lacks the tensor.
    """
    found: dict[str, SourceTensor] = {}
    skipped: dict[str, list[str]] = defaultdict(list)

    def add(name: str, source: SourceTensor) -> None:
        if name in found:
            raise CheckpointError(
                f"tensors {found[name].entry.name} and {source.entry.name} both hold the weight "
                f"{name}",
                hint="delete one of the two tensors from the checkpoint",
            )
        found[name] = source

    others = []
    for name, entry in entries.items():
        if name in places:
            add(name, SourceTensor(entry, entry.shape))
        else:
            others.append(name)
    for name, placement in names.place(others, num_layers=num_layers).items():
        entry, placement = entries[name], _respell(placement, places)
        if placement.skip_reason and not any(slot in places for slot in placement.slots):
            skipped[placement.skip_reason].append(name)
            continue
        for slot_name, source in _slice_fused(entry, placement, places):
            add(slot_name, source)
    return found, skipped


def _respell(placement: Placement, places: Places) -> Placement:
    """Replace a scale's name by its other spelling, if `places` has only the other spelling."""

    def find(slot: str) -> str:
        other = other_scale(slot)
        has = [name is not None and name.replace("*", "0") in places for name in (slot, other)]
        return other if other is not None and has == [False, True] else slot

    return replace(placement, slots=tuple(map(find, placement.slots)))


def _slice_fused(
    entry: TensorEntry, placement: Placement, places: Places
) -> Iterator[tuple[str, SourceTensor]]:
    """Yield the slices of `entry`, each with its name in `places`. Raises `CheckpointError`."""
    names, stacked = placement.slots, "*" in placement.slots[0]
    if len(names) == 1 and not stacked:
        yield names[0], SourceTensor(entry, entry.shape)
        return
    numbered = (names[0].replace("*", str(at)) for at in count_from(0))
    count = sum(1 for _ in takewhile(places.__contains__, numbered)) if stacked else 1
    parts = [places.get(name.replace("*", "0")) for name in names]
    if None in parts:
        yield entry.name, SourceTensor(entry, entry.shape)
        return
    known = [part for part in parts if part is not None]
    shapes, matrix = [_shape(*part) for part in known], None
    axis = known[0][1].axis(Axis.ROWS) if shapes[0] else None
    lead, inner = ((count,), entry.shape[1:]) if stacked else ((), entry.shape)
    if known[0][1].role is Role.SHAPE:  # the tensor contains the shape of the joined matrices
        sizes = [slot.matrix_shape for slot, _ in known]
        matrix = sum(rows for rows, _ in sizes), sizes[0][1]
        starts, joined = [(0,)] * len(sizes), shapes[0]
    else:
        starts, joined = _join(shapes, axis, inner)
    if entry.shape[: len(lead)] != lead or not _same_shape(inner, joined):
        raise _misshaped(entry, entry.shape, (*lead, *joined))
    for at in range(count):
        index = (at,) if stacked else ()
        for name, shape, start in zip(names, shapes, starts, strict=True):
            part = shape if len(shape) == len(inner) else inner
            source = SourceTensor(entry, part, index, start[: len(part)], matrix)
            yield name.replace("*", str(at)), source


def _join(
    shapes: list[tuple[int, ...]], axis: int | None, given: tuple[int, ...]
) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Return the offsets of each tensor in the fused tensor, and the shape of the fused tensor.

    Tensors are joined along `axis`. A single scale (no rows, `axis` None) is stored once for all
    matrices, or once per matrix.
    """
    if axis is None:
        if len(shapes) == 1 or given != (len(shapes),):
            return [(0,) * len(given)] * len(shapes), shapes[0]
        axis, shapes = 0, [(1,)] * len(shapes)
    starts, total = [], 0
    for shape in shapes:
        starts.append(tuple(total if dim == axis else 0 for dim in range(len(shape))))
        total += shape[axis]
    return starts, (*shape[:axis], total, *shape[axis + 1 :])


def _tensors_of(slot: WeightSlot, held: TensorFormat) -> dict[str, StoredTensor]:
    """Return name -> tensor for the tensors that store the matrix of `slot` in format `held`."""
    return {f"{_module(slot.name)}.{stored.name}": stored for stored in held.tensors}


def _module(name: str) -> str:
    return name.rpartition(".")[0]


# --- mismatches -----------------------------------------------------------------------------------

_ONE = ((), (1,))  # the shapes that a scalar may have in a file
_OTHER_MODEL = "config.json and the weights belong to different models"
_OTHER_CONFIG = "config.json has no quantization_config for this module"
_INCOMPLETE = "the checkpoint is incomplete, or its quantization config describes another model"
_LOST_EXPERTS = (
    "only experts are missing, so the tool that wrote the checkpoint left them out; write the "
    "checkpoint again with a version of the tool that supports the model"
)
_UNLISTED = (
    "the checkpoint's quantization config must list unquantized modules "
    "(modules_to_not_convert, ignore)"
)


@dataclass
class _Problems:
    """Mismatches between a checkpoint and a model. Only `plan_tensors` changes this object."""

    misfits: dict[str, tuple[str, str]] = field(default_factory=dict)  # Tensor -> (error, hint).
    missing: dict[str, None] = field(default_factory=dict)  # Names of missing tensors, in order.
    unknown: Mapping[str, SourceTensor] = field(default_factory=dict)  # Internal name -> source.
    lost_files: str | None = None

    def check(
        self,
        slots: Mapping[str, WeightSlot],
        names: WeightNames,
        *,
        num_layers: int,
        is_empty: bool,
    ) -> None:
        """Raise `CheckpointError` if there are mismatches; list at most ten of each kind."""
        texts, hints = [], []
        if self.misfits:
            texts.append(next(iter(self.misfits.values()))[0])
            hints.append(next(iter(self.misfits.values()))[1])
            if len(self.misfits) > 1:
                texts.append(_count(list(self.misfits)[1:], "do not match config.json either"))
        layers = {name: names.layer_of(name) or 0 for name in self.unknown}
        surplus = [name for name, layer in layers.items() if layer >= num_layers]
        if surplus:
            last = max(layers.values())
            texts.append(
                f"num_hidden_layers in config.json is {num_layers}, but the checkpoint has "
                f"{len(surplus)} tensors of later layers, up to layer {last} (first: "
                f"{self.unknown[surplus[0]].entry.name})"
            )
            hints.append(f"set num_hidden_layers to {last + 1} or use the weights' own config.json")
        rest = [name for name, layer in layers.items() if layer < num_layers]
        if rest:
            unknown = list(dict.fromkeys(self.unknown[name].entry.name for name in rest))
            texts.append(_count(unknown, "are not part of this model"))
            if any(_module(name) + ".weight" in slots for name in rest):
                hints.append("config.json states that these modules are not quantized")
        if self.missing:
            texts.append(_count(list(self.missing), "are missing from the checkpoint"))
            if not texts[1:] and all(".experts." in name for name in self.missing):
                hints.append(_LOST_EXPERTS)
        if texts:
            hint = next(iter(hints), _OTHER_MODEL)
            if is_empty:
                hint = "config.json describes another model than the weights"
            if self.lost_files and (self.missing or hint == _INCOMPLETE):
                hint = f"{self.lost_files}: finish the download"
            raise CheckpointError("; ".join(texts), hint=hint)


def _count(names: list[str], what: str) -> str:
    """Format a message such as "3 tensors are missing: a, b, c"."""
    if len(names) > 1:
        return f"{len(names)} tensors {what}: {list_first(names)}"
    return f"1 tensor {what}: {names[0]}".replace(" are ", " is ", 1).replace(" do ", " does ", 1)


def _check_tensor(
    source: SourceTensor, stored: StoredTensor, slot: WeightSlot, problems: _Problems
) -> None:
    entry = source.entry
    if stored is PLAIN.values:
        allowed, hint = PLAIN_DTYPES, _OTHER_CONFIG
        what = f"tensor {entry.name} has dtype {entry.dtype}; supported:"
    else:
        dtypes = (*stored.dtypes, *(() if slot.stored else stored.also))
        held = slot.source.made_of or slot.source
        allowed = tuple(SAFETENSORS_NAMES[dtype] for dtype in dtypes)
        hint = "export the checkpoint again" if held is PLAIN else _UNLISTED
        if entry.dtype in (SAFETENSORS_NAMES[dtype] for dtype in stored.also):
            hint = 'set "fmt": "float8_e4m3fnuz" in the quantization_config of config.json'
        who = "supported:" if held is PLAIN else f"{held.name} is stored in"
        what = f"tensor {entry.name} has dtype {entry.dtype}; {who}"
    expected = _shape(slot, stored)
    if entry.dtype not in allowed:
        problems.misfits.setdefault(entry.name, (f"{what} {', '.join(allowed)}", hint))
    elif not _same_shape(source.shape, expected):
        error = _misshaped(entry, source.shape, expected)
        problems.misfits.setdefault(entry.name, (error.message, _OTHER_MODEL))


def _shape(slot: WeightSlot, stored: StoredTensor) -> tuple[int, ...]:
    if slot.source.is_online:
        return stored.shape(slot.matrix_shape)
    is_whole = slot.stored is not None or stored is PLAIN.values
    return slot.shape if is_whole else stored.shape(slot.matrix_shape)


def _same_shape(given: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Return whether the shapes are equal. The shapes [] and [1] are treated as equal."""
    return given == expected or (given in _ONE and expected in _ONE)


def _misshaped(
    entry: TensorEntry, given: tuple[int, ...], expected: tuple[int, ...]
) -> CheckpointError:
    return CheckpointError(
        f"tensor {entry.name} has shape {list(given)}; config.json requires {list(expected)}",
        hint=_OTHER_MODEL,
    )
