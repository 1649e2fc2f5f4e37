"""The grammar process: `python -m negamax.engine.grammar.process ADDRESS`.

It follows the outputs of all grammars. The compiler can take minutes and gigabytes for a small
schema and cannot be interrupted; here it delays no other work and can be killed.
"""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from negamax.base import env, log
from negamax.base.errors import InvalidRequestError
from negamax.base.imports import large_imports
from negamax.base.log import get_logger
from negamax.base.supervision import exit_now, exit_with_parent
from negamax.config.grammar import Grammar, Reasoning
from negamax.engine.grammar import wire
from negamax.engine.grammar.fair_threads import FairThreads
from negamax.engine.grammar.masks import Mask, allows
from negamax.models.registry import CALL_STYLES, TOKEN_TAGS
from negamax.text.grammar.structural_tag import structural_tag
from negamax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import xgrammar

    from negamax.text.grammar.matcher import GrammarCompiler, GrammarMatcher

logger = get_logger(__name__)

COMPILERS = 2  # grammars compiled at a time
COMPILER_PATIENCE = 1.0  # seconds after which a compilation gets a replacement thread
# the engine does not wait for slower masks, and the output's next masks go to other threads
SLOW_SECONDS = 0.02
MAX_STUCK = 8  # stuck threads of one kind that are replaced
MEMORY_SHARE = 1 / 4  # share of main memory that this process may use
POLL_MS = 2  # while there is work
BEAT_SECONDS = 0.5  # between heartbeats while there is work

_NOT_INSTALLED = "structured output needs the package xgrammar, which cannot be imported here"

GrammarSpec = tuple[Grammar, Reasoning | None]


class _Job:
    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec
        self.keys: list[int] = []
        self.started: float | None = None  # monotonic seconds
        self.compiled: xgrammar.CompiledGrammar | None = None
        self.problem: str | None = None

    @property
    def is_done(self) -> bool:
        return self.compiled is not None or self.problem is not None

    def run(self, compiler: GrammarCompiler) -> None:
        self.started = time.monotonic()
        if not self.keys:
            self.problem = "no request waits for it"
            return
        try:
            self.compiled = compiler.compile(structural_tag(*self.spec, CALL_STYLES))
        except InvalidRequestError as error:
            self.problem = str(error)
        except Exception as error:
            logger.exception("a grammar cannot be compiled")
            self.problem = f"the grammar cannot be compiled: {error!r}"


class _FollowedOutput:
    """One output that follows a grammar. At most one thread works on it at a time: its turn."""

    def __init__(self, key: int, compiled: xgrammar.CompiledGrammar) -> None:
        self.key = key
        self.compiled = compiled
        self.matcher: GrammarMatcher | None = None  # made in the first turn
        # parts and draft tokens of the next turns
        self.waiting: deque[tuple[list[wire.Part], list[int]]] = deque()
        self.has_turn = False
        self.turn_started: float | None = None  # monotonic seconds, once a thread has begun
        self.is_slow = False  # whether its last turn was slow
        self.is_open = False


