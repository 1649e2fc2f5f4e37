"""Cache of each rank's loaded parameters, before they are packed (`--weight-cache DIR`).

Each rank has one safetensors file, which it reads from start to end. The file contains the bytes of
the parameters in model order. The file's header contains a CRC-32 per chunk and a key (`_key`),
which identifies the source. CRC-32 detects damage by disks and transfers, and is several times as
fast as a cryptographic hash. If the key differs, the file is stale, and the rank loads the
checkpoint and replaces the file. A writer gives the file its final name when the file is complete.
"""

import errno
import fcntl
import glob
import json
import os
import secrets
import shutil
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from negamax.base import env
from negamax.base.log import get_logger
from negamax.base.progress import Progress, format_bytes
from negamax.checkpoint.identity import compute_identity, digest, find_commit
from negamax.checkpoint.reader import MAX_HEADER_BYTES, read_bytes
from negamax.layers.weights import WeightSlot
from negamax.parallel.layout import ParallelLayout

logger = get_logger(__name__)

CHUNK_BYTES = 32 * 2**20  # bytes of a chunk, which is read, checked and copied at once
READ_THREADS = 4
READ_AHEAD = 8  # maximum number of chunks that are read ahead, each into its own host buffer
_PAGE = 4096


class _UnusableError(Exception):
    """A cache file is stale, truncated or damaged."""


def load_cached(
    folder: Path,
    slots: Mapping[str, WeightSlot],
    *,
    checkpoint: Path,
    layout: ParallelLayout,
    load: Callable[[], str],
    show_progress: bool = False,
) -> str:
    """Fill a rank's `slots` from its cache file or by `load`. Return a line for the log.

    If the file is missing, stale or damaged, `load` fills the slots and the file is written. If the
    folder cannot be read or written, a warning is logged. Exceptions of `load` are not caught.
    """
    began = time.perf_counter()
    file = _CacheFile(
        path=folder / _name(checkpoint, layout),
        key=_key(slots, checkpoint, layout),
        blocks=_blocks(slots),
    )
    size = format_bytes(file.num_bytes)
    try:
        with Progress("reading weight cache", unit=format_bytes, enabled=show_progress) as progress:
            absent = file.read(progress)
    except FileNotFoundError:
        logger.info("weight cache %s does not exist yet; loading the checkpoint", file.path)
    except (_UnusableError, OSError) as error:
        logger.warning("weight cache %s: %s; loading the checkpoint", file.path, error)
    else:
        for slot in slots.values():
            if slot.needed and slot.name not in absent:
                slot.mark_written()
        seconds = time.perf_counter() - began
        return f"loaded weight cache {file.path} ({size}) in {seconds:.2f} s"
    summary = load()
    try:
        with Progress("writing weight cache", unit=format_bytes, enabled=show_progress) as progress:
            file.write([s.name for s in slots.values() if s.needed and not s.written], progress)
        logger.info("weight cache %s: %s written", file.path, size)
    except OSError as error:
        logger.warning("weight cache %s cannot be written: %s", file.path, error)
    return summary


def _name(checkpoint: Path, layout: ParallelLayout) -> str:
    """Return the name of a rank's file, which depends on the checkpoint and the layout."""
    checkpoint = checkpoint.resolve()
    if find_commit(checkpoint) is not None:
        model = checkpoint.parent.parent.name.removeprefix("models--")
    else:
        model = f"{checkpoint.name}-{zlib.crc32(str(checkpoint).encode()):08x}"
    partition = "-".join(map(str, layout.partition)) or None
    axes = {**asdict(layout), "partition": partition, "expert_placement": None}
    ranks = "-".join(f"{axis}{number}" for axis, number in axes.items() if number is not None)
    return f"{model}/{ranks}.safetensors"


