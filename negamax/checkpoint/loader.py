"""Loading a checkpoint into a model: every tensor goes to one place, every slot is filled once, or
the start is refused.

All names, shapes and dtypes are checked from the files' headers before the first byte of data is
read. Then the tensors are read layer by layer, in file order, one at a time, and of each only what
this rank keeps. A quantised matrix goes as it is stored into slots of its own, where a kernel reads
that; else it is dequantised on the way, from the part that this rank's share lies in.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.base.log import get_logger
from negamax.base.progress import format_bytes
from negamax.checkpoint.finite import FiniteCheck
from negamax.checkpoint.reader import (
    SAFETENSORS_NAMES,
    CheckpointReader,
    TensorEntry,
    first_names,
    open_checkpoint,
)
from negamax.config.model_spec import ModelSpec
from negamax.kernels.formats import PLAIN, Role, StoredTensor
from negamax.layers.weights import WeightSlot
from negamax.models.family import WeightNames, names_of

logger = get_logger(__name__)

ShowProgress = Callable[[int, int], None]  # (bytes done, bytes in all)

PLAIN_DTYPES = ("BF16", "F16", "F32")
READ_THREADS = 4  # that bring tensors into pinned memory
READ_AHEAD = 16  # tensors


@dataclass(frozen=True)
class CheckpointReport:
    """What was loaded and what was left out."""

    num_tensors: int  # of the checkpoint, scales included, skipped ones not
    num_bytes: int  # read on this rank
    num_dequantized: int  # weights
    num_kept: int  # weights that stay as they are stored, with their scales
    formats: str  # of both, by name
    skipped: Mapping[str, tuple[str, ...]]  # reason -> tensor names
    seconds: float

    def summary(self) -> str:
        """One line for the log."""
        text = (
            f"loaded {self.num_tensors} tensors ({format_bytes(self.num_bytes)}) in "
            f"{self.seconds:.2f} s"
        )
        if self.num_dequantized:
            text += (
                f", {self.num_dequantized} of them {self.formats}, dequantised to the compute dtype"
            )
        if self.num_kept:
            text += f", {self.num_kept} of them weights kept as {self.formats}"
        for reason, names in self.skipped.items():
            text += f"; skipped {len(names)} ({reason})"
        return text


@dataclass(frozen=True)
class _Move:
    """What fills one slot: a tensor of the checkpoint, or all those of a matrix that is dequantised
    on the way.
    """

    slot: WeightSlot
    tensors: tuple[tuple[StoredTensor, TensorEntry], ...]  # of the slot's format, values first

    @property
    def is_dequantized(self) -> bool:
        return self.slot.stored is None and self.tensors[0][0] is not PLAIN.values

    @property
    def first(self) -> TensorEntry:
        return self.tensors[0][1]

    def regions(self) -> Iterator[tuple[StoredTensor, TensorEntry, tuple[range, ...]]]:
        """What is read of each tensor."""
        if not self.is_dequantized:
            ((stored, entry),) = self.tensors
            yield stored, entry, self.slot.region
            return
        part = self.slot.source.enclose(self.slot.matrix_region, self.slot.matrix_shape)
        for stored, entry in self.tensors:
            if stored.role is not Role.ACTIVATION:
                yield stored, entry, stored.part(part)

    @property
    def num_bytes(self) -> int:
        """Read on this rank."""
        return sum(
            entry.num_bytes * math.prod(map(len, region)) // max(1, math.prod(entry.shape))
            for _, entry, region in self.regions()
        )


def load_weights(
    slots: Mapping[str, WeightSlot],
    spec: ModelSpec,
    folder: Path,
    *,
    progress: ShowProgress | None = None,
) -> CheckpointReport:
    """Fill the `slots` of a model from the safetensors files in `folder`. The caller packs it
    afterwards.

    `progress` is called after each tensor.
    Errors: `CheckpointError` naming the files or tensors that are missing, unknown, surplus,
    mis-shaped, of a wrong dtype, or with values that are NaN or infinite.
    """
    began = time.perf_counter()
    with open_checkpoint(folder) as reader:
        moves, skipped = _plan(reader.entries, slots, names_of(spec), num_layers=spec.num_layers)
        needed = [move for move in moves if move.slot.needed]
        total = sum(move.num_bytes for move in needed)
        dequantized = [move for move in needed if move.is_dequantized]
        kept = [move for move in needed if move.slot.stored is move.slot.source.values]
        formats = ", ".join(sorted({move.slot.source.name for move in (*dequantized, *kept)}))
        if dequantized:
            logger.info(
                "%d weights (%s) are stored as %s, which no kernel here reads: they are "
                "dequantised to the compute dtype, one at a time",
                len(dequantized), format_bytes(sum(move.num_bytes for move in dequantized)),
                formats,
            )  # fmt: skip
        for reason, names in skipped.items():
            logger.warning(
                "skipped %d tensors: %s (%s)", len(names), reason, first_names(list(names))
            )
        done = 0
        check = FiniteCheck()
        for move, part in _parts(reader, needed):
            written = move.slot.write_part(part)
            # A GPU has many scales of a few numbers each; they are copied as they are.
            stored = move.slot.stored
            looked_at = part if stored and stored.role is not Role.VALUES else written
            check.add(looked_at, *(entry for _, entry in move.tensors))
            done += move.num_bytes
            if progress:
                progress(done, total)
        check.finish(reader)
    return CheckpointReport(
        num_tensors=sum(len(move.tensors) for move in moves),
        num_bytes=total,
        num_dequantized=len(dequantized),
        num_kept=len(kept),
        formats=formats,
        skipped=skipped,
        seconds=time.perf_counter() - began,
    )


def _plan(
    entries: Mapping[str, TensorEntry],
    slots: Mapping[str, WeightSlot],
    names: WeightNames,
    *,
    num_layers: int,
) -> tuple[list[_Move], dict[str, tuple[str, ...]]]:
    """Every tensor's way, in reading order, and the names that are skipped by reason."""
    found: dict[str, TensorEntry] = {}  # canonical name -> tensor
    skipped: dict[str, list[str]] = defaultdict(list)
    placements = names.place(entries, num_layers=num_layers)
    for name, entry in entries.items():
        placement = placements[name]
        if placement.skip_reason and placement.slot not in slots:
            skipped[placement.skip_reason].append(name)
        elif placement.slot in found:
            raise CheckpointError(
                f"tensors {found[placement.slot].name} and {name} are the same weight, "
                f"{placement.slot}"
            )
        else:
            found[placement.slot] = entry

    moves: list[_Move] = []
    missing: list[str] = []
    for slot in slots.values():
        sources = _sources(slot, found)
        absent = [n for n, stored in sources.items() if n not in found and not stored.optional]
        tensors = [(stored, found.pop(n)) for n, stored in sources.items() if n in found]
        for stored, entry in tensors:
            _check_tensor(entry, stored, slot)
        if tensors and not absent:
            moves.append(_Move(slot, tuple(tensors)))
        elif tensors:
            raise CheckpointError(
                f"tensor {tensors[0][1].name} is stored as {slot.source.name} and "
                f"{first_names(absent)} is missing"
            )
        elif not slot.optional:
            missing += absent
    _refuse_layers(found, names, num_layers=num_layers)
    _refuse_names(
        "are not part of this model",
        [entry.name for entry in found.values()],
        hint="config.json says that these modules are stored plain"
        if any(_module(name) + ".weight" in slots for name in found)
        else _OTHER_MODEL,
    )
    _refuse_names("are missing from the checkpoint", missing)
    moves.sort(
        key=lambda move: (
            names.layer_of(move.slot.name) or 0,
            str(move.first.file),
            move.first.offset,
        )
    )
    return moves, {reason: tuple(names) for reason, names in skipped.items()}


