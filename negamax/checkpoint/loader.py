"""Loading a checkpoint into a model: every tensor goes to one place, every slot is filled once, or the start is refused.

All names, shapes and dtypes are checked from the files' headers before the first byte of data is read. Then the tensors are
read layer by layer, in file order, and one tensor is held at a time.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from negamax.base.errors import CheckpointError
from negamax.base.log import get_logger
from negamax.checkpoint.names import layer_of, place
from negamax.checkpoint.reader import CheckpointReader, TensorEntry, first_names, open_checkpoint
from negamax.config.model_spec import ModelSpec
from negamax.layers.weights import WeightSlot
from negamax.quantization.scheme import QuantScheme, detect

logger = get_logger(__name__)

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

PLAIN_DTYPES = ("BF16", "F16", "F32")
LOG_SECONDS = 5.0  # between progress lines
# Files in which other tools describe formats that no scheme reads yet.
_FOREIGN_QUANTIZATION = ("hf_quant_config.json", "quant_model_description.json")


class HasWeightSlots(Protocol):
    """What the loader needs of a model."""

    def weight_slots(self) -> Mapping[str, WeightSlot]:
        """The slots by checkpoint name."""
        ...


@dataclass(frozen=True)
class LoadReport:
    """What was loaded and what was left out."""

    num_tensors: int  # of the checkpoint, scales included, skipped ones not
    num_bytes: int  # read on this rank
    num_dequantized: int  # weights
    scheme: str | None  # the quantisation scheme of those
    skipped: Mapping[str, tuple[str, ...]]  # reason -> tensor names
    seconds: float

    def summary(self) -> str:
        """One line for the log."""
        text = f"loaded {self.num_tensors} tensors ({format_bytes(self.num_bytes)}) in {self.seconds:.2f} s"
        if self.num_dequantized:
            text += f", {self.num_dequantized} of them {self.scheme}, dequantised to the compute dtype"
        for reason, names in self.skipped.items():
            text += f"; skipped {len(names)} ({reason})"
        return text


@dataclass(frozen=True)
class _Move:
    """One weight on its way from the checkpoint to its slot."""

    slot: WeightSlot
    weight: TensorEntry
    scale: TensorEntry | None

    @property
    def num_bytes(self) -> int:
        return self.weight.num_bytes + (self.scale.num_bytes if self.scale else 0)


def load_weights(model: HasWeightSlots, spec: ModelSpec, folder: Path, *, progress: Progress | None = None) -> LoadReport:
    """Fill the slots of `model` from the safetensors files in `folder`. The caller packs the model afterwards.

    `progress` is called after each tensor; without it, a line is logged every few seconds.
    Errors: `CheckpointError` naming the files or tensors that are missing, unknown, surplus, mis-shaped or of a wrong dtype.
    """
    began = time.perf_counter()
    _refuse_foreign_quantization(folder, spec)
    scheme = detect(spec.quantization)
    slots = model.weight_slots()
    with open_checkpoint(folder) as reader:
        moves, skipped = _plan(reader.entries, slots, num_layers=spec.num_layers, scheme=scheme)
        needed = [move for move in moves if move.slot.needed]
        total = sum(move.num_bytes for move in needed)
        quantized = [move for move in needed if move.scale]
        if quantized and scheme:
            logger.info(
                "%d weights (%s) are stored as %s and are dequantised to the compute dtype, one at a time",
                len(quantized), format_bytes(sum(move.num_bytes for move in quantized)), scheme.name,
            )  # fmt: skip
        for reason, names in skipped.items():
            logger.warning("skipped %d tensors: %s (%s)", len(names), reason, first_names(list(names)))
        progress = progress or _log_progress()
        done = 0
        for move in needed:
            _write(reader, move, scheme=scheme)
            done += move.num_bytes
            progress(done, total)
    return LoadReport(
        num_tensors=sum(2 if move.scale else 1 for move in moves),
        num_bytes=total,
        num_dequantized=len(quantized),
        scheme=scheme.name if scheme else None,
        skipped=skipped,
        seconds=time.perf_counter() - began,
    )


def _plan(
    entries: Mapping[str, TensorEntry], slots: Mapping[str, WeightSlot], *, num_layers: int, scheme: QuantScheme | None
) -> tuple[list[_Move], dict[str, tuple[str, ...]]]:
    """Every tensor's way, in reading order, and the names that are skipped by reason."""
    found: dict[str, TensorEntry] = {}  # canonical name -> tensor
    skipped: dict[str, list[str]] = defaultdict(list)
    for name, entry in entries.items():
        placement = place(name, num_layers=num_layers)
        if placement.skip_reason:
            skipped[placement.skip_reason].append(name)
        elif placement.slot in found:
            raise CheckpointError(f"tensors {found[placement.slot].name} and {name} are the same weight, {placement.slot}")
        else:
            found[placement.slot] = entry

    moves: list[_Move] = []
    missing: list[str] = []
    for name, slot in slots.items():
        weight = found.pop(name, None)
        scale = found.pop(name + scheme.scale_suffix, None) if scheme else None
        if weight is None:
            missing.append(name)
        else:
            _check_tensor(weight, scale, slot, scheme=scheme)
            moves.append(_Move(slot, weight, scale))
    _refuse_names("are not part of this model", [entry.name for entry in found.values()])
    _refuse_names("are missing from the checkpoint", missing)
    moves.sort(key=lambda move: (layer_of(move.slot.name) or 0, str(move.weight.file), move.weight.offset))
    return moves, {reason: tuple(names) for reason, names in skipped.items()}