class GrammarServer:
    """Answers one engine from a thread that never blocks for long; others compute."""

    def __init__(self, socket: zmq.Socket[bytes], setup: wire.Setup) -> None:
        self._socket = socket
        self._compile_seconds = setup.compile_seconds
        self._mask_seconds = setup.mask_seconds
        self._draft_seconds = setup.draft_seconds
        self._sent = time.monotonic()
        self._no_drafts_from = 0.0  # monotonic seconds
        self._jobs: dict[GrammarSpec, _Job] = {}
        self._streams: dict[int, _FollowedOutput] = {}
        self._given_up: set[_FollowedOutput] = set()  # whose thread is still busy
        self._taken: deque[tuple[_FollowedOutput, wire.NextMask]] = deque()  # finished turns
        self._compiler: GrammarCompiler | None = None
        try:
            # seconds of import
            with large_imports():
                from negamax.text.grammar.matcher import GrammarCompiler, GrammarMatcher
        except ImportError as error:
            logger.warning("%s: %s", _NOT_INSTALLED, error)
            self._send(wire.Beat())
            return
        # the server has loaded it, and nothing is encoded here
        tokenizer = Tokenizer.from_folder(Path(setup.tokenizer_folder), is_trusted=True)
        size = self._num_threads = setup.num_threads
        self._matcher = GrammarMatcher
        self._compiler = GrammarCompiler(
            tokenizer,
            vocab_size=setup.vocab_size,
            eos_token_ids=setup.eos_token_ids,
            num_threads=size,
            token_tags=TOKEN_TAGS,
        )
        self._compilers = FairThreads(
            COMPILERS, patience=COMPILER_PATIENCE, most=COMPILERS + MAX_STUCK, name="compile"
        )
        self._quick = FairThreads(size, patience=SLOW_SECONDS, most=size + MAX_STUCK, name="mask")
        self._slow = FairThreads(
            size, patience=setup.mask_seconds, most=size + MAX_STUCK, name="slow-mask"
        )
        self._send(wire.Beat())

    @property
    def _is_busy(self) -> bool:
        at_work = (stream.has_turn for stream in self._streams.values())
        return bool(self._jobs) or bool(self._given_up) or any(at_work)

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
            if self._is_busy:
                for threads in (self._compilers, self._quick, self._slow):
                    threads.tend()
                if time.monotonic() - self._sent > BEAT_SECONDS:
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
        job = self._jobs.get(spec)
        if job is None:
            job = self._jobs[spec] = _Job(spec)
            job.keys.append(message.key)
            self._compilers.submit(partial(job.run, compiler))
        else:
            job.keys.append(message.key)

    def _is_over(self, job: _Job) -> bool:
        return job.is_done or (
            job.started is not None and time.monotonic() - job.started > self._compile_seconds
        )

    def _answer(self, job: _Job) -> None:
        if job.compiled is not None:
            for key in job.keys:
                stream = self._streams[key] = _FollowedOutput(key, job.compiled)
                self._take_turn(stream)
        elif job.problem is not None:
            for key in job.keys:
                self._send(wire.GrammarRefused(key, job.problem))
        else:
            message = (
                f"the grammar takes longer than {self._compile_seconds:g} s to compile; "
                f"make it simpler"
            )
            self._send(wire.Overloaded(job.keys, message))

    def _advance(self, message: wire.AdvanceGrammars) -> None:
        self._no_drafts_from = time.monotonic() + self._draft_seconds
        together: deque[tuple[_FollowedOutput, list[wire.Part], list[int]]] = deque()
        for key, parts, drafts in message.parts:
            stream = self._streams.get(key)
            if stream is None:
                continue  # closed meanwhile
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
        """Compute several masks per thread: waking a thread costs more than a quick mask."""
        total = len(turns)
        over: list[None] = []
        all_over = threading.Event()

        def work() -> None:
            while turns:
                with suppress(IndexError):  # another thread was faster
                    self._turn(*turns.popleft())
                    over.append(None)
            if len(over) == total:
                all_over.set()

        for _ in range(min(self._num_threads, total)):
            self._quick.submit(work)
        if not all_over.wait(SLOW_SECONDS):
            with suppress(IndexError):
                while True:  # masks after a slow one go to other threads
                    self._quick.submit(partial(self._turn, *turns.popleft()))

    def _take_turn(self, stream: _FollowedOutput) -> None:
        """Let a thread compute the stream's next mask, unless one is busy with it."""
        if stream.has_turn:
            return
        stream.has_turn, stream.turn_started = True, None
        parts, drafts = stream.waiting.popleft() if stream.waiting else ([], [])
        threads = self._slow if stream.is_slow else self._quick
        threads.submit(partial(self._turn, stream, parts, [] if stream.is_slow else drafts))

    def _turn(self, stream: _FollowedOutput, parts: list[wire.Part], drafts: list[int]) -> None:
        started = stream.turn_started = time.monotonic()
        try:
            answer = self._next_mask(stream, parts, drafts)
        except Exception as error:
            logger.exception("a mask cannot be computed")
            answer = wire.NextMask(stream.key, None, f"the grammar failed: {error!r}")
        stream.is_slow = time.monotonic() - started > SLOW_SECONDS
        self._taken.append((stream, answer))

    def _next_mask(
        self, stream: _FollowedOutput, parts: list[wire.Part], drafts: list[int]
    ) -> wire.NextMask:
        assert self._compiler is not None
        if stream.matcher is None:
            stream.matcher = self._matcher(stream.compiled)
        refused = next((part for part in parts if not stream.matcher.take(part)), None)
        if refused is not None:
            return wire.NextMask(
                stream.key, None, f"the grammar does not allow {refused!r} where it was generated"
            )
        if stream.matcher.has_ended:
            return wire.NextMask(stream.key, None)
        mask = stream.matcher.mask(self._compiler)
        return wire.NextMask(
            stream.key,
            mask.tobytes(),
            None if mask.any() else "the grammar allows no further token",
            self._masks_after_drafts(stream.matcher, mask, drafts),
        )

    def _masks_after_drafts(
        self, matcher: GrammarMatcher, mask: Mask, drafts: list[int]
    ) -> list[bytes]:
        """The masks after each of `drafts`, the first of which follows `mask`."""
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
            self._given_up.discard(stream)
            if self._streams.get(stream.key) is not stream:
                continue  # closed or abandoned
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
            del self._streams[stream.key]
            is_empty = answer.mask is not None
            self._send(
                wire.GrammarRefused(
                    stream.key,
                    "the grammar allows no output at all" if is_empty else answer.error or "",
                )
            )

    def _end_slow_turns(self) -> None:
        """Give up outputs whose turn takes too long. Their threads go on and are replaced."""
        now = time.monotonic()
        for stream in list(self._streams.values()):
            started = stream.turn_started
            if not stream.has_turn or started is None or now - started < self._mask_seconds:
                continue
            message = (
                f"the grammar takes longer than {self._mask_seconds:g} s for one token; "
                f"make it simpler"
            )
            del self._streams[stream.key]
            self._given_up.add(stream)
            if stream.is_open:
                self._send(wire.NextMasks([wire.NextMask(stream.key, None, message)]))
            else:
                self._send(wire.GrammarRefused(stream.key, message, is_timeout=True))
        for stream in list(self._given_up):
            if (
                stream.turn_started is not None
                and now - stream.turn_started > self._compile_seconds
            ):
                self._given_up.discard(stream)
                self._send(wire.Overloaded([], "a mask takes too long"))

    def _send(self, message: wire.FromGrammars) -> None:
        self._sent = time.monotonic()
        self._socket.send(wire.encoder.encode(message))


def main(address: str) -> int:
    exit_with_parent()
    log.setup_as_parent()
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    share = int(env.main_memory() * MEMORY_SHARE)
    resource.setrlimit(
        resource.RLIMIT_DATA, (share if most == resource.RLIM_INFINITY else min(share, most), most)
    )
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.linger = 0
        socket.bind(address)
        setup = msgspec.msgpack.decode(socket.recv(), type=wire.Setup)
        GrammarServer(socket, setup).serve()
    exit_now(0)  # a busy compiler thread would delay an orderly end


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
