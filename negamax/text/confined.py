"""Call a checkpoint's chat template and tokenizer in processes with limits of time and memory.

Anybody may have written them: both can loop, and both can allocate without end. One process loads
the template or the tokenizer and forks children (`text.confined_process`). A child answers one call
at a time; the kernel ends it when it has used up a limit, and the call is refused.
"""

import json
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

from negamax.base import env
from negamax.base.errors import CheckpointError, InvalidRequestError
from negamax.base.supervision import Supervised

LOAD_SECONDS, LOAD_BYTES = 10.0, 2 << 30
JSON, BYTES, ERROR = b"j", b"b", b"e"  # kinds of answers, in the first byte
_SLOWEST = 20.0  # elapsed seconds per second of processor time
_MOST_MEMORY = min(4 << 30, env.main_memory() // 4)


def compute_limits(num_bytes: int) -> tuple[float, int, int]:
    """Return the limits of a call with `num_bytes`: processor seconds, bytes of memory, and bytes
    of the answer. Dense texts take 2 s per MiB to tokenize, and 430 bytes per byte.
    """
    memory = min((512 << 20) + 512 * num_bytes, _MOST_MEMORY)
    return 1.0 + 8.0 * num_bytes / 2**20, memory, (16 << 20) + 16 * num_bytes


def pack(*values: object) -> bytes:
    """Return JSON values in ASCII: escaped texts hold lone surrogates."""
    return json.dumps(values).encode()


def _ask(connection: Connection, job: bytes, *, seconds: float, most: int) -> tuple[bytes, bytes]:
    """Return kind and content of the answer. Errors: `OSError`, `EOFError`."""
    connection.send_bytes(job)
    if not connection.poll(_SLOWEST * seconds):
        raise EOFError
    answer = connection.recv_bytes(most)
    return answer[:1], answer[1:]


class Confined:
    """A template or a tokenizer in processes with limits. Threads may share it."""

    def __init__(self, kind: str, *setup: Any, origin: str) -> None:
        """`kind`, `setup`: as of `confined_process.load`; `origin` names it in messages."""
        self._setup = pack(kind, *setup)
        self._kind, self._origin = kind, origin
        self._lock = threading.Lock()
        self._source: Connection | None = None  # to the process that forks
        self._process: Supervised | None = None
        self._facts: Any = None
        self._idle: list[Connection] = []  # one for each of the server's threads at most

    def load(self) -> Any:
        """Load it and return its facts. Errors: `CheckpointError`."""
        with self._lock:
            self._load()
            return self._facts

    def call(self, function: str, *arguments: object) -> Any:
        """Call `function` with JSON values; return a JSON value or bytes.

        Errors: `InvalidRequestError` from the function and for a call that used up its limits,
        `CheckpointError` as of `load`.
        """
        try:
            job = pack(function, *arguments)
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"only JSON values can be rendered: {error}") from None
        seconds, memory, most = compute_limits(len(job))
        try:
            child = self._take()
            kind, data = _ask(child, job, seconds=seconds, most=most)
            self._idle.append(child)
        except (OSError, EOFError) as error:
            raise InvalidRequestError(
                f"the {self._kind} failed on this request, or used more than {seconds:.0f} s of "
                f"processor time or {memory >> 20} MiB",
                hint="shorten or reword the request",
                code="template_limit",
            ) from error
        if kind == ERROR:
            message, hint, param = json.loads(data)
            raise InvalidRequestError(message, hint=hint, param=param)
        return data if kind == BYTES else json.loads(data)

    def _take(self) -> Connection:
        """Return the connection to an idle or a new child. Errors: `OSError`, `CheckpointError`."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            source, process = self._load()
            child, theirs = Pipe()
            try:
                send_handle(source, theirs.fileno(), process.pid)
            except OSError:  # the process has ended; the next call starts another
                self._source = None
                raise
            finally:
                theirs.close()
            return child

    def _load(self) -> tuple[Connection, Supervised]:
        if self._source is not None and self._process is not None:
            return self._source, self._process
        source, theirs = Pipe()
        fd = theirs.fileno()
        process = Supervised(
            "negamax.text.confined_process", str(fd), pass_fds=(fd,), has_secrets=False
        )
        theirs.close()
        try:
            kind, data = _ask(source, self._setup, seconds=LOAD_SECONDS, most=LOAD_BYTES)
        except (OSError, EOFError):
            limits = f"{LOAD_SECONDS:.0f} s and {LOAD_BYTES >> 20} MiB"
            found = f"{self._origin} cannot be loaded in {limits}"
            kind, data = ERROR, pack(found, "give another one", None)
        if kind == ERROR:
            process.kill()
            process.reap()
            message, hint, _ = json.loads(data)
            raise CheckpointError(message, hint=hint)
        self._source, self._process, self._facts = source, process, json.loads(data)
        return source, process
