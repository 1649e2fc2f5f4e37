"""Store KV blocks of one rank in files, as a third cache level below host memory.

A file contains the data of one block in all caches of one rank. The folder's name is a fingerprint
of all settings that determine the content and layout of blocks. Engines and ranks with equal
settings share a folder. The file's name is the block's hash. The file's header has the fingerprint,
the hash, the length and a CRC-32 of the whole file. If a value in the header is wrong, the reader
deletes the file and reports a miss.

A file is written under a temporary name and then renamed, but not synced to the disk. Complete
files survive a process crash. After a power failure, the checksum detects incomplete files.

Two groups of threads read and write files while steps run. The scheduler limits the number of
pending copies. After the first I/O error, or after a minute in which no copy ends, the rank stops
using files. All later copies then end at once without effect.
"""

import hashlib
import os
import re
import secrets
import struct
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path

import msgspec
import numpy as np

from negamax.base import env
from negamax.base.errors import ConfigError
from negamax.base.log import get_logger
from negamax.checkpoint.identity import compute_identity
from negamax.kernels.registry import KernelTable
from negamax.scheduler.prefix_cache import HASH_BYTES
from negamax.scheduler.step import FileCopies, FileProgress
from negamax.worker.config import WorkerConfig

logger = get_logger(__name__)

READ_THREADS = 4
SCAN_SHARE = 16  # scan the folder after 1 / SCAN_SHARE of its maximum size has been written
STALL_SECONDS = 60.0  # files are no longer used if no pending copy ends within this time
MOST_FOUND = 1 << 18  # maximum number of files of earlier engines that are indexed at start
ABANDONED_SECONDS = 3600.0  # a temporary file of this age is deleted as abandoned
FINGERPRINT_BYTES = 16
_MAGIC = b"NMXKV01\n"
_HEADER = struct.Struct(f"<8s{FINGERPRINT_BYTES}s{HASH_BYTES}sQI")  # Q is the size, I the CRC-32
_FOLDER = re.compile(rf"[0-9a-f]{{{2 * FINGERPRINT_BYTES}}}")
_FILE = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")
_PART = ".part"

Ended = Callable[[], object]  # waits until copies of host blocks end


@dataclass(frozen=True)
class _FileBatch:
    """The reads or the writes of one plan."""

    step_id: int
    tasks: list[Future[bytes | None]]

    @property
    def is_done(self) -> bool:
        return all(task.done() for task in self.tasks)


@dataclass(frozen=True)
class _StoredFile:
    """A file of KV blocks in the shared folder, written by any engine."""

    used_at: float
    num_bytes: int
    path: Path


