"""Run chat templates, tokenizers and the image decoder in processes with limits.

Templates, tokenizers and images are not trusted, because they can take unlimited time or memory. A
process loads the template, the tokenizer or the decoder, and forks child processes
(`text.confined_process`). A child process answers one call at a time. The operating system ends a
child process that exceeds its limit of time or memory, and the caller receives an error.
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
ANSWER, ERROR = b"a", b"e"  # first byte of each message from a child process: result or error
IMAGE_DECODER = "image decoder"  # `kind` of calls that decode images
_IMAGE_SECONDS, _IMAGE_BYTES, _MOST_IMAGE_ANSWER = 8.0, 3 << 29, 48 << 20
_SLOWEST = 20.0  # wall-clock seconds that a call may take per allowed second of processor time
_MOST_MEMORY = min(4 << 30, env.main_memory() // 4)


def compute_limits(kind: str, num_bytes: int) -> tuple[float, int, int]:
    """Return a call's limits for processor seconds, bytes of memory and bytes of the answer.

    `num_bytes` is the size of the arguments. For each byte of dense text, tokenizing takes 2
    microseconds and 430 bytes of memory. Decoding the largest images takes 3 s and 1 GB.
    """
    if kind == IMAGE_DECODER:
        return _IMAGE_SECONDS, min(_IMAGE_BYTES, _MOST_MEMORY), _MOST_IMAGE_ANSWER
    memory = min((512 << 20) + 512 * num_bytes, _MOST_MEMORY)
    return 0.3 + 8.0 * num_bytes / 2**20, memory, (16 << 20) + 16 * num_bytes


def pack_error(error: NegamaxError) -> bytes:
    fields = {name: getattr(error, name) for name in ("message", "hint", "param", "code")}
    return ERROR + json.dumps(fields).encode()


def _ask(connection: Connection, job: bytes, *, seconds: float, most: int) -> bytes:
    """Send `job` and return the answer. Raises `OSError` or `EOFError` if no answer arrives."""
    connection.send_bytes(job)
    if not connection.poll(_SLOWEST * seconds):
        raise EOFError
    return connection.recv_bytes(most)


def _unpack(answer: bytes, failure: type[NegamaxError]) -> bytes:
    if answer.startswith(ERROR):
        raise failure(**json.loads(answer[1:]))
    return answer[1:]


class Confined:
    """A function that runs in processes with limits. Threads may share an object of this class."""

    def __init__(self, kind: str, *setup: Any, origin: str, has_secrets: bool = True) -> None:
        """`kind` and `setup` are the arguments of `confined_process.load`. `origin` is the name of
        the function in errors. Without `has_secrets`, processes get only harmless variables.
        """
        self._has_secrets = has_secrets
        self._setup = json.dumps([kind, *setup]).encode()
        self._kind, self._origin = kind, origin
        self._lock = threading.Lock()
        self._process: Supervised | None = None
        self._source: Connection  # connection to the process that forks children
        self._facts: Any = None
        self._idle: list[Connection] = []  # idle child processes; at most one per server thread

    def load(self) -> Any:
        """Start the process, and return a template's properties. Raises `CheckpointError`."""
        with self._lock:
            self._load()
            return self._facts

    def call(self, *arguments: object) -> bytes:
        """Call the function with JSON values, and return its answer.

        Raises `InvalidRequestError` if the function raises this error, or if the call exceeds a
        limit. Raises `CheckpointError` if loading fails.
        """
        try:
            job = json.dumps(arguments).encode()  # `dumps` escapes lone surrogates as ASCII
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"messages contain a non-JSON value: {error}") from None
        seconds, memory, most = compute_limits(self._kind, len(job))
        try:
            child = self._take()
            answer = _ask(child, job, seconds=seconds, most=most)
            self._idle.append(child)
        except (OSError, EOFError) as error:
            raise InvalidRequestError(
                f"the {self._kind} failed on this request, or used more than {seconds:.1f} s of "
                f"processor time or {memory >> 20} MiB of memory",
                hint=f"send {'other images' if self._kind == IMAGE_DECODER else 'a shorter text'}",
                code="template_limit",
            ) from error
        return _unpack(answer, InvalidRequestError)

    def _take(self) -> Connection:
        """Connect to an idle or new child process. Raises `OSError` or `CheckpointError`."""
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
                except OSError:  # the child process has ended; the next call starts a new one
                    self._process = None
                    raise
            return child

    def _load(self) -> int:
        """Start the process if it is not running, and return its process id."""
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
                    f"{self._origin} cannot be loaded within {LOAD_SECONDS:.0f} s and "
                    f"{LOAD_BYTES >> 20} MiB of memory",
                    hint="use another file or checkpoint",
                ) from error
            self._process = process
        return self._process.pid