def _sources(slot: WeightSlot, found: Mapping[str, TensorEntry]) -> dict[str, StoredTensor]:
    """The names of the tensors that fill `slot`."""
    if slot.stored is not None or slot.source is PLAIN:
        return {slot.name: slot.stored or PLAIN.values}
    module = _module(slot.name)
    sources = {f"{module}.{stored.name}": stored for stored in slot.source.tensors}
    # A module may be stored plain that config.json forgets to leave out.
    others = [name for name in sources if name != slot.name]
    entry = found.get(slot.name)
    if entry is not None and entry.dtype in PLAIN_DTYPES and not any(n in found for n in others):
        return {slot.name: PLAIN.values}
    return sources


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _check_tensor(entry: TensorEntry, stored: StoredTensor, slot: WeightSlot) -> None:
    if stored is PLAIN.values:
        _check_shape(entry, slot.shape)
        if entry.dtype not in PLAIN_DTYPES:
            raise CheckpointError(
                f"tensor {entry.name} has dtype {entry.dtype}; supported: "
                f"{', '.join(PLAIN_DTYPES)}",
                hint="config.json has no quantization_config that says so of this module",
            )
        return
    dtypes = [SAFETENSORS_NAMES[dtype] for dtype in stored.dtypes]
    if entry.dtype not in dtypes:
        raise CheckpointError(
            f"tensor {entry.name} has dtype {entry.dtype}; {slot.source.name} is stored in "
            f"{', '.join(dtypes)}",
            hint="modules that are stored plain must be listed in the checkpoint's quantisation "
            "config (modules_to_not_convert, ignore)",
        )
    _check_shape(entry, slot.shape if slot.stored else stored.shape(slot.matrix_shape))


