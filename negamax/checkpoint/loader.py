"""Loading a checkpoint into a model: every tensor goes to one place, every slot is filled once, or
the start is refused.

All names, shapes and dtypes are checked from the files' headers before the first byte of data is
read. Then the tensors are read layer by layer, in file order, one at a time, and of each only what
this rank keeps. A quantised weight goes into its slot as it is, and its scale into another, where
the model has a slot for the scale; else the weight is dequantised on the way.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.base.log import get_logger
from negamax.base.progress import format_bytes
from negamax.checkpoint.finite import FiniteCheck
from negamax.checkpoint.reader import CheckpointReader, TensorEntry, first_names, open_checkpoint
from negamax.config.model_spec import ModelSpec
from negamax.layers.weights import WeightSlot
from negamax.models.family import Names, names_of
from negamax.quantization.scheme import QuantScheme, detect

logger = get_logger(__name__)

ShowProgress = Callable[[int, int], None]  # (bytes done, bytes in all)

PLAIN_DTYPES = ("BF16", "F16", "F32")
READ_THREADS = 4  # that bring tensors into pinned memory
READ_AHEAD = 16  # tensors
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
    num_kept: int  # weights that stay as they are stored, with their scales
    scheme: str | None  # the quantisation scheme of both
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
                f", {self.num_dequantized} of them {self.scheme}, dequantised to the compute dtype"
            )
        if self.num_kept:
            text += f", {self.num_kept} of them weights kept as {self.scheme}"
        for reason, names in self.skipped.items():
            text += f"; skipped {len(names)} ({reason})"
        return text


@dataclass(frozen=True)
class _Move:
    """One tensor on its way from the checkpoint to its slot. With a `scale`, it is a weight to be
    dequantised by it.
    """

    slot: WeightSlot
    tensor: TensorEntry
    scale: TensorEntry | None = None
    is_scale: bool = False  # of the weight that goes before it

    @property
    def num_bytes(self) -> int:
        """Read on this rank."""
        if self.scale is not None:
            return self.tensor.num_bytes + self.scale.num_bytes
        kept = math.prod(len(part) for part in self.slot.region)
        return self.tensor.num_bytes * kept // max(1, math.prod(self.slot.shape))

    @property
    def num_tensors(self) -> int:
        return 2 if self.scale else 1


def load_weights(
    model: HasWeightSlots, spec: ModelSpec, folder: Path, *, progress: ShowProgress | None = None
) -> LoadReport:
    """Fill the slots of `model` from the safetensors files in `folder`. The caller packs the model
    afterwards.

    `progress` is called after each tensor.
    Errors: `CheckpointError` naming the files or tensors that are missing, unknown, surplus,
    mis-shaped, of a wrong dtype, or with values that are NaN or infinite.
    """
    began = time.perf_counter()
    _refuse_foreign_quantization(folder, spec)
    scheme = detect(spec.quantization)
    slots = model.weight_slots()
    with open_checkpoint(folder) as reader:
        moves, skipped = _plan(
            reader.entries, slots, names_of(spec), num_layers=spec.num_layers, scheme=scheme
        )
        needed = [move for move in moves if move.slot.needed]
        total = sum(move.num_bytes for move in needed)
        quantized = [move for move in needed if move.scale]
        if quantized and scheme:
            logger.info(
                "%d weights (%s) are stored as %s and are dequantised to the compute dtype, one "
                "at a time",
                len(quantized), format_bytes(sum(move.num_bytes for move in quantized)),
                scheme.name,
            )  # fmt: skip
        for reason, names in skipped.items():
            logger.warning(
                "skipped %d tensors: %s (%s)", len(names), reason, first_names(list(names))
            )
        done = 0
        check = FiniteCheck()
        for move, part in _parts(reader, needed, scheme=scheme):
            written = move.slot.write_part(part)
            # A GPU has many scales of a few numbers each; they are copied as they are.
            check.add(
                part if move.is_scale else written,
                move.tensor,
                *([move.scale] if move.scale else []),
            )
            done += move.num_bytes
            if progress:
                progress(done, total)
        check.finish(reader)
    return LoadReport(
        num_tensors=sum(move.num_tensors for move in moves),
        num_bytes=total,
        num_dequantized=len(quantized),
        num_kept=sum(move.is_scale for move in needed),
        scheme=scheme.name if scheme else None,
        skipped=skipped,
        seconds=time.perf_counter() - began,
    )


def _plan(
    entries: Mapping[str, TensorEntry],
    slots: Mapping[str, WeightSlot],
    names: Names,
    *,
    num_layers: int,
    scheme: QuantScheme | None,
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
    for name, slot in slots.items():
        if scheme and name.endswith(scheme.scale_suffix):
            continue  # goes with its weight
        scale_name = name + scheme.scale_suffix if scheme else ""
        weight, scale = found.pop(name, None), found.pop(scale_name, None)
        if weight is None:
            missing += [] if slot.optional else [name]
            continue
        _check_tensor(weight, scale, slot, scheme=scheme)
        scale_slot = slots.get(scale_name)
        if scale_slot is not None:
            if scale is None:
                raise CheckpointError(
                    f"tensor {weight.name} has dtype {weight.dtype} and no scale; by config.json "
                    f"it is quantised",
                    hint="modules_to_not_convert in quantization_config must name the modules "
                    "that are not",
                )
            moves += [_Move(slot, weight), _Move(scale_slot, scale, is_scale=True)]
        else:
            moves.append(_Move(slot, weight, scale))
    _refuse_layers(found, names, num_layers=num_layers)
    _refuse_names("are not part of this model", [entry.name for entry in found.values()])
    _refuse_names("are missing from the checkpoint", missing)
    moves.sort(
        key=lambda move: (
            names.layer_of(move.slot.name) or 0,
            str(move.tensor.file),
            move.tensor.offset,
        )
    )
    return moves, {reason: tuple(names) for reason, names in skipped.items()}


def _check_tensor(
    weight: TensorEntry, scale: TensorEntry | None, slot: WeightSlot, *, scheme: QuantScheme | None
) -> None:
    if not (slot.shape == () and weight.shape == (1,)):  # two spellings of one number
        _check_shape(weight, slot.shape)
    if scale is None or scheme is None:
        if scheme is not None and weight.dtype == scheme.value_dtype:
            raise CheckpointError(
                f"tensor {weight.name} has dtype {weight.dtype} and its scale "
                f"{weight.name}{scheme.scale_suffix} is missing"
            )
        if weight.dtype not in PLAIN_DTYPES:
            raise CheckpointError(
                f"tensor {weight.name} has dtype {weight.dtype}; supported: "
                f"{', '.join(PLAIN_DTYPES)}",
                hint=None
                if scheme
                else "config.json has no quantization_config that would explain another one",
            )
        return
    if weight.dtype != scheme.value_dtype or len(weight.shape) != 2:
        raise CheckpointError(
            f"tensor {weight.name} has a scale, dtype {weight.dtype} and shape "
            f"{list(weight.shape)}; "
            f"a scale belongs to a matrix of {scheme.value_dtype}"
        )
    if scale.dtype != scheme.scale_dtype:
        raise CheckpointError(
            f"tensor {scale.name} has dtype {scale.dtype}; supported: {scheme.scale_dtype}"
        )
    _check_shape(scale, scheme.scale_shape(*weight.shape))


def _check_shape(entry: TensorEntry, expected: tuple[int, ...]) -> None:
    if entry.shape != expected:
        raise CheckpointError(
            f"tensor {entry.name} has shape {list(entry.shape)}; config.json asks for "
            f"{list(expected)}",
            hint="config.json and the weights are not of the same model",
        )


def _parts(
    reader: CheckpointReader, moves: list[_Move], *, scheme: QuantScheme | None
) -> Iterator[tuple[_Move, Tensor]]:
    """What this rank keeps of each tensor, in order. On their way to a GPU, a few are brought into
    pinned memory ahead.
    """
    if all(move.slot.device is None or move.slot.device.type == "cpu" for move in moves):
        for move in moves:
            yield move, _read(reader, move, scheme=scheme)
        return
    with ThreadPoolExecutor(READ_THREADS, "negamax-load") as pool:
        ahead: deque[tuple[_Move, Future[Tensor]]] = deque()
        for move in moves:
            # `part` is a view of the mapped file: its pages are read in the thread that copies it.
            part = _read(reader, move, scheme=scheme)
            ahead.append((move, pool.submit(_pinned, part)))
            if len(ahead) > READ_AHEAD:
                first, pinned = ahead.popleft()
                yield first, pinned.result()
        for first, pinned in ahead:
            yield first, pinned.result()


def _read(reader: CheckpointReader, move: _Move, *, scheme: QuantScheme | None) -> Tensor:
    """What this rank keeps of a tensor."""
    if move.scale is None or scheme is None:
        part = reader.read(move.tensor, move.slot.region or None)
        return part.reshape([len(wanted) for wanted in move.slot.region])
    plain = scheme.dequantize(reader.read(move.tensor), reader.read(move.scale))
    return plain[tuple(slice(part.start, part.stop) for part in move.slot.region)]


def _pinned(part: Tensor) -> Tensor:
    """A copy in memory that a GPU can read by itself."""
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part)


def _refuse_names(what: str, names: list[str]) -> None:
    if names:
        verb = (
            f"{len(names)} tensors {what}"
            if len(names) > 1
            else f"1 tensor {what}".replace(" are ", " is ")
        )
        raise CheckpointError(
            f"{verb}: {first_names(names)}",
            hint="config.json and the weights are not of the same model",
        )


def _refuse_layers(found: Mapping[str, TensorEntry], names: Names, *, num_layers: int) -> None:
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


def _refuse_foreign_quantization(folder: Path, spec: ModelSpec) -> None:
    for name in _FOREIGN_QUANTIZATION:
        if spec.quantization is None and (folder / name).exists():
            raise CheckpointError(
                f"{folder} is quantised in a format described by {name}, which is not supported "
                f"yet",
                hint="use MiniMax's own FP8 checkpoint, or a BF16 one",
            )
