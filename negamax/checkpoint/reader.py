"""Reader of safetensors checkpoints: find tensors, check file headers, read data.

The shard count in file names is not trusted: MiniMax-M2's files say "of 130", and there are 125.
The index names the files; without an index, the folder does.
"""

import json
import math
import os
import re
import struct
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.base.progress import ShowProgress
from negamax.checkpoint.split import PARTS_KEY, RANK_INDEX_NAME, check_split, is_split
from negamax.config.json_file import check_pointer, check_regular, read_json_object
from negamax.parallel.layout import ParallelLayout

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100 * 10**6  # limit of the format
MAX_DIMENSIONS = 64  # of PyTorch's tensors
MAX_NAME_CHARS = 1024  # messages show names

_SHARD_OF = re.compile(r"-of-(\d+)\.safetensors$")
_ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1,
}  # fmt: skip
SAFETENSORS_NAMES = {
    "float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3",
    "int64": "I64", "int32": "I32", "int8": "I8", "uint8": "U8", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e8m0fnu": "F8_E8M0", "bool": "BOOL",
}  # fmt: skip
_TORCH_NAMES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()} | {
    "F64": "float64", "I16": "int16", "F8_E5M2": "float8_e5m2",
    "U16": "uint16", "U32": "uint32", "U64": "uint64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as described by its file's header."""

    name: str
    file: Path
    dtype: str  # as safetensors spells it: BF16, F16, F32, F8_E4M3, ...
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int
    part: tuple[range, ...] | None = None  # the part of `shape` in the file; None: all

    @property
    def held(self) -> tuple[int, ...]:
        return self.shape if self.part is None else tuple(map(len, self.part))

    def translate(self, region: tuple[range, ...] | None) -> tuple[range, ...] | None:
        """Translate `region` of the tensor (None: all) into ranges of the file's part.

        Errors: `CheckpointError` if the file does not hold it.
        """
        if self.part is None:
            return region
        wanted = region or tuple(map(range, self.shape))
        for want, held in zip(wanted, self.part, strict=True):
            if want and not held.start <= want.start < want.stop <= held.stop:
                raise CheckpointError(
                    f"{self.file} holds {_span(held)} of {self.name}, and {_span(want)} are needed",
                    hint="convert the checkpoint again, for this number of ranks",
                )
        return tuple(
            range(want.start - held.start, want.stop - held.start)
            for want, held in zip(wanted, self.part, strict=True)
        )


def _span(part: range) -> str:
    return f"{part.start} to {part.stop - 1}" if part else "nothing"


@dataclass(frozen=True, slots=True)
class Span:
    """The contiguous bytes of a file that contain a part of a tensor, and the part's place in them.

    In the outermost dimension that the part narrows, only its range is read; inner dimensions are
    read in full.
    """

    file: Path
    start: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the tensor in the bytes
    part: tuple[slice, ...]

    @staticmethod
    def of(entry: TensorEntry, region: tuple[range, ...] | None = None) -> "Span":
        """Compute the span of `region` of `entry`: one range per dimension, None: all."""
        region, shape = entry.translate(region), entry.held
        dtype = getattr(torch, _TORCH_NAMES[entry.dtype])
        if region is None or not entry.num_bytes or tuple(map(len, region)) == shape:
            return Span(entry.file, entry.offset, entry.num_bytes, dtype, shape, ())
        # Dimensions before this one have one index each.
        cut = next((n for n, part in enumerate(region) if len(part) != 1), len(shape) - 1)
        inner = shape[cut + 1 :]
        first = 0
        for part, size in zip(region[: cut + 1], shape, strict=False):
            first = first * size + part.start
        unit = dtype.itemsize * math.prod(inner)
        return Span(
            entry.file,
            entry.offset + first * unit,
            len(region[cut]) * unit,
            dtype,
            (*(1 for _ in range(cut)), len(region[cut]), *inner),
            (
                *(slice(None) for _ in range(cut + 1)),
                *(slice(p.start, p.stop) for p in region[cut + 1 :]),
            ),
        )

    def view(self, data: Tensor) -> Tensor:
        """Return the part as a view of `data` ([bytes] uint8), read from byte `start`."""
        data = data[: self.num_bytes]
        if data.storage_offset() % self.dtype.itemsize:
            data = data.clone()
        whole = data.view(self.dtype).view(self.shape)
        return whole[self.part] if self.part else whole


class CheckpointReader(AbstractContextManager["CheckpointReader"]):
    """Reads files from any thread. Each thread keeps one file open."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self._handles: set[FileIO] = set()  # files of all threads

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.close()

    def read(self, entry: TensorEntry, region: tuple[range, ...] | None = None) -> Tensor:
        """Return the data of `entry` or of its part `region` (one range per dimension), on the CPU.

        Errors: `CheckpointError` if the file cannot be read.
        """
        span = Span.of(entry, region)
        data = torch.empty(span.num_bytes, dtype=torch.uint8)
        self.read_into(data, span.file, span.start)
        return span.view(data).contiguous()

    def read_into(self, data: Tensor, file: Path, start: int) -> None:
        """Fill `data` ([bytes] uint8, on the CPU) from byte `start` of `file`.

        Errors: `CheckpointError` if the file cannot be read.
        """
        view, done = memoryview(data.numpy()), 0
        try:
            handle = self._open(file)
            while done < len(view):
                count = os.preadv(handle.fileno(), [view[done:]], start + done)
                if not count:
                    raise EOFError(f"it ends at byte {start + done}")
                done += count
        except EOFError as error:
            raise CheckpointError(f"{file} cannot be read: {error}", hint=_AGAIN) from error
        except OSError as error:
            raise CheckpointError.of_file(file, error) from error

    def _open(self, file: Path) -> FileIO:
        if getattr(self._thread, "file", None) != file:
            if (handle := getattr(self._thread, "handle", None)) is not None:
                self._handles.discard(handle)
                handle.close()
            self._thread.handle = handle = file.open("rb", buffering=0)
            self._thread.file = file
            self._handles.add(handle)
        opened: FileIO = self._thread.handle
        return opened


def read_entries(
    folder: Path, layout: ParallelLayout | None = None, *, progress: ShowProgress | None = None
) -> dict[str, TensorEntry]:
    """Return the tensors in `folder` by name. Every header is checked; no data is read.

    Of a checkpoint that is split for ranks, only the tensors of the rank `layout` are read (None:
    the only one). `progress` is called after each file. Errors: `CheckpointError` for a missing
    folder, index, file or tensor, and for truncated or malformed files.
    """
    files, index = _find_files(folder, layout or ParallelLayout())
    entries: dict[str, TensorEntry] = {}
    for number, file in enumerate(files):
        for entry in read_header(file):
            if entry.name in entries:
                raise CheckpointError(
                    f"tensor {entry.name} is in two files: {entries[entry.name].file.name} and "
                    f"{file.name}",
                    hint=_AGAIN,
                )
            entries[entry.name] = entry
        if progress:
            progress(number + 1, len(files))
    if index is not None:
        _check_index(index, entries)
    return entries


def read_header(file: Path) -> list[TensorEntry]:
    """Return the tensors in the header of `file`. Errors: `CheckpointError` if it is malformed."""
    check_regular(file)
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(64)
            check_pointer(file, prefix)
            stream.seek(8)
            prefix = prefix[:8]
            header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{file} is not a safetensors file, or truncated: {size} bytes", hint=_AGAIN
                )
            header = json.loads(stream.read(header_bytes), object_pairs_hook=_no_duplicates)
        parts = json.loads((header.pop("__metadata__", None) or {}).get(PARTS_KEY, "{}"))
        entries = [
            _entry(file, name, value, *parts.get(name, ()), begin=8 + header_bytes)
            for name, value in header.items()
        ]
    except OSError as error:
        raise CheckpointError.of_file(file, error) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{file} has a header that cannot be read: {error!r}", hint=_AGAIN
        ) from error
    end = begin = 8 + header_bytes
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.num_bytes)):
        if entry.offset != end:
            raise CheckpointError(
                f"{file} has a header in which {entry.name} begins at byte {entry.offset - begin} "
                f"of the data and the tensor before it ends at {end - begin}",
                hint=_AGAIN,
            )
        end += entry.num_bytes
    if size != end:
        raise CheckpointError(
            f"{file} has {size} bytes and its header describes {end}: truncated or damaged",
            hint=_AGAIN,
        )
    return entries


_AGAIN = "download the file again"


def _find_files(folder: Path, layout: ParallelLayout) -> tuple[list[Path], dict[str, str] | None]:
    """Return the weight files and, if there is an index, its map of tensor name to file name."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder", hint="give the folder of a Hugging Face checkpoint"
        )
    index_path = folder / INDEX_NAME
    if is_split(folder):
        check_split(folder, layout)
        index_path = folder / RANK_INDEX_NAME.format(layout.rank)
    elif not index_path.exists():  # ModelSlim uses another name
        index_path = next(folder.glob("quant_model_weight*.index.json"), index_path)
    if index_path.exists():
        index = read_json_object(index_path).get("weight_map")
        if (
            not isinstance(index, dict)
            or not index
            or not all(isinstance(name, str) for name in index.values())
        ):
            raise CheckpointError(
                f"{index_path} has no weight_map from tensor names to file names", hint=_AGAIN
            )
        index = {name: file.removeprefix("./") for name, file in index.items()}
        names = sorted(set(index.values()))
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise CheckpointError(
                f"{index_path} names a file of another folder: {outside[0]!r}",
                hint="weights are read from files beside the index alone",
            )
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{index_path} names {len(names)} files of which {len(missing)} are missing: "
                f"{list_first(missing)}",
                hint="finish the download",
            )
        # The folder may hold other files, but no shards of the same set that the index omits.
        ends = {match[0] for match in map(_SHARD_OF.search, names) if match}
        forgotten = sorted(
            path.name
            for path in folder.glob("model-*.safetensors")
            if path.name not in names and path.name.endswith(tuple(ends))
        )
        if forgotten:
            raise CheckpointError(
                f"{index_path} names {len(names)} files; of the same set there are "
                f"{len(forgotten)} more: {list_first(forgotten)}",
                hint="download the index again",
            )
        return [folder / name for name in names], index
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME], None
    names = ("model-*.safetensors", "quant_model_weight*.safetensors")
    files = sorted(path for name in names for path in folder.glob(name))
    if not files:
        found = sorted(
            path.name
            for path in folder.iterdir()
            if path.suffix in (".bin", ".pt", ".pth", ".gguf", ".safetensors")
        )
        hint = "finish the download, or use --load-format synthetic"
        if any(name.endswith(".safetensors") for name in found):
            hint = f"copy {INDEX_NAME} of these files here, or give them such names"
        elif found:
            hint = "only safetensors weights are read"
        raise CheckpointError(
            f"{folder} has no model.safetensors, no {INDEX_NAME} and no model-*.safetensors"
            + (f"; it has {list_first(found)}" if found else ""),
            hint=hint,
        )
    return files, None