class FileStore:
    """Stores KV blocks. The worker's thread calls `run`. The result thread calls other methods."""

    def __init__(
        self,
        folder: Path,
        *,
        most_bytes: int,
        facts: Iterable[str],
        host: Sequence[np.ndarray],
        rank: int,
        sharing: int,
        cleans: bool,
    ) -> None:
        """`most_bytes`: maximum size of all files below `folder`. `facts`: settings that determine
        the content and layout of blocks. `host`: blocks in host memory, [blocks, bytes] uint8 for
        each kind of cache. `sharing`: number of ranks that each write a file per block. `cleans`:
        whether this rank deletes files beyond `most_bytes`. Raises `ConfigError` if the folder
        cannot be used.
        """
        self.file_bytes = _HEADER.size + sum(kind.shape[1] for kind in host)
        self.num_blocks = most_bytes // (sharing * self.file_bytes)
        self._root, self._most_bytes, self._cleans = folder, most_bytes, cleans
        self._fingerprint = hashlib.sha256("\n".join(facts).encode()).digest()[:FINGERPRINT_BYTES]
        self._folder = folder / self._fingerprint.hex()
        self._host, self._rank, self._sharing = host, rank, sharing
        self._part = f".{secrets.token_hex(8)}{_PART}"  # suffix of temporary files of this object
        if not self.num_blocks:
            raise ConfigError(
                f"--kv-offloading-path-size is {most_bytes / 2**30:.3g} GiB, which is less than "
                f"one KV block of {sharing * self.file_bytes / 2**20:.2f} MiB",
                hint=f"use {1.01 * sharing * self.file_bytes / 2**30:.3g} or more",
            )
        self._readers = ThreadPoolExecutor(READ_THREADS, "kv-read")
        self._writer = ThreadPoolExecutor(1, "kv-write")  # writes and deletes files in plan order
        self._reads: deque[_FileBatch] = deque()  # read batches whose end is not reported yet
        self._writes: deque[_FileBatch] = deque()
        self._read_step = self._written_step = -1
        self._active_at = 0.0  # monotonic time at which a file copy last ended
        self._is_off = False
        self._lock = threading.Lock()  # protects `_counts`
        self._counts = Counter[str]()  # field of `FileProgress` -> total since the start
        self._unscanned = 0  # bytes written since the last scan
        try:
            _make_private(self._folder)
            self.found = [bytes.fromhex(file.path.name) for file in self._clean()]
        except OSError as error:
            raise ConfigError(
                f"--kv-offloading-path {folder} cannot be used: {error.strerror}",
                hint="choose a folder that this user may write",
            ) from None

    def run(self, files: FileCopies, step_id: int, ended: Ended) -> None:
        """Start the file copies of a plan. Each copy first waits for earlier copies (`ended`)."""
        if not self.is_busy:
            self._active_at = time.monotonic()
        reads = zip(files.read_hashes, files.read_places, strict=True)
        tasks = [self._readers.submit(self._guard, self._read, *read, ended) for read in reads]
        if tasks:
            self._reads.append(_FileBatch(step_id, tasks))
        writes = zip(files.written_hashes, files.written_places, strict=True)
        tasks = [self._writer.submit(self._guard, self._write, *write, ended) for write in writes]
        if files.deletes_all:
            tasks.append(self._writer.submit(self._guard, self._delete_all))
        if tasks:
            self._writes.append(_FileBatch(step_id, tasks))
        if files.used_hashes:
            self._writer.submit(self._guard, self._touch, files.used_hashes)

    @property
    def is_busy(self) -> bool:
        """Whether some copies have not been reported yet."""
        return bool(self._reads or self._writes)

    @property
    def has_news(self) -> bool:
        """Whether some complete copies have not been reported yet."""
        return any(batches and batches[0].is_done for batches in (self._reads, self._writes))

    def report(self) -> FileProgress:
        """Return the progress, which must be sent, because each missing block is reported once."""
        missing: list[bytes] = []
        while self._reads and self._reads[0].is_done:
            batch = self._reads.popleft()
            self._read_step = batch.step_id
            missing += (lost for task in batch.tasks if (lost := task.result()) is not None)
        while self._writes and self._writes[0].is_done:
            self._written_step = self._writes.popleft().step_id
        if self.is_busy and time.monotonic() - self._active_at > STALL_SECONDS:
            self._switch_off(f"no copy has ended for {STALL_SECONDS:.0f} s")
        with self._lock:
            return FileProgress(
                self._rank,
                self._read_step,
                self._written_step,
                missing,
                self._is_off,
                **self._counts,
            )

    def close(self) -> None:
        """Wait for all copies. After `_switch_off`, do not wait, because a copy may never end."""
        for threads in (self._readers, self._writer):
            threads.shutdown(wait=not self._is_off, cancel_futures=self._is_off)

    def _guard(self, copy: Callable[..., bytes | None], *arguments: object) -> bytes | None:
        """Run a copy; if it fails, stop using files. If a read fails, return the block's hash."""
        try:
            if not self._is_off:
                return copy(*arguments)
        except Exception as error:
            reason = error.strerror if isinstance(error, OSError) else None
            self._switch_off(reason or repr(error))
        finally:
            self._active_at = time.monotonic()
        lost = arguments[0] if copy == self._read else None
        assert lost is None or isinstance(lost, bytes)
        return lost

    def _switch_off(self, reason: str) -> None:
        with self._lock:
            is_new, self._is_off = not self._is_off, True
            self._counts["num_errors"] += is_new
        if is_new:
            logger.warning(
                "rank %d: KV blocks are no longer kept in files in folder %s: %s",
                self._rank,
                self._root,
                reason,
            )

    def _read(self, block_hash: bytes, place: int, ended: Ended) -> bytes | None:
        """Read a file into a host block. Return `block_hash` if no intact file exists."""
        ended()
        path = self._folder / block_hash.hex()
        try:
            stream = path.open("rb", buffering=0)
        except FileNotFoundError:
            return block_hash
        with stream:
            header, views = bytearray(_HEADER.size), self._views(place)
            is_complete = all(_fill(stream, view) for view in (memoryview(header), *views))
            is_complete = is_complete and not stream.read(1)
        if is_complete and bytes(header) == self._header(block_hash, views):
            self._count("bytes_read", self.file_bytes)
            return None
        logger.warning("the KV block file %s is damaged; the worker deletes it", path)
        path.unlink(missing_ok=True)
        self._count("num_errors", 1)
        return block_hash

    def _write(self, block_hash: bytes, place: int, ended: Ended) -> None:
        ended()
        views = self._views(place)
        part = self._folder / f"{block_hash.hex()}{self._part}"
        try:
            with open(part, "wb", buffering=0, opener=_open_private) as stream:
                for view in (self._header(block_hash, views), *views):
                    done = 0
                    while done < len(view):
                        done += stream.write(view[done:])
            part.replace(self._folder / block_hash.hex())
        except OSError:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        self._count("bytes_written", self.file_bytes)
        self._unscanned += self._sharing * self.file_bytes
        if self._cleans and self._unscanned >= self._most_bytes // SCAN_SHARE:
            self._clean()

    def _views(self, place: int) -> list[memoryview]:
        return [memoryview(kind[place]) for kind in self._host]

    def _header(self, block_hash: bytes, views: list[memoryview]) -> bytes:
        fields = (_MAGIC, self._fingerprint, block_hash, self.file_bytes)
        checksum = zlib.crc32(_HEADER.pack(*fields, 0))
        for view in views:
            checksum = zlib.crc32(view, checksum)
        return _HEADER.pack(*fields, checksum)

    def _touch(self, hashes: list[bytes]) -> None:
        for block_hash in hashes:
            with suppress(FileNotFoundError):
                os.utime(self._folder / block_hash.hex())

    def _delete_all(self) -> None:
        for file in _scan(self._folder):
            file.path.unlink(missing_ok=True)

    def _clean(self) -> list[_StoredFile]:
        """If the files of all engines exceed their maximum size, delete the least recently used
        files. Return this rank's remaining files, the least recently used first.
        """
        folders = (each for each in os.scandir(self._root) if _is_own(each))
        files = sorted(
            (file for folder in folders for file in _scan(Path(folder.path))),
            key=lambda file: file.used_at,
        )
        total, most, now = sum(file.num_bytes for file in files), self._most_bytes, time.time()
        if total > most - most // SCAN_SHARE and self._cleans:
            most -= most // SCAN_SHARE  # leave room for files written before the next scan
        kept = []
        for file in files:
            is_part = file.path.name.endswith(_PART)
            is_surplus = now - file.used_at > ABANDONED_SECONDS if is_part else total > most
            if is_surplus and self._cleans:
                file.path.unlink(missing_ok=True)
                total -= file.num_bytes
                self._count("num_evicted", 1)
            elif file.path.parent == self._folder and not is_part:
                kept.append(file)
        self._unscanned = 0
        return kept[-min(self.num_blocks, MOST_FOUND) :]

    def _count(self, name: str, number: int) -> None:
        with self._lock:
            self._counts[name] += number