def _check_shape(entry: TensorEntry, expected: tuple[int, ...]) -> None:
    one_number = (), (1,)  # two spellings
    if entry.shape != expected and not (entry.shape in one_number and expected in one_number):
        raise CheckpointError(
            f"tensor {entry.name} has shape {list(entry.shape)}; config.json asks for "
            f"{list(expected)}",
            hint=_OTHER_MODEL,
        )


def _parts(reader: CheckpointReader, moves: list[_Move]) -> Iterator[tuple[_Move, Tensor]]:
    """What this rank keeps of each tensor, in order. On their way to a GPU, a few are brought into
    pinned memory ahead.
    """
    if all(move.slot.device is None or move.slot.device.type == "cpu" for move in moves):
        for move in moves:
            yield move, _read(reader, move)
        return
    with ThreadPoolExecutor(READ_THREADS, "negamax-load") as pool:
        ahead: deque[tuple[_Move, Future[Tensor]]] = deque()
        for move in moves:
            # `part` is a view of the mapped file: its pages are read in the thread that copies it.
            part = _read(reader, move)
            ahead.append((move, pool.submit(_pinned, part)))
            if len(ahead) > READ_AHEAD:
                first, pinned = ahead.popleft()
                yield first, pinned.result()
        for first, pinned in ahead:
            yield first, pinned.result()


def _read(reader: CheckpointReader, move: _Move) -> Tensor:
    """What this rank keeps of a tensor."""
    slot = move.slot
    if not move.is_dequantized:
        part = reader.read(move.first, slot.region or None)
        return part.reshape([len(wanted) for wanted in slot.region])
    read: dict[str, Tensor] = {}
    for stored, entry, part in move.regions():
        found = reader.read(entry, part if entry.shape else None)
        stored.check(found, part, slot.matrix_shape, name=entry.name)
        if stored.is_kept:
            read[stored.name] = found
    whole = slot.source.enclose(slot.matrix_region, slot.matrix_shape)
    plain = slot.source.dequantize(read)
    return plain[
        tuple(
            slice(part.start - outer.start, part.stop - outer.start)
            for part, outer in zip(slot.region, whole, strict=True)
        )
    ]


def _pinned(part: Tensor) -> Tensor:
    """A copy in memory that a GPU can read by itself."""
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part)


_OTHER_MODEL = "config.json and the weights are not of the same model"


def _refuse_names(what: str, names: list[str], *, hint: str = _OTHER_MODEL) -> None:
    if names:
        verb = (
            f"{len(names)} tensors {what}"
            if len(names) > 1
            else f"1 tensor {what}".replace(" are ", " is ")
        )
        raise CheckpointError(f"{verb}: {first_names(names)}", hint=hint)


def _refuse_layers(
    found: Mapping[str, TensorEntry], names: WeightNames, *, num_layers: int
) -> None:
    """Refuse tensors of layers that config.json does not have: without them the model is another
    one.
    """
    surplus = [slot for slot in found if (names.layer_of(slot) or 0) >= num_layers]
    if surplus:
        layers = {names.layer_of(slot) or 0 for slot in surplus}
        raise CheckpointError(
            f"num_hidden_layers in config.json is {num_layers}; the checkpoint has {len(layers)} "
            f"more, up to layer "
            f"{max(layers)} ({len(surplus)} tensors, {found[surplus[0]].name} the first)",
            hint=f"set num_hidden_layers to {max(layers) + 1} or use the config.json that "
            f"belongs to the weights",
        )
