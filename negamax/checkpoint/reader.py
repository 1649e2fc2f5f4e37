"""Reader of safetensors checkpoints: find tensors, check file headers, read data.

The index file lists the weight files. Without an index, all files of the folder are read. The file
count in file names may be wrong: MiniMax-M2 has 125 files with names that end in "of-00130".
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
MAX_HEADER_BYTES = 100 * 10**6  # Size limit of headers in the safetensors format.
MAX_DIMENSIONS = 64  # Largest number of dimensions in PyTorch.
MAX_NAME_CHARS = 1024  # Length limit of tensor names, which messages contain.

_SHARD_OF = re.compile(r"-of-(\d+)\.safetensors$")

SAFETENSORS_NAMES = {
    "float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3",
    "int64": "I64", "int32": "I32", "int8": "I8", "uint8": "U8", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e8m0fnu": "F8_E8M0", "bool": "BOOL",
}  # fmt: skip
_UNUSED_NAMES = {
    "float64": "F64", "int16": "I16", "float8_e5m2": "F8_E5M2", "uint16": "U16", "uint32": "U32",
    "uint64": "U64",
}  # fmt: skip
# `DTYPES`: name in safetensors -> PyTorch dtype
DTYPES = {name: getattr(torch, own) for own, name in {**SAFETENSORS_NAMES, **_UNUSED_NAMES}.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor, as the header of its file describes it."""

    name: str
    file: Path
    dtype: str  # name of the dtype in safetensors, such as BF16 or F8_E4M3
    shape: tuple[int, ...]
    offset: int  # first byte of the values in the file
    num_bytes: int
    # The file stores this range of each dimension of the full tensor; None: the whole tensor.
    part: tuple[range, ...] | None = None

    @property
    def held(self) -> tuple[int, ...]:
        return self.shape if self.part is None else tuple(map(len, self.part))

    def translate(self, region: tuple[range, ...] | None) -> tuple[range, ...] | None:
        """Convert `region` of the tensor (None: all) to ranges within the part that the file has.

        Raises `CheckpointError` if the file does not contain the whole region.
        """
        if self.part is None:
            return region
        wanted = region or tuple(map(range, self.shape))
        for want, held in zip(wanted, self.part, strict=True):
            if want and not held.start <= want.start < want.stop <= held.stop:
                raise CheckpointError(
                    f"{self.file} holds {_span(held)} of {self.name}; {_span(want)} is needed",
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
    """A contiguous byte range of a file. The range contains a part of a tensor.

    Let d be the outermost dimension in which the part has more than one index. In d, the range
    covers the part's indices only. In the dimensions after d, the range covers all indices.
    """

    file: Path
    start: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]  # Shape of the values in the range of bytes.
    part: tuple[slice, ...]  # The requested part within `shape`; (): the whole shape.

    @staticmethod
    def of(entry: TensorEntry, region: tuple[range, ...] | None = None) -> "Span":
        """Compute the span of a region: a range per dimension, or None for the whole `entry`."""
        region, shape = entry.translate(region), entry.held
        dtype = DTYPES[entry.dtype]
        if region is None or not entry.num_bytes or tuple(map(len, region)) == shape:
            return Span(entry.file, entry.offset, entry.num_bytes, dtype, shape, ())
        # `cut`: first dimension in which the region does not have exactly one index
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
        """Return the requested part as a view of `data` ([bytes] uint8), the bytes of this span."""
        data = data[: self.num_bytes]
        if data.storage_offset() % self.dtype.itemsize:
            data = data.clone()
        whole = data.view(self.dtype).view(self.shape)
        return whole[self.part] if self.part else whole