def open_files(
    config: WorkerConfig, kernels: KernelTable, host: Sequence[np.ndarray], *, dtype: str
) -> FileStore | None:
    """Open the files for this rank's host blocks `host`, with caches in `dtype`. Return None if
    `config` has no folder for files. Raises `ConfigError` if the folder cannot be used.
    """
    if config.kv_offloading_path is None:
        return None
    layout = config.layout
    group = [
        rank
        for rank in layout.ranks_of_node(layout.node)
        if layout.replace_rank(rank).dp_rank == layout.dp_rank
    ]
    return FileStore(
        Path(config.kv_offloading_path).expanduser(),
        most_bytes=int(config.kv_offloading_path_size * 2**30),
        facts=_list_facts(config, kernels, dtype=dtype),
        host=host,
        rank=layout.rank,
        sharing=len(group),
        cleans=layout.rank == group[0],
    )


def _list_facts(config: WorkerConfig, kernels: KernelTable, *, dtype: str) -> list[str]:
    """List all settings that determine content and layout of this rank's blocks. Ranks of different
    data-parallel replicas have equal settings if their shards are equal.
    """
    layout, draft = config.layout, config.draft
    folders = (config.folder, draft and draft.folder)
    weights = (compute_identity(Path(folder)) if folder else config.seed for folder in folders)
    sizes = (layout.tp, layout.ep, layout.dp, layout.pp, layout.cp, layout.dcp, layout.partition)
    return [
        f"Negamax {env.digest_code()}",
        *(_describe(spec) for spec in (config.spec, draft and draft.spec, config.speculation)),
        *map(str, weights),
        f"caches in {dtype}, index keys in {config.index_cache_dtype}",
        f"blocks of {config.block_size} tokens: {config.kv_caches}",
        f"{sizes}: rank {layout.pp_rank} {layout.cp_rank} {layout.tp_rank}",
        f"{config.device} {kernels.dtype}",
        kernels.describe(),
    ]


def _describe(value: object) -> str:
    return msgspec.json.encode(value, enc_hook=repr, order="deterministic").decode()


def _make_private(folder: Path) -> None:
    """Create a folder that only this user can read, as files have user data. Raises `OSError`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise PermissionError(1, "the folder belongs to another user")
    probe = folder / f"{secrets.token_hex(8)}{_PART}"
    probe.touch(mode=0o600)
    probe.unlink()


def _fill(stream: RawIOBase, view: memoryview) -> bool:
    """Read from a file until `view` is full. Return False if the file is too short."""
    done = 0
    while count := stream.readinto(view[done:]):
        done += count
    return done == len(view)


def _is_own(entry: os.DirEntry[str]) -> bool:
    """Whether a directory entry is a folder of KV blocks that belongs to this user."""
    is_named = entry.is_dir(follow_symlinks=False) and _FOLDER.fullmatch(entry.name) is not None
    return is_named and entry.stat(follow_symlinks=False).st_uid == os.getuid()


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _scan(folder: Path) -> Iterator[_StoredFile]:
    """Yield the files of a rank's folder, including temporary files."""
    for entry in os.scandir(folder):
        if _FILE.fullmatch(entry.name) or entry.name.endswith(_PART):
            with suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                yield _StoredFile(found.st_mtime, found.st_size, folder / entry.name)
