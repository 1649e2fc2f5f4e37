"""Load a checkpoint into a model.

Every tensor of the checkpoint must fill a weight slot, and every slot must be filled exactly once.
Names, shapes and dtypes are checked in the file headers before data is read (`plan.py`). The loader
reads tensors layer by layer, in file order and in large pieces (`stream.py`). Each rank keeps its
part. The loader dequantizes a quantized matrix if no kernel reads its format.
"""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from negamax.base.log import get_logger
from negamax.base.progress import ShowProgress, format_bytes
from negamax.checkpoint.finite import FiniteCheck
from negamax.checkpoint.holes import ZeroMatrix
from negamax.checkpoint.plan import LoadPlan, Move
from negamax.checkpoint.reader import CheckpointReader, list_first
from negamax.checkpoint.stream import PIECE_BYTES, THREADS, read_parts
from negamax.formats.tensor_format import Role
from negamax.layers.weights import WeightSlot

logger = get_logger(__name__)


@dataclass(frozen=True)
class CheckpointReport:
    """Numbers of tensors and bytes that the loader read, and the tensors that it skipped."""

    num_tensors: int  # Number of tensors in the checkpoint that are not skipped.
    num_bytes: int  # Number of bytes that this rank read.
    num_dequantized: int  # Number of weights that were dequantized.
    num_kept: int  # Number of weights that were kept as stored.
    dequantized_formats: str  # Stored formats of the dequantized weights.
    kept_formats: str
    # largest RMS(error) / RMS(matrix) of a converted matrix; None: no matrix was converted
    change: float | None
    skipped: Mapping[str, tuple[str, ...]]  # reason -> names of skipped tensors
    seconds: float

    def summary(self) -> str:
        text = (
            f"loaded {self.num_tensors} tensors ({format_bytes(self.num_bytes)}) in "
            f"{self.seconds:.2f} s, {self.num_bytes / self.seconds / 1e9:.1f} GB/s with {THREADS} "
            f"threads"
        )
        if self.num_dequantized:
            text += (
                f"; dequantized {self.num_dequantized} weights to the compute dtype "
                f"({self.dequantized_formats})"
            )
        if self.num_kept:
            text += f"; kept {self.num_kept} weights as stored ({self.kept_formats})"
        if self.change is not None:
            text += f"; conversion changed a matrix by at most {self.change:.1e} of its RMS"
        for reason, names in self.skipped.items():
            text += f"; skipped {len(names)} ({reason})"
        return text


def fill(
    slots: Mapping[str, WeightSlot], plan: LoadPlan, *, progress: ShowProgress | None = None
) -> CheckpointReport:
    """Fill `slots` by `plan`. The plan may have been made for the same model on another device.

    The caller prepares the weights for their kernels afterwards. `progress` is called after each
    tensor. Raises `CheckpointError` for unreadable files, and for values that are NaN or infinite.
    """
    began = time.perf_counter()
    needed = [replace(move, slot=slots[move.slot.name]) for move in plan.needed]
    total = sum(move.num_bytes for move in needed)
    dequantized = [move for move in needed if move.is_dequantized]
    kept = [move for move in needed if move.slot.stored is move.slot.source.values]
    for reason in dict.fromkeys(move.slot.reason for move in dequantized):
        moves = [move for move in dequantized if move.slot.reason == reason]
        logger.info(
            "%d weights (%s, %s) are dequantized to the compute dtype, one at a time: %s",
            len(moves), _formats(moves), format_bytes(sum(move.num_bytes for move in moves)),
            reason,
        )  # fmt: skip
    quantized = [move for move in needed if move.is_quantized and move.is_of_values]
    if quantized:
        made = ", ".join(sorted({move.slot.source.name for move in quantized}))
        logger.info("%d weights are quantized to %s while they are read", len(quantized), made)
    unused = sum(t.role is Role.ACTIVATION for move in plan.moves for t, _ in move.tensors)
    if unused:
        logger.info(
            "%d activation scales are not used, because activations get their scales at run time",
            unused,
        )
    for reason, names in plan.skipped.items():
        logger.warning("skipped %d tensors: %s (%s)", len(names), reason, list_first(list(names)))
    done = 0
    check, change = FiniteCheck(), None
    pinned = any(move.slot.device is not None and move.slot.device.type != "cpu" for move in needed)
    in_pieces = [piece for move in needed for piece in move.split(PIECE_BYTES)]
    with CheckpointReader() as reader:
        for part in read_parts(reader, in_pieces, pinned=pinned):
            move = part.move
            written = move.slot.write_part(part.tensor, move.tensors[0][1].matrix)
            for scale in part.broken:
                check.add_scale(scale)
            # Check scales in host memory, because they are many small tensors, copied unchanged.
            stored = move.slot.stored
            looked_at = part.tensor if stored and stored.role is not Role.VALUES else written
            check.add(looked_at if part.plain is None else part.plain, *move.entries)
            if move.is_of_values and len(move.slot.shape) == 2:
                zeros = ZeroMatrix(move.entries[0], move.stored_format) if part.zeros else None
                check.add_matrix(move.slot.name, zeros)
            if part.change is not None:
                change = part.change if change is None else torch.maximum(change, part.change)
            done += move.num_bytes
            if progress:
                progress(done, total)
        check.finish(reader)
    return CheckpointReport(
        num_tensors=plan.num_tensors,
        num_bytes=total,
        num_dequantized=len(dequantized),
        num_kept=len(kept),
        dequantized_formats=_formats(dequantized),
        kept_formats=_formats(kept),
        change=None if change is None else math.sqrt(change.item()),
        skipped=plan.skipped,
        seconds=time.perf_counter() - began,
    )


def _formats(moves: Iterable[Move]) -> str:
    return ", ".join(sorted({move.slot.source.name for move in moves}))
