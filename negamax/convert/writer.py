"""Writer of safetensors files, piece by piece, and the record of complete files.

All offsets are known before the first tensor is computed, so only one matrix has to be in memory. A
file gets its final name when it is complete on disk.
"""

import json
import math
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from negamax.base.errors import CheckpointError
from negamax.base.unicode import valid_unicode
from negamax.checkpoint.reader import SAFETENSORS_NAMES, read_header
from negamax.config.json_file import read_json_object

_CHUNK_BYTES = 2**24
_ALIGNMENT = 8  # alignment in bytes of the first tensor in a file


@dataclass(frozen=True)
class Planned:
    """A tensor that a new file will contain, or one entry of a stacked tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    count: int = 0  # Number of entries in the stack; 0: not stacked.
    index: int = 0  # Index of this entry in the stack.

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class TensorFile(AbstractContextManager["TensorFile"]):
    """A safetensors file of `tensors`. Call `write` once per tensor, in any order.

    The file is renamed to `path` when the context ends without an error.
    """

    def __init__(self, path: Path, tensors: Sequence[Planned], metadata: Mapping[str, str]) -> None:
        self.path = path
        self._partial = path.with_name(f"{path.name}.partial")
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
        self._places: dict[tuple[str, int], tuple[int, Planned]] = {}
        offset = 0
        # Tensors with larger elements are first, so each tensor is aligned to its element size.
        for tensor in sorted(tensors, key=lambda one: (-one.dtype.itemsize, one.name, one.index)):
            place = tensor.name, tensor.index
            assert place not in self._places, f"{tensor.name} twice in {path.name}"
            self._places[place] = offset, tensor
            if not tensor.index:
                shape = (tensor.count, *tensor.shape) if tensor.count else tensor.shape
                header[tensor.name] = {
                    "dtype": SAFETENSORS_NAMES[str(tensor.dtype).removeprefix("torch.")],
                    "shape": shape,
                    "data_offsets": [offset, offset + tensor.num_bytes * max(1, tensor.count)],
                }
            offset += tensor.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._data = 8 + len(text)
        self.num_bytes = self._data + offset
        self._file = self._partial.open("wb")
        self._file.write(struct.pack("<Q", len(text)) + text)

    def write(self, planned: Planned, tensor: Tensor) -> None:
        offset, expected = self._places.pop((planned.name, planned.index))
        found = tensor.dtype, tuple(tensor.shape)
        assert found == (expected.dtype, expected.shape), planned.name
        self._file.seek(self._data + offset)
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._file.write(memoryview(raw))

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            self._file.close()
            return
        assert not self._places, f"{len(self._places)} tensors of {self.path.name} not written"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.replace(self.path)
        _sync_folder(self.path.parent)


class ConversionRecord:
    """Sizes and CRC-32 of complete files in `folder`, which a resumed conversion keeps."""

    NAME = "negamax_conversion.json"

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        """Read or start the record. `identity` describes source and target of the conversion.

        Raises `CheckpointError` if the folder contains a part of another conversion.
        """
        self._path = folder / self.NAME
        self._identity = dict(identity)
        self._files: dict[str, list[int]] = {}  # file name -> [bytes, CRC-32] of each complete file
        if not self._path.exists():
            self._write()
            return
        found = read_json_object(self._path)
        others = differences(self._identity, found.get("conversion"))
        if others:
            raise CheckpointError(
                f"{folder} contains another conversion (different: {', '.join(others)})",
                hint="remove the folder, or set another DST",
            )
        self._files = found["files"]

    def is_finished(self, path: Path) -> bool:
        """Return whether `path` still has the size, header and CRC-32 of the written file."""
        expected = self._files.get(path.name)
        if expected is None or not path.is_file() or path.stat().st_size != expected[0]:
            return False
        try:
            read_header(path)
        except CheckpointError:
            return False
        return _crc(path) == expected[1]

    def add(self, *paths: Path) -> None:
        for path in paths:
            self._files[path.name] = [path.stat().st_size, _crc(path)]
        self._write()

    def _write(self) -> None:
        write_json(self._path, {"conversion": self._identity, "files": self._files})

    def remove(self) -> None:
        """Delete the record file, whose absence shows that the conversion is complete."""
        self._path.unlink(missing_ok=True)


def differences(identity: Mapping[str, Any], found: object) -> list[str]:
    """Return the fields of `identity` that differ in `found`.

    Command, revision and source name are ignored, because a digest identifies the source.
    """
    if not isinstance(found, Mapping):
        return list(identity)
    names = ("command", "revision", "source")
    return [key for key, value in identity.items() if key not in names and found.get(key) != value]


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON to `path`, and replace an existing file atomically."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(valid_unicode(json.dumps(value, indent=2, ensure_ascii=False)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    _sync_folder(path.parent)


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
