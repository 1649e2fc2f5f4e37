"""Conversion of a checkpoint: one file per layer, one matrix in memory at a time.

An interrupted conversion can be resumed, and keeps its complete files. The conversion writes
config.json last, because a folder without config.json is not used as a checkpoint.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from negamax.base.errors import ConfigError, ResourceError
from negamax.base.log import get_logger
from negamax.base.progress import ShowProgress, format_bytes
from negamax.checkpoint.identity import compute_identity, find_commit
from negamax.checkpoint.reader import INDEX_NAME, list_first
from negamax.config.json_file import read_json_object
from negamax.config.quantization import PROVENANCE, rotation_file
from negamax.convert.layout import Piece, is_other_e4m3, pieces
from negamax.convert.neuron import file_name, neuron_pieces
from negamax.convert.shards import Shard, make_shards
from negamax.convert.source import Source, is_linear
from negamax.convert.targets import Target
from negamax.convert.threads import run_in_order
from negamax.convert.writer import ConversionRecord, Planned, TensorFile, differences, write_json
from negamax.formats.floats import PLAIN
from negamax.formats.tensor_format import TensorFormat
from negamax.models.minimax_m2 import config as minimax_m2
from negamax.models.minimax_names import VISION_MODULES
from negamax.models.registry import find_family, import_names, read_spec
from negamax.quantization.detect import detect

logger = get_logger(__name__)

# Files that are not copied, because they describe the stored weights of the source.
_NOT_CARRIED = (
    "config.json", "*.index.json", ConversionRecord.NAME, "hf_quant_config.json",
    "quant_model_description*",  # the description of ModelSlim
    "quantize_config.json", "quant_config.json", "quantization_config.json",  # GPTQ, AWQ, AutoRound
)  # fmt: skip
_CARRIED = (".json", ".jinja", ".txt", ".model")
_SPARE_BYTES = 64 * 2**20  # bytes of disk space for tokenizer, index and file system


@dataclass(frozen=True)
class Conversion:
    model: str  # Source folder or hub id, as the user wrote it.
    folder: Path  # Local folder of the source.
    destination: Path
    target: Target | None  # None keeps the formats of the source
    tp: int = 1
    ep: int = 1
    revision: str | None = None
    allow_lossy: bool = False
    version: str = ""
    command: str = ""

    def identity(self, source: Source) -> dict[str, Any]:
        """Return the inputs that determine the converted files. config.json stores the inputs."""
        return {
            "source": self.model,
            "revision": self.revision,
            "commit": find_commit(self.folder),
            "source_digest": compute_identity(self.folder),
            "source_formats": [stored.name for stored in source.formats] or ["plain"],
            "to": None if self.target is None else self.target.name,
            "tensor_parallel_size": self.tp,
            "expert_parallel_size": self.ep,
            # name of the copied file with QuaRot's rotation of the residual stream
            "rotation": rotation_file(source.config, self.folder),
            "version": self.version,
            "command": self.command,
        }


def convert(conversion: Conversion, *, progress: ShowProgress | None = None) -> Source:
    """Write the converted checkpoint, and return its source.

    Raises `ConfigError` if the conversion would round weights twice, if it would change nothing, or
    if the destination cannot be used. Raises `ResourceError` if the disk is too small, and
    `CheckpointError` if the source is damaged.
    """
    source = Source(conversion.folder)
    _check_path(source, conversion)
    identity = conversion.identity(source)
    destination = conversion.destination
    _check_place(conversion)
    others = _other_than_there(destination, identity)
    if others == []:
        Source(destination)  # raises an error if destination files are missing or truncated
        logger.info("%s already contains this conversion of the same source", destination)
        return source
    if others:
        raise ConfigError(
            f"DST {destination} contains another conversion (different: {', '.join(others)})",
            hint="remove the folder, or set another DST",
        )
    _check_content(destination)
    for reason in dict.fromkeys(reason for reason, _ in source.skipped):
        left = [name for why, name in source.skipped if why == reason]
        logger.warning("%d tensors are not copied: %s (%s)", len(left), list_first(left), reason)
    if source.has_vision and conversion.target is not None and conversion.target.is_neuron:
        logger.warning("the vision tower is not copied: the Neuron SDK reads only the text model")
    plan = _plan(source, conversion)
    destination.mkdir(parents=True, exist_ok=True)
    with _alone(destination), _disk_errors(destination):
        _run(plan, source, ConversionRecord(destination, identity), destination, progress)
        _write_indices(destination, plan)
        kept = source.spec.quantization if conversion.target is None else None
        _carry_files(conversion.folder, destination, description=kept and kept.source)
        if identity["rotation"] is not None:
            _carry_rotation(conversion.folder, destination, identity["rotation"])
        write_json(destination / "config.json", _config(source, conversion, identity))
        ConversionRecord(destination, identity).remove()
    return source


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock `folder`, or raise `ConfigError` if another process has locked it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigError(
            f"another process is converting to {folder}", hint="wait until that process ends"
        ) from None
    finally:
        os.close(handle)


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Raise `ResourceError` in place of an `OSError` that reports a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ResourceError(
            f"{folder} cannot be written: {error.strerror}",
            hint="free some space and run the command again (finished files are kept)",
        ) from error


@dataclass(frozen=True)
class _LayerStep:
    """The files of one layer, or of all tensors outside the layers. Each rank has one file."""

    layer: int | None  # layer number, or None for the tensors outside the layers
    pieces: list[Piece]
    files: list[tuple[Path, Shard]]

    @property
    def paths(self) -> list[Path]:
        return [path for path, _ in self.files]

    def planned(self, shard: Shard) -> list[Planned]:
        return [
            replace(planned, shape=tuple(map(len, held)))
            for piece in self.pieces
            for planned, held in shard.held(piece)
        ]

    def num_bytes(self, shard: Shard) -> int:
        return sum(planned.num_bytes for planned in self.planned(shard))


def _run(
    plan: list[_LayerStep],
    source: Source,
    record: ConversionRecord,
    destination: Path,
    progress: ShowProgress | None,
) -> None:
    """Write all files that the record does not list as complete."""
    finished = [step for step in plan if all(map(record.is_finished, step.paths))]
    _check_space(destination, [step for step in plan if step not in finished])
    if finished:
        logger.info("%d of %d layers are finished already", len(finished), len(plan))
    done, total = 0, sum(piece.source_bytes for step in plan for piece in step.pieces)
    for step in plan:
        if step in finished:
            done += sum(piece.source_bytes for piece in step.pieces)
            continue
        source.check_holes(step.layer)
        for piece in _write(step, source):
            done += piece.source_bytes
            if progress:
                progress(done, total)
        record.add(*step.paths)


def _plan(source: Source, conversion: Conversion) -> list[_LayerStep]:
    target, folder = conversion.target, conversion.destination
    neuron = target if target is not None and target.is_neuron else None
    if neuron and conversion.tp > 1:
        raise ConfigError(
            f"--to {neuron.name} does not support --tensor-parallel-size {conversion.tp}, because "
            f"the Neuron runtime splits the weights itself",
            hint="remove --tensor-parallel-size; to split the result for Negamax, convert the "
            "result a second time without --to",
        )
    quantization = source.spec.quantization if target is None else target.quantization
    shards = make_shards(source.spec, quantization, tp=conversion.tp, ep=conversion.ep)
    steps = []
    for number, layer in enumerate(source.layers):
        names = [shard.file_name(number, len(source.layers)) for shard in shards]
        names = [file_name(layer)] if neuron else names
        files = [(folder / name, shard) for name, shard in zip(names, shards, strict=True)]
        made = neuron_pieces(source, layer, neuron) if neuron else pieces(source, layer, target)
        steps.append(_LayerStep(layer, list(made), files))
    return steps


def _write(step: _LayerStep, source: Source) -> Iterator[Piece]:
    """Write the files of a step. Yield each piece when it is in all files."""
    with ExitStack() as stack:
        made_files = (
            TensorFile(path, step.planned(shard), shard.file_metadata(step.pieces))
            for path, shard in step.files
        )
        files = [stack.enter_context(file) for file in made_files]
        reader = stack.enter_context(source.reader())
        made = run_in_order(partial(piece.make, piece.read(reader)) for piece in step.pieces)
        for piece, tensors in zip(step.pieces, made, strict=True):
            for file, (_, shard) in zip(files, step.files, strict=True):
                for planned, held in shard.held(piece):
                    part = tuple(slice(each.start, each.stop) for each in held)
                    file.write(planned, tensors[planned.name][part])
            yield piece


# --- checks ---------------------------------------------------------------------------------------


def check_description(conversion: Conversion) -> None:
    """Check the config files of the source, before its weights are downloaded.

    Raises `ConfigError` if the checkpoint is not supported, or if the conversion would round its
    weights a second time.
    """
    spec = read_spec(read_json_object(conversion.folder / "config.json"), conversion.folder)
    if (scheme := detect(spec.quantization)) is not None:
        modules = (
            name.removesuffix(f".{PLAIN.values.name}")
            for weight in import_names(spec).weights(spec)
            for name in weight.names()
            if is_linear(weight, import_names(spec).layer_of(name))
        )
        _check_rounding({module: scheme.format_of(module) for module in modules}, conversion)


def _check_path(source: Source, conversion: Conversion) -> None:
    """Refuse a conversion that rounds weights twice or changes nothing. Raises `ConfigError`."""
    target, hint = conversion.target, "copy the folder, or add --allow-lossy to convert anyway"
    architecture = source.spec.architecture
    if target is not None and target.is_neuron and architecture != minimax_m2.ARCHITECTURE:
        raise ConfigError(
            f"--to {target.name} supports only MiniMax-M2; {conversion.model} is {architecture}",
            hint="choose another format for --to",
        )
    if conversion.allow_lossy:
        return
    sizes = [(rank.tp, rank.ep) for rank in source.ranks] or [(1, 1)]
    is_split_so = sizes[0] == (conversion.tp, conversion.ep)
    if target is None:
        if is_split_so:
            raise ConfigError(
                f"{conversion.model} is already split for --tensor-parallel-size {conversion.tp}, "
                f"so there is nothing to convert",
                hint=hint,
            )
        return
    scheme = target.scheme()
    if scheme is None:
        dtypes = {w.move.entries[0].dtype for w in source.weights if w.is_linear}
        is_same = not source.formats and dtypes == {"BF16"}
    else:
        is_same = all(
            scheme.format_of(one.module) == one.format and one.is_as_described
            for one in source.weights
            if one.is_linear
        )
    if is_same and is_split_so:
        raise ConfigError(
            f"{conversion.model} is already {target.name}: there is nothing to convert", hint=hint
        )
    _check_rounding(source.linear, conversion)


def _check_rounding(modules: Mapping[str, TensorFormat], conversion: Conversion) -> None:
    """Raise `ConfigError` if `modules` (name -> stored format) would be rounded a second time."""
    target = conversion.target
    scheme = None if target is None else target.scheme()
    if target is None or scheme is None or conversion.allow_lossy:
        return
    rounded = {
        stored.name
        for name, stored in modules.items()
        if stored not in (PLAIN, scheme.format_of(name))
        and scheme.format_of(name) is not PLAIN
        and not is_other_e4m3(stored, scheme.format_of(name))
    }
    if rounded:
        raise ConfigError(
            f"{conversion.model} is already quantized ({', '.join(sorted(rounded))}); --to "
            f"{target.name} would round the weights a second time and add a relative error of "
            f"about {target.error:.1%}",
            hint="convert from bf16 weights, or add --allow-lossy",
        )


def _check_place(conversion: Conversion) -> None:
    source, destination = conversion.folder.resolve(), conversion.destination.resolve()
    if destination == source or source in destination.parents:
        raise ConfigError(
            f"DST {conversion.destination} is inside the source {conversion.model}",
            hint="set DST to a folder outside of the source",
        )
    is_link = conversion.destination.is_symlink()  # `exists` is False for broken links
    if (destination.exists() or is_link) and not destination.is_dir():
        raise ConfigError(f"DST {conversion.destination} is not a folder", hint="use a folder")


def _check_content(destination: Path) -> None:
    """Raise `ConfigError` if `destination` contains anything except a partial conversion."""
    if destination.is_dir() and not (destination / ConversionRecord.NAME).exists():
        names = (path.name for path in destination.iterdir())
        # Allow a temporary record file, which an interrupted conversion may have left.
        found = sorted(name for name in names if not name.startswith(ConversionRecord.NAME))
        if found:
            raise ConfigError(
                f"DST {destination} contains unrelated files: {list_first(found)}",
                hint="set DST to a new or empty folder",
            )


def _check_space(destination: Path, plan: list[_LayerStep]) -> None:
    needed = sum(step.num_bytes(shard) for step in plan for _, shard in step.files)
    free = shutil.disk_usage(destination).free
    if needed + _SPARE_BYTES > free:
        raise ResourceError(
            f"{destination} needs {format_bytes(needed + _SPARE_BYTES)} of disk space; "
            f"{format_bytes(free)} are free",
            hint="free some space and run again (finished files are kept), or use another disk",
        )


def _other_than_there(destination: Path, identity: Mapping[str, Any]) -> list[str] | None:
    """Return the fields of `identity` that differ in the conversion in `destination`.

    Returns None if `destination` does not contain a complete conversion.
    """
    config, record = destination / "config.json", destination / ConversionRecord.NAME
    if not config.is_file() or record.exists():
        return None
    found = read_json_object(config).get(PROVENANCE)
    return None if found is None else differences(identity, found)


# --- index, config and other files ----------------------------------------------------------------


def _write_indices(destination: Path, plan: list[_LayerStep]) -> None:
    for number, (_, shard) in enumerate(plan[0].files):
        table = {
            planned.name: step.paths[number].name
            for step in plan
            for piece in step.pieces
            for planned in piece.tensors
        }
        metadata = {"total_size": sum(step.num_bytes(shard) for step in plan), **shard.metadata}
        write_json(destination / shard.index_name, {"metadata": metadata, "weight_map": table})


def _carry_files(folder: Path, destination: Path, *, description: str | None) -> None:
    """Copy tokenizer, chat template, generation config and licence.

    A file that describes stored weights is copied only if its name is `description`.
    """
    for path in sorted(folder.iterdir()):
        name = path.name
        is_text = path.suffix in _CARRIED or name.upper().startswith(("LICENSE", "NOTICE"))
        is_own = any(map(path.match, _NOT_CARRIED))
        is_kept = name == description and name not in ("config.json", INDEX_NAME)
        if path.is_file() and is_text and (is_kept or not is_own):
            shutil.copyfile(path, destination / path.name)


def _carry_rotation(folder: Path, destination: Path, name: str) -> None:
    if not (folder / name).is_file():
        logger.warning("%s is missing; the result cannot be served with a draft", folder / name)
        return
    (destination / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / name, destination / name)


def _config(source: Source, conversion: Conversion, identity: Mapping[str, Any]) -> dict[str, Any]:
    config = find_family(source.spec.architecture).own_config(source.config)
    config.pop("auto_map", None)  # this field refers to code files, which are not copied
    target = conversion.target
    kept = source.spec.quantization
    if target is None and kept is not None and kept.source == INDEX_NAME:
        config["quantization_config"] = {**kept.fields, "quant_method": kept.method}
    if target is not None:
        config.pop("quantization_config", None)
        if target.description is not None:
            config["quantization_config"] = dict(target.description)
        else:
            config["dtype"] = "bfloat16"
            if "torch_dtype" in config:
                config["torch_dtype"] = "bfloat16"
    if source.has_vision and not (target and target.is_neuron):
        config = _with_vision(source.config, config, is_same=target is None)
    config[PROVENANCE] = dict(identity)
    return config


def _with_vision(
    whole: Mapping[str, Any], text: dict[str, Any], *, is_same: bool
) -> dict[str, Any]:
    """Return `whole`, a vision-language model's config.json, with the text_config `text`.

    `is_same` is true if the conversion does not change the quantization.
    """
    quantization = text.pop("quantization_config", None)
    if is_same:
        quantization = whole.get("quantization_config") or quantization
    elif quantization is not None:  # add the vision tower to the unquantized modules
        for key, pattern in (("ignore", "re:.*{}.*"), ("modules_to_not_convert", "{}")):
            if key in quantization:
                tower = [pattern.format(module) for module in VISION_MODULES]
                quantization[key] = [*quantization[key], *tower]
    left = ("auto_map", "quantization_config")
    config = {key: value for key, value in whole.items() if key not in left}
    dtypes = {key: text[key] for key in ("dtype", "torch_dtype") if key in text and key in whole}
    quantized = {} if quantization is None else {"quantization_config": quantization}
    return {**config, **dtypes, "text_config": text, **quantized}
