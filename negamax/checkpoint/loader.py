"""Loading a checkpoint into a model: every tensor goes to one place, every slot is filled once, or
the start is refused.

All names, shapes and dtypes are checked from the files' headers before the first byte of data is
read (`plan.py`). Then the tensors are read layer by layer, in file order, one at a time, and of
each only what this rank keeps. A quantised matrix goes as it is stored into slots of its own, where
a kernel reads that; else it is dequantised on the way, from the part that this rank's share lies
in.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from negamax.base.log import get_logger
from negamax.base.progress import format_bytes
from negamax.checkpoint.finite import BrokenScale, FiniteCheck, broken_scale
from negamax.checkpoint.plan import LoadPlan, Move, Source, plan_load
from negamax.checkpoint.reader import CheckpointReader, first_names
from negamax.config.model_spec import ModelSpec
from negamax.kernels.formats import Role
from negamax.layers.weights import WeightSlot

logger = get_logger(__name__)

ShowProgress = Callable[[int, int], None]  # (bytes done, bytes in all)

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


def load_weights(
    slots: Mapping[str, WeightSlot],
    spec: ModelSpec,
    folder: Path,
    *,
    progress: ShowProgress | None = None,
) -> CheckpointReport:
    """Fill the `slots` of a model from the safetensors files in `folder`. The caller packs it
    afterwards.

    `progress` is called after each tensor. Errors: those of `plan_load` and `fill`.
    """
    return fill(slots, plan_load(slots, spec, folder), progress=progress)


def fill(
    slots: Mapping[str, WeightSlot], plan: LoadPlan, *, progress: ShowProgress | None = None
) -> CheckpointReport:
    """As `load_weights`, by a plan that was made for the same model, on whichever device.

    Errors: `CheckpointError` for a file that cannot be read, and for tensors with values that are
    NaN or infinite.
    """
    began = time.perf_counter()
    needed = [replace(move, slot=slots[move.slot.name]) for move in plan.needed]
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
    quantized = [move for move in needed if move.is_quantized and move.is_of_values]
    if quantized:
        made = ", ".join(sorted({move.slot.source.name for move in quantized}))
        logger.info("%d weights are quantised to %s while they are read", len(quantized), made)
    for reason, names in plan.skipped.items():
        logger.warning("skipped %d tensors: %s (%s)", len(names), reason, first_names(list(names)))
    done = 0
    check = FiniteCheck()
    with CheckpointReader() as reader:
        for move, part, scales in _parts(reader, needed):
            written = move.slot.write_part(part)
            for scale in scales:
                check.add_scale(scale)
            # A GPU has many scales of a few numbers each; they are copied as they are.
            stored = move.slot.stored
            looked_at = part if stored and stored.role is not Role.VALUES else written
            check.add(looked_at, *move.entries)
            done += move.num_bytes
            if progress:
                progress(done, total)
        check.finish(reader)
    return CheckpointReport(
        num_tensors=plan.num_tensors,
        num_bytes=total,
        num_dequantized=len(dequantized),
        num_kept=len(kept),
        formats=formats,
        skipped=plan.skipped,
        seconds=time.perf_counter() - began,
    )


Part = tuple[Move, Tensor, list[BrokenScale]]  # what this rank keeps of a tensor
Quantized = dict[tuple[Source, tuple[range, ...]], Mapping[str, Tensor]]


def _parts(reader: CheckpointReader, moves: list[Move]) -> Iterator[Part]:
    """What this rank keeps of each tensor, in order. On their way to a GPU, a few are brought into
    pinned memory ahead.
    """
    made: Quantized = {}
    if all(move.slot.device is None or move.slot.device.type == "cpu" for move in moves):
        for move in moves:
            yield _read(reader, move, made)
        return
    with ThreadPoolExecutor(READ_THREADS, "negamax-load") as pool:
        ahead: deque[Future[Part]] = deque()
        for move in moves:
            # `part` is a view of the mapped file: its pages are read in the thread that copies it.
            ahead.append(pool.submit(_pinned, *_read(reader, move, made)))
            if len(ahead) > READ_AHEAD:
                yield ahead.popleft().result()
        for pinned in ahead:
            yield pinned.result()


def _read(reader: CheckpointReader, move: Move, made: Quantized) -> Part:
    """What this rank keeps of a tensor."""
    if move.is_quantized:
        return move, _quantize(reader, move, made), []
    slot, scales = move.slot, []
    read: dict[str, Tensor] = {}
    for stored, source, wanted in move.parts():
        found = reader.read(source.entry, source.region(wanted)).reshape(list(map(len, wanted)))
        if stored.role is Role.SCALE:
            signed = slot.source.element.startswith(("int", "uint"))
            scales.append(broken_scale(found, source.entry, may_be_negative=signed))
        if not move.is_dequantized:
            read[stored.name] = found
            continue
        stored.check(found, wanted, slot.matrix_shape, name=source.entry.name)
        if stored.is_kept:
            read[stored.name] = found
    broken = [scale for scale in scales if scale is not None]
    if not move.is_dequantized:
        (part,) = read.values()
        return move, part, broken
    whole = slot.source.enclose(slot.matrix_region, slot.matrix_shape)
    plain = slot.source.dequantize(read)
    return move, _within(plain, slot.region, whole), broken


def _quantize(reader: CheckpointReader, move: Move, made: Quantized) -> Tensor:
    """What this rank keeps of a tensor of a matrix that is stored plain. `made` holds all tensors
    of the last one, whose moves follow each other.
    """
    slot, quantize = move.slot, move.slot.source.quantize
    assert quantize is not None
    ((_, source, whole),) = move.parts()
    key = source, whole
    if key not in made:
        made.clear()
        plain = reader.read(source.entry, source.region(whole))
        made[key] = quantize(plain.reshape(list(map(len, whole))).to(slot.device).float())
    region = slot.matrix_region
    if slot.stored is None:
        return _within(slot.source.dequantize(made[key]), region, whole)
    stored = slot.stored
    return _within(made[key][stored.name], stored.part(region), stored.part((whole[0], whole[1])))


def _within(found: Tensor, part: tuple[range, ...], whole: tuple[range, ...]) -> Tensor:
    """The part `part` of a tensor of which `found` is `whole`."""
    places = (
        slice(wanted.start - outer.start, wanted.stop - outer.start)
        for wanted, outer in zip(part, whole, strict=True)
    )
    return found[tuple(places)]


def _pinned(move: Move, part: Tensor, scales: list[BrokenScale]) -> Part:
    """With a copy in memory that a GPU can read by itself, unless it has read it."""
    if part.is_cuda:
        return move, part, scales
    pinned = torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part)
    return move, pinned, scales