def _check_index(index: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> None:
    missing = [
        name
        for name, file in index.items()
        if name not in entries or entries[name].file.name != file
    ]
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors are not in the file that {INDEX_NAME} gives for them: "
            f"{list_first(missing)}",
            hint=_AGAIN,
        )
    surplus = [name for name in entries if name not in index]
    if surplus:
        raise CheckpointError(
            f"{len(surplus)} tensors are not in {INDEX_NAME}: {list_first(surplus)}", hint=_AGAIN
        )


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"{counts.most_common(1)[0][0][:MAX_NAME_CHARS]} occurs twice")
    return table


def _entry(
    file: Path,
    name: str,
    value: dict[str, Any],
    whole: Sequence[int] | None = None,
    start_in: Sequence[int] = (),
    *,
    begin: int,
) -> TensorEntry:
    """Parse one header item.

    `whole` is the shape of the tensor if the file holds only a part of it, which starts at
    `start_in`; `begin` is where the file's data begins.
    """
    if not name.isprintable() or len(name) > MAX_NAME_CHARS:  # messages show it
        raise ValueError(f"the name of a tensor is {name[:200]!a}")
    dtype, shape, (start, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    for found in (shape, whole or ()):
        if len(found) > MAX_DIMENSIONS:
            raise ValueError(f"{name} has {len(found)} dimensions; allowed: {MAX_DIMENSIONS}")
    if (
        not all(type(number) is int and 0 <= number < 2**63 for number in (*shape, start, end))
        or end < start
    ):
        raise ValueError(f"{name} has shape {list(shape)} at bytes {start} to {end}")
    if dtype in _ITEM_BYTES and end - start != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise ValueError(
            f"{name} of shape {list(shape)} and dtype {dtype} cannot have {end - start} bytes"
        )
    part = None
    if whole is not None:
        part = tuple(range(at, at + size) for at, size in zip(start_in, shape, strict=True))
        if any(p.stop > size for p, size in zip(part, whole, strict=True)):
            raise ValueError(f"{name} of shape {list(whole)} has no part {list(map(_span, part))}")
        shape = tuple(whole)
    return TensorEntry(name, file, str(dtype), shape, begin + start, end - start, part)


def describe_lost_files(files: Iterable[Path]) -> str | None:
    """Return how many files of the set exist if their names promise more; None if all do.

    Some published sets were never complete by their names.
    """
    names = {file.name for file in files}
    sizes = {int(match[1]) for match in map(_SHARD_OF.search, names) if match}
    if len(sizes) != 1 or len(names) >= max(sizes):
        return None
    return f"there are {len(names)} of the {max(sizes)} files in their names"


def list_first(names: list[str]) -> str:
    """Return the first ten of `names` and the number of the others."""
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
