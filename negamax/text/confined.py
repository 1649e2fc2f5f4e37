"""Call a checkpoint's chat template and tokenizer, and the image decoder, in processes with limits
of time and memory.

Anybody may have written templates and images: they can loop, and allocate without end. One process
loads the template, the tokenizer or the decoder and forks children (`text.confined_process`). A
child answers one call at a time; the kernel ends it when it has used up a limit, and the call is
refused.
"""

import json
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

from negamax.base import env
from negamax.base.errors import CheckpointError, InvalidRequestError, NegamaxError
from negamax.base.supervision import Supervised

LOAD_SECONDS, LOAD_BYTES = 10.0, 2 << 30
ANSWER, ERROR = b"a", b"e"  # first bytes
IMAGE_DECODER = "image decoder"  # a kind
_IMAGE_SECONDS, _IMAGE_BYTES, _MOST_IMAGE_ANSWER = 8.0, 3 << 29, 48 << 20
_SLOWEST = 20.0  # elapsed seconds per second of processor time
_MOST_MEMORY = min(4 << 30, env.main_memory() // 4)


def compute_limits(kind: str, num_bytes: int) -> tuple[float, int, int]:
    """Return the limits of a call with `num_bytes`: processor seconds, bytes of memory, and bytes
    of the answer. Dense texts take 2 s per MiB to tokenize, and 430 bytes per byte; the largest
    images take 3 s and 1 GB.
    """
    if kind == IMAGE_DECODER:
        return _IMAGE_SECONDS, min(_IMAGE_BYTES, _MOST_MEMORY), _MOST_IMAGE_ANSWER
    memory = min((512 << 20) + 512 * num_bytes, _MOST_MEMORY)
    return 0.3 + 8.0 * num_bytes / 2**20, memory, (16 << 20) + 16 * num_bytes


def pack_error(error: NegamaxError) -> bytes:
    fields = {"message": error.message, "hint": error.hint, "param": error.param}
    return ERROR + json.dumps(fields).encode()


def _ask(connection: Connection, job: bytes, *, seconds: float, most: int) -> bytes:
    """Return the answer or the error as bytes. Errors: `OSError`, `EOFError`."""
    connection.send_bytes(job)
    if not connection.poll(_SLOWEST * seconds):
        raise EOFError
    return connection.recv_bytes(most)


def _unpack(answer: bytes, failure: type[NegamaxError]) -> bytes:
    if answer.startswith(ERROR):
        raise failure(**json.loads(answer[1:]))
    return answer[1:]


class Confined:
    """A template, a tokenizer or a decoder in processes with limits. Threads may share it."""

    def __init__(self, kind: str, *setup: Any, origin: str, has_secrets: bool = True) -> None:
        """`kind`, `setup`: as of `confined_process.load`; `origin` names it in messages;
        `has_secrets`: as of `supervision.spawn`.
        """
        self._has_secrets = has_secrets
        self._setup = json.dumps([kind, *setup]).encode()
        self._kind, self._origin = kind, origin
        self._lock = threading.Lock()
        self._process: Supervised | None = None
        self._source: Connection  # to the process, which forks
        self._facts: Any = None
        self._idle: list[Connection] = []  # one for each of the server's threads at most

    def load(self) -> Any:
        """Load it and return its facts. Errors: `CheckpointError`."""
        with self._lock:
            self._load()
            return self._facts

    def call(self, *arguments: object) -> bytes:
        """Call its function with JSON values.

        Errors: `InvalidRequestError` from the function and for a call that used up its limits,
        `CheckpointError` as of `load`.
        """
        try:
            job = json.dumps(arguments).encode()  # in ASCII: escaped texts hold lone surrogates
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"only JSON values can be rendered: {error}") from None
        seconds, memory, most = compute_limits(self._kind, len(job))
        try:
            child = self._take()
            answer = _ask(child, job, seconds=seconds, most=most)
            self._idle.append(child)
        except (OSError, EOFError) as error:
            raise InvalidRequestError(
                f"the {self._kind} failed on this request, or used more than {seconds:.1f} s of "
                f"processor time or {memory >> 20} MiB",
                hint=f"send {'other images' if self._kind == IMAGE_DECODER else 'a shorter text'}",
                code="template_limit",
            ) from error
        return _unpack(answer, InvalidRequestError)

    def _take(self) -> Connection:
        """Return the connection to an idle or a new child. Errors: `OSError`, `CheckpointError`."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            if self._process is not None and self._process.is_gone:
                self._process = None
            pid = self._load()
            child, theirs = Pipe()
            with theirs:
                try:
                    send_handle(self._source, theirs.fileno(), pid)
                except OSError:  # the process has ended; the next call starts another
                    self._process = None
                    raise
            return child

    def _load(self) -> int:
        """Start the process unless it runs. Return its id."""
        if self._process is None:
            self._source, theirs = Pipe()
            with theirs:
                fd = theirs.fileno()
                process = Supervised(
                    "negamax.text.confined_process", str(fd),
                    pass_fds=(fd,), has_secrets=self._has_secrets,
                )  # fmt: skip
            try:
                found = _ask(self._source, self._setup, seconds=LOAD_SECONDS, most=LOAD_BYTES)
                self._facts = json.loads(_unpack(found, CheckpointError))
            except (OSError, EOFError, CheckpointError) as error:
                process.kill()
                process.reap()
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(
                    f"{self._origin} cannot be loaded in {LOAD_SECONDS:.0f} s and "
                    f"{LOAD_BYTES >> 20} MiB",
                    hint="give another one",
                ) from error
            self._process = process
        return self._process.pid