def _key(
    slots: Mapping[str, WeightSlot], checkpoint: Path, layout: ParallelLayout
) -> dict[str, str]:
    """Return the fields of a cache key. If the file is stale, the log lists the changed fields."""
    needed = [slot for slot in slots.values() if slot.target is not None]
    formats = {slot.source.name + ("" if slot.stored is None else " as stored") for slot in needed}
    return {
        "checkpoint": compute_identity(checkpoint),
        "layout": str(layout),
        "dtype": ", ".join(sorted({str(slot.dtype) for slot in needed})),
        "format": ", ".join(sorted(formats)),
        "model": digest(_place(slot) for slot in needed),
        "version of Negamax": str(env.installed_version("negamax")),
    }


def _place(slot: WeightSlot) -> str:
    """Describe which part of a tensor fills `slot`, and the offset of `slot` in its parameter."""
    target, stored = slot.target, slot.stored
    assert target is not None
    return repr(
        (
            slot.name, slot.shape, slot.region, slot.source.name, stored and stored.name,
            target.dtype, target.shape, target.storage_offset(), target.stride(),
            target.untyped_storage().nbytes(),
        )
    )  # fmt: skip


def _blocks(slots: Mapping[str, WeightSlot]) -> dict[str, Tensor]:
    """Map the name of each parameter's first slot to the parameter's bytes ([bytes] uint8)."""
    blocks: dict[str, Tensor] = {}
    seen: set[int] = set()
    for slot in slots.values():
        storage = None if slot.target is None else slot.target.untyped_storage()
        if storage is not None and storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            blocks[slot.name] = torch.empty(0, dtype=torch.uint8, device=slot.device).set_(storage)
    return blocks