def _check_tensor(weight: TensorEntry, scale: TensorEntry | None, slot: WeightSlot, *, scheme: QuantScheme | None) -> None:
    _check_shape(weight, slot.shape)
    if scale is None or scheme is None:
        if scheme is not None and weight.dtype == scheme.value_dtype:
            raise CheckpointError(
                f"tensor {weight.name} has dtype {weight.dtype} and its scale {weight.name}{scheme.scale_suffix} is missing"
            )
        if weight.dtype not in PLAIN_DTYPES:
            raise CheckpointError(
                f"tensor {weight.name} has dtype {weight.dtype}; supported: {', '.join(PLAIN_DTYPES)}",
                hint=None if scheme else "config.json has no quantization_config that would explain another one",
            )
        return
    if weight.dtype != scheme.value_dtype or len(weight.shape) != 2:
        raise CheckpointError(
            f"tensor {weight.name} has a scale, dtype {weight.dtype} and shape {list(weight.shape)}; "
            f"a scale belongs to a matrix of {scheme.value_dtype}"
        )
    if scale.dtype != scheme.scale_dtype:
        raise CheckpointError(f"tensor {scale.name} has dtype {scale.dtype}; supported: {scheme.scale_dtype}")
    _check_shape(scale, scheme.scale_shape(*weight.shape))


def _check_shape(entry: TensorEntry, expected: tuple[int, ...]) -> None:
    if entry.shape != expected:
        raise CheckpointError(
            f"tensor {entry.name} has shape {list(entry.shape)}; config.json asks for {list(expected)}",
            hint="config.json and the weights are not of the same model",
        )


def _write(reader: CheckpointReader, move: _Move, *, scheme: QuantScheme | None) -> None:
    tensor = reader.read(move.weight)
    if move.scale is not None and scheme is not None:
        try:
            tensor = scheme.dequantize(tensor, reader.read(move.scale))
        except CheckpointError as error:
            raise CheckpointError(f"tensor {move.scale.name}: {error.message}", hint=error.hint) from error
    move.slot.write(tensor)


def _refuse_names(what: str, names: list[str]) -> None:
    if names:
        verb = f"{len(names)} tensors {what}" if len(names) > 1 else f"1 tensor {what}".replace(" are ", " is ")
        raise CheckpointError(f"{verb}: {first_names(names)}", hint="config.json and the weights are not of the same model")


def _refuse_foreign_quantization(folder: Path, spec: ModelSpec) -> None:
    for name in _FOREIGN_QUANTIZATION:
        if spec.quantization is None and (folder / name).exists():
            raise CheckpointError(
                f"{folder} is quantised in a format described by {name}, which is not supported yet",
                hint="use MiniMax's own FP8 checkpoint, or a BF16 one",
            )


def _log_progress() -> Progress:
    """A progress callback that logs a line every `LOG_SECONDS`."""
    last = time.monotonic()

    def log(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= LOG_SECONDS:
            last = time.monotonic()
            logger.info("weights: %s of %s", format_bytes(done), format_bytes(total))

    return log


def format_bytes(count: int) -> str:
    """`count` bytes with a unit, for people."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