class CheckpointReader(AbstractContextManager["CheckpointReader"]):
    """Reads files of a checkpoint from any thread. Each thread keeps one file open."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self._handles: set[FileIO] = set()  # open files of all threads

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.close()

    def read(self, entry: TensorEntry, region: tuple[range, ...] | None = None) -> Tensor:
        """Return `region` (a range per dimension; None: all) of `entry` as a tensor on the CPU.

        Raises `CheckpointError` if the file cannot be read.
        """
        span = Span.of(entry, region)
        data = torch.empty(span.num_bytes, dtype=torch.uint8)
        self.read_into(data, span.file, span.start)
        return span.view(data).contiguous()

    def read_into(self, data: Tensor, file: Path, start: int) -> None:
        """Fill `data` ([bytes] uint8, on the CPU) from byte `start` of `file`.

        Raises `CheckpointError` if the file cannot be read.
        """
        try:
            done = read_bytes(data, self._open(file).fileno(), start)
        except OSError as error:
            raise CheckpointError.of_file(file, error) from error
        if done < len(data):
            message = f"{file} cannot be read: the file ends at byte {start + done}"
            raise CheckpointError(message, hint=_AGAIN)

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


def read_bytes(data: Tensor, fd: int, start: int) -> int:
    """Fill `data` ([bytes] uint8, on the CPU) from byte `start` of an open file.

    Returns the number of bytes read, which is smaller than `len(data)` if the file ends early.
    """
    view, done = memoryview(data.numpy()), 0
    while done < len(view) and (count := os.preadv(fd, [view[done:]], start + done)):
        done += count
    return done


def read_entries(
    folder: Path, layout: ParallelLayout | None = None, *, progress: ShowProgress | None = None
) -> dict[str, TensorEntry]:
    """Return the tensors in `folder` by name. Every file header is read and checked.

    If the checkpoint is split for ranks, only tensors of the rank with `layout` are returned.
    `progress` is called after each file. Raises `CheckpointError` for a missing folder, index, file
    or tensor, and for truncated or malformed files.
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
    """Return the tensors in `file`. Raises `CheckpointError` if the header or size is invalid."""
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
                    f"{file} is truncated or not a safetensors file; it has {size} bytes",
                    hint=_AGAIN,
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
        raise CheckpointError(f"{file} has a malformed header: {error!r}", hint=_AGAIN) from error
    end = begin = 8 + header_bytes
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.num_bytes)):
        if entry.offset != end:
            raise CheckpointError(
                f"{file} has a malformed header: {entry.name} begins at byte "
                f"{entry.offset - begin} of the data; expected: {end - begin}",
                hint=_AGAIN,
            )
        end += entry.num_bytes
    if size != end:
        raise CheckpointError(
            f"{file} is truncated or damaged: it has {size} bytes, but its header declares {end}",
            hint=_AGAIN,
        )
    return entries


_AGAIN = "download the file again"


def _find_files(folder: Path, layout: ParallelLayout) -> tuple[list[Path], dict[str, str] | None]:
    """Return the weight files, and the map from tensor name to file name if there is an index."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder", hint="use the folder of a Hugging Face checkpoint"
        )
    index_path = folder / INDEX_NAME
    if is_split(folder):
        check_split(folder, layout)
        index_path = folder / RANK_INDEX_NAME.format(layout.rank)
    elif not index_path.exists():  # ModelSlim uses another name for the index
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
                f"{index_path} lists a file of another folder: {outside[0]!r}",
                hint="move all weight files into the folder of the index",
            )
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{index_path} lists {len(names)} files, of which {len(missing)} cannot be found: "
                f"{list_first(missing)}",
                hint="finish the download",
            )
        # If the index omits a file with the same "-of-N" ending, the index is stale.
        ends = {match[0] for match in map(_SHARD_OF.search, names) if match}
        forgotten = sorted(
            path.name
            for path in folder.glob("model-*.safetensors")
            if path.name not in names and path.name.endswith(tuple(ends))
        )
        if forgotten:
            raise CheckpointError(
                f"{index_path} lists {len(names)} files and omits files of the checkpoint: "
                f"{list_first(forgotten)}",
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
            hint = f"copy the {INDEX_NAME} of these files into the folder, or rename the files"
        elif found:
            hint = "use a checkpoint in the safetensors format; other formats are not supported"
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
            f"{len(missing)} tensors are not in the file that {INDEX_NAME} lists for them: "
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
    """Parse one item of a header. The file's data begins at byte `begin`.

    If the file contains only a part of the tensor, `whole` is the tensor's shape, and `start_in`
    contains the part's offset in each dimension.
    """
    if not name.isprintable() or len(name) > MAX_NAME_CHARS:  # error messages contain the name
        raise ValueError(f"a tensor name is too long or not printable: {name[:200]!a}")
    dtype, shape, (start, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    for found in (shape, whole or ()):
        if len(found) > MAX_DIMENSIONS:
            raise ValueError(f"{name} has {len(found)} dimensions; at most {MAX_DIMENSIONS}")
    if (
        not all(type(number) is int and 0 <= number < 2**63 for number in (*shape, start, end))
        or end < start
    ):
        raise ValueError(f"{name} has invalid shape {list(shape)} or byte range {start}-{end}")
    if dtype in DTYPES and end - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(
            f"{name} of shape {list(shape)} and dtype {dtype} cannot have {end - start} bytes"
        )
    part = None
    if whole is not None:
        part = tuple(range(at, at + size) for at, size in zip(start_in, shape, strict=True))
        if any(p.stop > size for p, size in zip(part, whole, strict=True)):
            raise ValueError(f"part {list(map(_span, part))} is outside of {name} {list(whole)}")
        shape = tuple(whole)
    return TensorEntry(name, file, str(dtype), shape, begin + start, end - start, part)


def describe_lost_files(files: Iterable[Path]) -> str | None:
    """Return a message if fewer than N files have names that end in "-of-N", else None.

    Some complete checkpoints also have fewer files than their names state.
    """
    names = {file.name for file in files}
    sizes = {int(match[1]) for match in map(_SHARD_OF.search, names) if match}
    if len(sizes) != 1 or len(names) >= max(sizes):
        return None
    return f"files are missing: there are {len(names)}, but their names end in -of-{max(sizes):05}"


def list_first(names: list[str]) -> str:
    """Return text with the first ten `names` and the number of further names."""
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