@dataclass(frozen=True)
class _CacheFile:
    path: Path
    key: Mapping[str, str]
    blocks: Mapping[str, Tensor]  # slot name -> memory of the slot, [bytes] uint8

    @property
    def num_bytes(self) -> int:
        return sum(len(block) for block in self.blocks.values())

    def read(self, progress: Progress) -> list[str]:
        """Fill `blocks` from the file. Return the names of slots that no tensor fills.

        Raises `_UnusableError` for a stale or damaged file, and `OSError` if reading fails.
        """
        with (
            self.path.open("rb", buffering=0) as stream,
            ThreadPoolExecutor(READ_THREADS, "negamax-load") as pool,
        ):
            at, absent, checksums = self._read_header(stream)
            start, buffers = at, self._buffers(READ_AHEAD)
            ahead: deque[tuple[Tensor, Tensor, Future[None]]] = deque()
            for number, chunk in enumerate(self._chunks()):
                if number >= READ_AHEAD:
                    _finish(*ahead.popleft())
                buffer = buffers[number % READ_AHEAD][: len(chunk)]
                checksum = checksums[8 * number : 8 * number + 8]
                read = pool.submit(_read_chunk, stream.fileno(), buffer, at, checksum)
                ahead.append((chunk, buffer, read))
                at += len(chunk)
                progress(at - start, self.num_bytes)
            while ahead:
                _finish(*ahead.popleft())
        return absent

    def write(self, absent: Sequence[str], progress: Progress) -> None:
        """Write `blocks` to the file. If writing fails, raise `OSError` and leave no file."""
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        self._remove_abandoned()
        self.path.unlink(missing_ok=True)  # first free the disk space of the stale file
        free = shutil.disk_usage(folder).free
        if free < self.num_bytes:
            needed = f"{format_bytes(self.num_bytes)} are needed, {format_bytes(free)} are free"
            raise OSError(errno.ENOSPC, needed, str(folder))
        part = self.path.with_name(f"{self.path.name}.{secrets.token_hex(8)}.part")
        with part.open("xb") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX)  # the file stays locked while its writer runs
                self._write(stream, absent, progress)
                part.replace(self.path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
        directory = os.open(folder, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)

    def _write(self, stream: BinaryIO, absent: Sequence[str], progress: Progress) -> None:
        checksums, done = [], 0
        size = stream.write(self._header(absent, "0" * 8 * sum(1 for _ in self._chunks())))
        (buffer,) = self._buffers(1)
        with ThreadPoolExecutor(1, "negamax-checksum") as pool:
            for chunk in self._chunks():
                held = buffer[: len(chunk)].copy_(chunk)
                checksum = pool.submit(_checksum, held)
                stream.write(memoryview(held.numpy()))
                checksums.append(checksum.result())
                progress(done := done + len(chunk), self.num_bytes)
        header = self._header(absent, "".join(checksums))
        assert len(header) == size
        stream.seek(0)
        stream.write(header)
        stream.flush()
        os.fsync(stream.fileno())

    def _chunks(self) -> Iterator[Tensor]:
        for block in self.blocks.values():
            yield from block.split(CHUNK_BYTES)

    def _buffers(self, count: int) -> list[Tensor]:
        """Allocate host buffers of one chunk each, in pinned memory if the weights go to a GPU."""
        size = max((len(chunk) for chunk in self._chunks()), default=0)
        is_pinned = any(block.is_cuda for block in self.blocks.values())
        return [torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(count)]

    def _header(self, absent: Sequence[str], checksums: str) -> bytes:
        """Build the header, with padding so that checksums do not change the header's length."""
        header: dict[str, Any] = {"__metadata__": {
            "key": json.dumps(self.key), "absent": json.dumps(absent), "checksums": checksums,
            "checksum": _checksum(f"{json.dumps(absent)}{checksums}".encode()),
        }}  # fmt: skip
        at = 0
        for name, block in self.blocks.items():
            offsets = [at, at := at + len(block)]
            header[name] = {"dtype": "U8", "shape": [len(block)], "data_offsets": offsets}
        text = json.dumps(header).encode()
        size = -(-(8 + len(text)) // _PAGE) * _PAGE - 8
        return struct.pack("<Q", size) + text.ljust(size)

    def _read_header(self, stream: FileIO) -> tuple[int, list[str], str]:
        """Return the byte at which data starts, the names of absent tensors and the checksums."""
        try:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > MAX_HEADER_BYTES:
                raise ValueError(size)
            text = stream.read(size)
            metadata = json.loads(text)["__metadata__"]
            found = json.loads(metadata["key"])
            absent, checksums = json.loads(metadata["absent"]), metadata["checksums"]
            others = [word for word, value in self.key.items() if found.get(word) != value]
            intact = others or self._header(absent, checksums)[8:] == text
        except (ValueError, KeyError, TypeError, AttributeError, struct.error):
            intact, others = False, []
        if others:
            raise _UnusableError(f"the file was written for another {', '.join(others)}")
        if not intact:
            raise _UnusableError("the header is damaged")
        if os.fstat(stream.fileno()).st_size != 8 + size + self.num_bytes:
            raise _UnusableError("the file is truncated")
        return 8 + size, absent, checksums

    def _remove_abandoned(self) -> None:
        for part in self.path.parent.glob(f"{glob.escape(self.path.name)}.*.part"):
            with suppress(OSError), part.open("rb") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()


def _read_chunk(fd: int, buffer: Tensor, at: int, checksum: str) -> None:
    """Fill `buffer` from byte `at` of a file. Raises `_UnusableError` if the checksum differs."""
    if read_bytes(buffer, fd, at) < len(buffer):
        raise _UnusableError("the file is truncated")
    if _checksum(buffer) != checksum:
        raise _UnusableError(f"the checksum of bytes {at} to {at + len(buffer) - 1} is wrong")


def _finish(chunk: Tensor, buffer: Tensor, read: Future[None]) -> None:
    """Wait until `read` has filled and checked `buffer`. Then copy `buffer` to `chunk`."""
    read.result()
    chunk.copy_(buffer)


def _checksum(data: Tensor | bytes) -> str:
    return f"{zlib.crc32(data if isinstance(data, bytes) else memoryview(data.numpy())):08x}"
