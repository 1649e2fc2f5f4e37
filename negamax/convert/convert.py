"""Converting a checkpoint: a file per layer, one matrix in memory at a time.

A conversion that was cut off is taken up again: files that are whole are kept. config.json comes
last, so that no folder without it is taken for a checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from negamax.base.errors import ConfigError, ResourceError
from negamax.base.log import get_logger
from negamax.base.progress import format_bytes
from negamax.checkpoint.reader import INDEX_NAME, CheckpointReader, first_names
from negamax.config.json_file import read_json_object
from negamax.convert.layout import Piece, pieces
from negamax.convert.source import Source
from negamax.convert.targets import Target
from negamax.convert.threads import in_order
from negamax.convert.writer import Record, TensorFile, differences, write_json

logger = get_logger(__name__)

PROVENANCE = "negamax_conversion"  # the key in config.json
# What describes the stored weights of the source alone.
_NOT_CARRIED = ("config.json", INDEX_NAME, "hf_quant_config.json", Record.NAME)
_NOT_CARRIED_PREFIX = "quant_model_description"
_CARRIED = (".json", ".jinja", ".txt", ".model")
_SPARE_BYTES = 64 * 2**20  # of disk: tokenizer, index, the file system's own

ShowProgress = Callable[[int, int], None]  # (bytes of the source done, in all)


@dataclass(frozen=True)
class Conversion:
    """What is asked for. `target` None: the format stays."""

    model: str  # as the user names it
    folder: Path  # where it lies
    destination: Path
    target: Target | None
    revision: str | None = None
    allow_lossy: bool = False
    version: str = ""
    command: str = ""

    def identity(self, source: Source) -> dict[str, Any]:
        """What the result depends on, for config.json."""
        return {
            "source": self.model,
            "revision": self.revision,
            "source_digest": source.digest,
            "source_formats": [stored.name for stored in source.formats] or ["plain"],
            "to": None if self.target is None else self.target.name,
            "version": self.version,
            "command": self.command,
        }


def convert(conversion: Conversion, *, progress: ShowProgress | None = None) -> Source:
    """Write the converted checkpoint; returns the source.

    Errors: `ConfigError` for a path that loses precision or is pointless, unless allowed, and for a
    destination that will not do; `ResourceError` for too little disk space; those of a load.
    """
    source = Source(conversion.folder)
    check_path(source, conversion)
    identity = conversion.identity(source)
    destination = conversion.destination
    if _is_done(destination, identity):
        logger.info("%s is there already, converted from the same source", destination)
        return source
    _check_destination(conversion)
    for reason, names in source.skipped.items():
        logger.warning(
            "%d tensors are left out: %s (%s)", len(names), first_names(list(names)), reason
        )
    layers = list(source.layers)
    plan = {
        destination / f"model-{number:05d}-of-{len(layers):05d}.safetensors": list(
            pieces(source, layer, conversion.target)
        )
        for number, layer in enumerate(layers)
    }
    destination.mkdir(parents=True, exist_ok=True)
    record = Record(destination, identity)
    done, total = 0, sum(piece.source_bytes for those in plan.values() for piece in those)
    finished = {path for path in plan if record.is_finished(path)}
    _check_space(destination, [those for path, those in plan.items() if path not in finished])
    if finished:
        logger.info("%d of %d files are finished and kept", len(finished), len(plan))
    for path, those in plan.items():
        if path in finished:
            done += sum(piece.source_bytes for piece in those)
            continue
        for piece in _write_file(path, those):
            done += piece.source_bytes
            if progress:
                progress(done, total)
        record.add(path)
    _write_index(destination, plan)
    _carry_files(conversion.folder, destination)
    write_json(destination / "config.json", _config(source, conversion, identity))
    record.remove()
    return source


def _write_file(path: Path, those: Sequence[Piece]) -> Iterator[Piece]:
    """One file, piece by piece; what is mapped of the source is let go of with it."""
    planned = [tensor for piece in those for tensor in piece.tensors]
    with TensorFile(path, planned, {}) as file, CheckpointReader() as reader:
        made = in_order(partial(piece.make, piece.read(reader)) for piece in those)
        for piece, tensors in zip(those, made, strict=True):
            for name, tensor in tensors.items():
                file.write(name, tensor)
            yield piece


# --- what is refused ------------------------------------------------------------------------------


def check_path(source: Source, conversion: Conversion) -> None:
    """Errors: `ConfigError` for a conversion that loses more than its target must, or changes
    nothing.
    """
    target = conversion.target
    if target is None or conversion.allow_lossy:
        return
    stored = source.formats
    scheme = target.scheme()
    names = ", ".join(one.name for one in stored) or "plain"
    if scheme is None:
        dtypes = {w.move.entries[0].dtype for w in source.weights if w.is_linear}
        is_same = not stored and dtypes == {"BF16"}
    else:
        linear = [weight for weight in source.weights if weight.is_linear]
        is_same = all(scheme.format_of(weight.module) is weight.format for weight in linear)
    if is_same:
        raise ConfigError(
            f"{conversion.model} is stored as {target.name} already; there is nothing to convert",
            hint="copy the folder, or add --allow-lossy to write it again, a file per layer",
        )
    if stored and scheme is not None:
        raise ConfigError(
            f"{conversion.model} is quantised already ({names}); --to {target.name} rounds it a "
            f"second time, with a relative error of about {target.error:.1%} beside what it has",
            hint="convert from bf16 weights, or add --allow-lossy",
        )


def _check_destination(conversion: Conversion) -> None:
    source, destination = conversion.folder.resolve(), conversion.destination.resolve()
    if destination == source or source in destination.parents:
        raise ConfigError(
            f"DST {conversion.destination} lies in the source {conversion.model}",
            hint="give a folder outside of it",
        )
    if destination.exists() and not destination.is_dir():
        raise ConfigError(f"DST {conversion.destination} is a file", hint="give a folder")
    if destination.is_dir() and not (destination / Record.NAME).exists():
        found = sorted(path.name for path in destination.iterdir())
        if found:
            raise ConfigError(
                f"DST {conversion.destination} has other content: {first_names(found)}",
                hint="give a new or an empty folder",
            )


def _check_space(destination: Path, plan: list[list[Piece]]) -> None:
    needed = sum(tensor.num_bytes for those in plan for piece in those for tensor in piece.tensors)
    free = shutil.disk_usage(destination).free
    if needed + _SPARE_BYTES > free:
        raise ResourceError(
            f"{destination} needs {format_bytes(needed + _SPARE_BYTES)} of disk, "
            f"{format_bytes(free)} are free",
            hint="free some space or give a DST on another disk; finished files are kept",
        )


def _is_done(destination: Path, identity: Mapping[str, Any]) -> bool:
    """Whether the same conversion is complete there."""
    if not (destination / "config.json").is_file() or (destination / Record.NAME).exists():
        return False
    config = read_json_object(destination / "config.json")
    return not differences(identity, config.get(PROVENANCE))


# --- beside the weights ---------------------------------------------------------------------------


def _write_index(destination: Path, plan: Mapping[Path, list[Piece]]) -> None:
    table = {
        tensor.name: path.name
        for path, those in plan.items()
        for piece in those
        for tensor in piece.tensors
    }
    size = sum(t.num_bytes for those in plan.values() for piece in those for t in piece.tensors)
    write_json(destination / INDEX_NAME, {"metadata": {"total_size": size}, "weight_map": table})


def _carry_files(folder: Path, destination: Path) -> None:
    """Tokenizer, chat template, generation config, licence."""
    for path in sorted(folder.iterdir()):
        is_text = path.suffix in _CARRIED or path.name.upper().startswith(("LICENSE", "NOTICE"))
        is_own = path.name in _NOT_CARRIED or path.name.startswith(_NOT_CARRIED_PREFIX)
        if path.is_file() and is_text and not is_own:
            shutil.copyfile(path, destination / path.name)


def _config(source: Source, conversion: Conversion, identity: Mapping[str, Any]) -> dict[str, Any]:
    config = dict(source.config)
    target = conversion.target
    if target is not None:
        config.pop("quantization_config", None)
        if target.description is not None:
            config["quantization_config"] = dict(target.description)
        else:
            config["dtype"] = "bfloat16"
            if "torch_dtype" in config:
                config["torch_dtype"] = "bfloat16"
    config[PROVENANCE] = dict(identity)
    return config
