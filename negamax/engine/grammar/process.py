"""Compile grammars and compute masks in grammar processes, which the engine starts.

The compiler can take minutes and gigabytes for a small grammar, can crash, and cannot be
interrupted. The host process loads the compiler and forks the grammar processes. One forked process
handles most grammars. Each worker compiles one risky grammar, with low priority and a memory limit.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import threading
import time
import warnings
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from negamax.base import env, log
from negamax.base.errors import InvalidRequestError
from negamax.base.imports import large_imports
from negamax.base.log import get_logger
from negamax.base.supervision import exit_now, exit_with_parent
from negamax.engine.grammar import wire
from negamax.engine.grammar.masks import Mask, allows
from negamax.models.registry import CALL_STYLES, TOKEN_TAGS
from negamax.text.grammar.budget import Budget
from negamax.text.grammar.structural_tag import structural_tag
from negamax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import xgrammar

    from negamax.text.grammar.matcher import GrammarCompiler, GrammarMatcher

logger = get_logger(__name__)

MAX_THREADS = 64  # More threads than cores, because some threads may hang.
SLOW_SECONDS = 0.02  # Longest computation of a mask for which the engine can wait.
MEMORY_SHARE = 1 / 4  # Each process, except workers, may use this fraction of main memory.
WORKER_BYTES = 2 << 30  # Memory limit of a worker process, in bytes.
WORKER_NICENESS = 5
POLL_MS = 2  # Time between two checks whether threads have finished work.
FRAME_BYTES = 65536  # Size limit of a message to the host process.
BEAT_SECONDS = 0.5  # Time between heartbeats while threads work.

_NOT_INSTALLED = "structured output needs the package xgrammar, which cannot be imported here"


@dataclass
class _Job:
    spec: wire.GrammarSpec
    takes_risks: bool
    keys: list[int]  # Outputs that wait for the grammar.
    started: float | None = None  # Start of the compilation in monotonic seconds.
    compiled: xgrammar.CompiledGrammar | None = None
    problem: str | None = None
    is_risky: bool = False  # Whether the grammar needs a worker process.

    @property
    def is_done(self) -> bool:
        return self.compiled is not None or self.problem is not None or self.is_risky

    def run(self, compiler: GrammarCompiler) -> None:
        self.started = time.monotonic()
        if not self.keys:
            self.problem = "no request waits for the grammar"
            return
        budget = Budget()
        try:
            tag = structural_tag(*self.spec, CALL_STYLES, budget)
            self.is_risky = budget.is_risky and not self.takes_risks
            self.compiled = None if self.is_risky else compiler.compile(tag)
        except InvalidRequestError as error:
            self.problem = str(error)
        except Exception as error:
            logger.warning("a grammar cannot be compiled: %r", error)
            self.problem = f"the grammar cannot be compiled: {error!r}"


@dataclass
class _FollowedOutput:
    """One output with a grammar. A turn computes one mask. Turns of one output do not overlap."""

    key: int
    compiled: xgrammar.CompiledGrammar
    matcher: GrammarMatcher | None = None  # The first turn creates the matcher.
    # `waiting`: output parts and draft tokens that later turns will process.
    waiting: deque[tuple[list[wire.Part], list[int]]] = field(default_factory=deque)
    has_turn: bool = False
    turn_started: float | None = None  # Start of the turn, in monotonic seconds.
    is_slow: bool = False  # Whether the last turn took longer than SLOW_SECONDS.
    is_open: bool = False  # Whether the engine has the mask of the output's first token.


class GrammarServer:
    """Serves one engine in one thread. Other threads compute masks."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        setup: wire.Setup,
        compiler: GrammarCompiler | None,
        *,
        is_worker: bool = False,
    ) -> None:
        self._socket = socket
        self._setup = setup
        self._compiler = compiler
        self._is_worker = is_worker
        self._sent = time.monotonic()
        self._no_drafts_from = 0.0  # Monotonic second after which no mask for drafts is begun.
        self._jobs: dict[wire.GrammarSpec, _Job] = {}
        self._streams: dict[int, _FollowedOutput] = {}
        self._taken: deque[tuple[_FollowedOutput, wire.NextMask]] = deque()  # Unsent answers.
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="grammar")
        self._send(wire.Beat())

    @property
    def _is_busy(self) -> bool:
        return bool(self._jobs) or any(stream.has_turn for stream in self._streams.values())

    def serve(self) -> None:
        while True:
            if self._socket.poll(POLL_MS if self._is_busy else None):
                frame = self._socket.recv()
                if not frame:
                    return
                self._handle(wire.to_grammars.decode(frame))
            self._collect()
            self._end_slow_turns()
            for spec in [spec for spec, job in self._jobs.items() if self._is_over(job)]:
                self._answer(self._jobs.pop(spec))
            if self._is_busy and time.monotonic() - self._sent > BEAT_SECONDS:
                self._send(wire.Beat())

    def _handle(self, message: wire.ToGrammars) -> None:
        match message:
            case wire.OpenGrammar():
                self._open(message)
            case wire.AdvanceGrammars():
                self._advance(message)
            case wire.CloseGrammars():
                for key in message.keys:
                    self._streams.pop(key, None)
                for job in self._jobs.values():
                    job.keys = [key for key in job.keys if key not in message.keys]

    def _open(self, message: wire.OpenGrammar) -> None:
        compiler = self._compiler
        if compiler is None:
            self._send(wire.GrammarRefused(message.key, _NOT_INSTALLED))
            return
        spec = (message.grammar, message.reasoning)
        if spec in self._jobs:
            self._jobs[spec].keys.append(message.key)
        else:
            job = self._jobs[spec] = _Job(spec, self._is_worker, [message.key])
            self._threads.submit(job.run, compiler)

    def _is_over(self, job: _Job) -> bool:
        limit = self._setup.compile_seconds
        is_late = job.started is not None and time.monotonic() - job.started > limit
        return job.is_done or is_late

    def _answer(self, job: _Job) -> None:
        if job.compiled is not None:
            for key in job.keys:
                stream = self._streams[key] = _FollowedOutput(key, job.compiled)
                self._take_turn(stream)
        elif job.is_risky:
            self._send(wire.GrammarIsRisky(job.keys))
        else:
            slow = f"the grammar takes longer than {self._setup.compile_seconds:g} s to compile"
            for key in job.keys:
                self._refuse(key, job.problem or slow, is_timeout=job.problem is None)

    def _advance(self, message: wire.AdvanceGrammars) -> None:
        self._no_drafts_from = time.monotonic() + self._setup.draft_seconds
        together: deque[tuple[_FollowedOutput, list[wire.Part], list[int]]] = deque()
        for key, parts, drafts in message.parts:
            stream = self._streams.get(key)
            if stream is None:
                continue  # The engine has closed this output.
            stream.waiting.append((parts, drafts))
            if stream.has_turn or stream.is_slow:
                self._take_turn(stream)
            else:
                stream.has_turn, stream.turn_started = True, None
                together.append((stream, *stream.waiting.popleft()))
        if together:
            self._take_turns(together)
        self._collect()

    def _take_turns(self, turns: deque[tuple[_FollowedOutput, list[wire.Part], list[int]]]) -> None:
        """Compute several masks per thread, because a thread switch costs more than a fast mask."""
        total = len(turns)
        over: list[None] = []
        all_over = threading.Event()

        def work() -> None:
            while turns:
                with suppress(IndexError):  # Another thread took the last turn.
                    self._turn(*turns.popleft())
                    over.append(None)
            if len(over) == total:
                all_over.set()

        for _ in range(min(self._setup.num_threads, total)):
            self._threads.submit(work)
        if not all_over.wait(SLOW_SECONDS):
            with suppress(IndexError):
                while True:  # After SLOW_SECONDS, other threads compute the remaining masks.
                    self._threads.submit(self._turn, *turns.popleft())

    def _take_turn(self, stream: _FollowedOutput) -> None:
        """Let a thread compute the next mask of output `stream` if no thread is computing it."""
        if stream.has_turn:
            return
        stream.has_turn, stream.turn_started = True, None
        parts, drafts = stream.waiting.popleft() if stream.waiting else ([], [])
        self._threads.submit(self._turn, stream, parts, [] if stream.is_slow else drafts)

    def _turn(self, stream: _FollowedOutput, parts: list[wire.Part], drafts: list[int]) -> None:
        started = stream.turn_started = time.monotonic()
        try:
            answer = self._next_mask(stream, parts, drafts)
        except Exception as error:
            logger.warning("a mask cannot be computed: %r", error)
            answer = wire.NextMask(stream.key, None, f"the grammar failed: {error!r}")
        stream.is_slow = time.monotonic() - started > SLOW_SECONDS
        self._taken.append((stream, answer))

    def _next_mask(
        self, stream: _FollowedOutput, parts: list[wire.Part], drafts: list[int]
    ) -> wire.NextMask:
        assert self._compiler is not None
        if stream.matcher is None:
            stream.matcher = self._compiler.match(stream.compiled)
        refused = next((part for part in parts if not stream.matcher.take(part)), None)
        if refused is not None:
            return wire.NextMask(
                stream.key, None, f"the grammar does not allow {refused!r} where it was generated"
            )
        if stream.matcher.has_ended:
            return wire.NextMask(stream.key, None)
        mask = stream.matcher.mask(self._compiler)
        error = None if mask.any() else "the grammar allows no further token"
        after_drafts = self._masks_after_drafts(stream.matcher, mask, drafts)
        return wire.NextMask(stream.key, mask.tobytes(), error, after_drafts)

    def _masks_after_drafts(
        self, matcher: GrammarMatcher, mask: Mask, drafts: list[int]
    ) -> list[bytes]:
        """Return the mask of the token after each draft. `mask` is for the first draft token."""
        assert self._compiler is not None
        masks: list[bytes] = []
        num_taken = 0
        for token_id in drafts:
            is_late = time.monotonic() > self._no_drafts_from
            if is_late or not allows(mask, token_id) or not matcher.take(token_id):
                break
            num_taken += 1
            if matcher.has_ended or not (mask := matcher.mask(self._compiler)).any():
                break
            masks.append(mask.tobytes())
        matcher.take_back(num_taken)
        return masks

    def _collect(self) -> None:
        answers: list[wire.NextMask] = []
        while self._taken:
            stream, answer = self._taken.popleft()
            if self._streams.get(stream.key) is not stream:
                continue  # The output was closed or refused.
            stream.has_turn = False
            if stream.is_open:
                answers.append(answer)
            else:
                self._send_opened(stream, answer)
            if stream.waiting:
                self._take_turn(stream)
        if answers:
            self._send(wire.NextMasks(answers))

    def _send_opened(self, stream: _FollowedOutput, answer: wire.NextMask) -> None:
        if answer.mask is not None and answer.error is None:
            stream.is_open = True
            self._send(wire.GrammarOpened(stream.key, answer.mask))
        else:
            message = answer.error if answer.mask is None else "the grammar allows no output at all"
            self._refuse(stream.key, message or "")

    def _end_slow_turns(self) -> None:
        """Refuse a grammar if its mask takes too long. The mask's thread keeps running."""
        now, limit = time.monotonic(), self._setup.mask_seconds
        for stream in list(self._streams.values()):
            started = stream.turn_started
            if stream.has_turn and started is not None and now - started >= limit:
                slow = f"the grammar takes longer than {limit:g} s for one token"
                self._refuse(stream.key, slow, is_timeout=True)

    def _refuse(self, key: int, message: str, *, is_timeout: bool = False) -> None:
        self._streams.pop(key, None)
        message += "; make the grammar simpler" if is_timeout else ""
        self._send(wire.GrammarRefused(key, message, is_timeout))

    def _send(self, message: wire.FromGrammars) -> None:
        self._sent = time.monotonic()
        self._socket.send(wire.encoder.encode(message))


