"""Call a checkpoint's chat template and tokenizer in processes with limits of time and memory.

Anybody may have written them: both can loop, and both can allocate without end. One process loads
the template or the tokenizer and forks children (`text.confined_process`). A child answers one call
at a time; the kernel ends it when it has used up a limit, and the call is refused.
"""

import contextlib
import functools
import json
import socket
import struct
import threading
from typing import Any

from negamax.base import env
from negamax.base.errors import CheckpointError, InvalidRequestError, OverloadedError
from negamax.base.supervision import Supervised

LOAD_SECONDS, LOAD_BYTES = 10.0, 2 << 30
_MAX_CHILDREN = 8  # calls at a time
_PATIENCE_SECONDS = 60.0  # for a child to become free
_SLOWEST = 20.0  # elapsed seconds per second of processor time
_HEADER = struct.Struct("<cQ")  # kind and bytes of a frame

JSON, TEXT, BYTES, ERROR = b"j", b"t", b"b", b"e"  # kinds of frames


def compute_limits(num_bytes: int) -> tuple[float, int, int]:
    """Return the limits of a call with `num_bytes`: processor seconds, bytes of memory, and bytes
    of the answer. Dense texts take 2 s per MiB to tokenize, and 430 bytes per byte.
    """
    memory = min((512 << 20) + 512 * num_bytes, _most_memory())
    return 1.0 + 8.0 * num_bytes / 2**20, memory, (16 << 20) + 16 * num_bytes


@functools.cache
def _most_memory() -> int:
    return min(4 << 30, env.main_memory() // 4)


def pack(value: object) -> bytes:
    """Return a JSON value in ASCII: escaped texts hold lone surrogates."""
    return json.dumps(value).encode()


def send(connection: socket.socket, kind: bytes, data: bytes) -> None:
    connection.sendall(_HEADER.pack(kind, len(data)))
    connection.sendall(data)


def receive(connection: socket.socket, *, most: int) -> tuple[bytes, bytearray]:
    """Return kind and content of a frame. Errors: `EOFError` at the end, and for a frame of more
    than `most` bytes.
    """
    kind, size = _HEADER.unpack(_read(connection, _HEADER.size))
    if size > most:
        raise EOFError(f"{size} bytes")
    return kind, _read(connection, size)


def _read(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = connection.recv_into(view[done:])
        if not count:
            raise EOFError
        done += count
    return data


class Confined:
    """A template or a tokenizer in processes with limits. Threads may share it."""

    def __init__(self, kind: str, *setup: Any, origin: str) -> None:
        """`kind`, `setup`: as of `confined_process.load`; `origin` names it in messages."""
        self._setup = pack([kind, *setup])
        self._kind, self._origin = kind, origin
        self._lock = threading.Lock()
        self._source: socket.socket | None = None  # of the process that forks
        self._process: Supervised | None = None
        self._facts: Any = None
        self._idle: list[socket.socket] = []
        self._turns = threading.BoundedSemaphore(_MAX_CHILDREN)

    def load(self) -> Any:
        """Load it and return its facts. Errors: `CheckpointError`."""
        with self._lock:
            return self._load()

    def call(self, function: str, *arguments: object) -> Any:
        """Call `function` with JSON values; return a number, a text or bytes.

        Errors: `InvalidRequestError` from the function and for a call that used up its limits,
        `OverloadedError` if no child becomes free, `CheckpointError` as of `load`.
        """
        try:
            job = pack([function, *arguments])
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"only JSON values can be rendered: {error}") from None
        seconds, memory, most = compute_limits(len(job))
        if not self._turns.acquire(timeout=_PATIENCE_SECONDS):
            raise OverloadedError(f"{_MAX_CHILDREN} other requests occupy the {self._kind}")
        try:
            child = self._take()
            try:
                child.settimeout(_SLOWEST * seconds)
                send(child, JSON, job)
                kind, data = receive(child, most=most)
            except (OSError, EOFError) as error:
                child.close()
                raise InvalidRequestError(
                    f"the {self._kind} failed on this request, or used more than {seconds:.0f} s "
                    f"of processor time or {memory >> 20} MiB",
                    hint="shorten or reword the request",
                    code="template_limit",
                ) from error
            with self._lock:
                self._idle.append(child)
        finally:
            self._turns.release()
        if kind == ERROR:
            message, hint, param = json.loads(data)
            raise InvalidRequestError(message, hint=hint, param=param)
        if kind == TEXT:
            return data.decode("utf-8", "surrogatepass")
        return json.loads(data) if kind == JSON else bytes(data)

    def _load(self) -> Any:
        if self._source is not None:
            return self._facts
        source, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            self._process = Supervised(
                "negamax.text.confined_process", str(number), pass_fds=(number,)
            )
        try:
            source.settimeout(_SLOWEST * LOAD_SECONDS)
            send(source, JSON, self._setup)
            kind, data = receive(source, most=LOAD_BYTES)
        except (OSError, EOFError):
            source.close()
            self._process.kill()
            self._process.reap()
            raise CheckpointError(
                f"{self._origin} cannot be loaded in {LOAD_SECONDS:.0f} s and {LOAD_BYTES >> 20} "
                f"MiB",
                hint="give another one",
            ) from None
        if kind == ERROR:
            source.close()
            self._process.reap()
            message, hint, _ = json.loads(data)
            raise CheckpointError(message, hint=hint)
        self._source, self._facts = source, json.loads(data)
        return self._facts

    def _take(self) -> socket.socket:
        """Return the connection to an idle or a new child."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            for _ in range(2):
                self._load()
                assert self._source is not None
                child, theirs = socket.socketpair()
                with theirs, contextlib.suppress(OSError):
                    socket.send_fds(self._source, [b"f"], [theirs.fileno()])
                    return child
                self._source.close()  # the process has ended
                self._source = None
            raise CheckpointError(f"the process of {self._origin} ends at once")