def load_compiler(setup: wire.Setup) -> GrammarCompiler | None:
    """Load the compiler, which takes seconds. Return None if xgrammar is not installed."""
    try:
        with large_imports():
            from negamax.text.grammar.matcher import GrammarCompiler
    except ImportError as error:
        logger.warning("%s: %s", _NOT_INSTALLED, error)
        return None
    return GrammarCompiler(
        # The tokenizer is trusted, because the server has checked it and no text is encoded here.
        Tokenizer.from_folder(Path(setup.tokenizer_folder), is_trusted=True),
        vocab_size=setup.vocab_size,
        eos_token_ids=setup.eos_token_ids,
        num_threads=setup.num_threads,
        token_tags=TOKEN_TAGS,
    )


def _serve(fork: wire.Fork, setup: wire.Setup, compiler: GrammarCompiler | None) -> None:
    """Serve the engine in a forked process, which ends when its standard input ends."""
    try:
        os.write(sys.stdin.fileno(), str(os.getpid()).encode())
    except BrokenPipeError:  # The engine no longer needs this process.
        exit_now(0)
    exit_with_parent()
    if fork.is_worker:
        os.nice(WORKER_NICENESS)
        _limit_memory(WORKER_BYTES)
    with zmq.Context() as context, context.socket(zmq.PAIR) as answers:
        answers.linger = 0
        answers.bind(fork.address)
        GrammarServer(answers, setup, compiler, is_worker=fork.is_worker).serve()
    exit_now(0)  # A normal exit would wait for compiling threads.


def _limit_memory(num_bytes: int) -> None:
    """Limit the memory of this process and of its forks, unless a lower limit exists."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = num_bytes if soft == resource.RLIM_INFINITY else min(num_bytes, soft)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def main(number: str) -> int:
    """Fork a process for each message at the socket with descriptor `number`."""
    exit_with_parent()
    _limit_memory(int(env.main_memory() * MEMORY_SHARE))
    log.setup_as_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The system reaps ended children.
    # `os.fork` is safe: other threads wait for the parent or for work, and hold no locks.
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")
    with socket.socket(fileno=int(number)) as requests:
        setup = msgspec.msgpack.decode(requests.recv(FRAME_BYTES), type=wire.Setup)
        compiler = load_compiler(setup)
        while True:
            frame, fds, _, _ = socket.recv_fds(requests, FRAME_BYTES, 1)
            if not frame:
                return 0
            if os.fork() == 0:
                break
            os.close(fds[0])
    os.dup2(fds[0], sys.stdin.fileno())
    os.close(fds[0])
    _serve(msgspec.msgpack.decode(frame, type=wire.Fork), setup, compiler)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
