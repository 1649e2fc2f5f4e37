"""The grammar process: `python -m negamax.engine.grammar_process ADDRESS`, started beside the model on a GPU, elsewhere when
the first grammar is asked for.

It holds the state of every output that follows a grammar. A process of its own, because the compiler can take minutes and
gigabytes for a small schema, cannot be interrupted, and takes seconds to import: here it stalls nobody and can be killed.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from negamax.base import env, log
from negamax.base.errors import InvalidRequestError
from negamax.base.log import get_logger
from negamax.base.process import exit_now, exit_with_parent
from negamax.engine import grammar_wire as wire
from negamax.text.grammar import structural_tag
from negamax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import xgrammar

    from negamax.text.grammar_matcher import GrammarCompiler, GrammarMatcher, MaskWriter

logger = get_logger(__name__)

COMPILERS = 2  # grammars compiled at a time
MEMORY_SHARE = 1 / 4  # of the main memory, that this process may take
POLL_MS = 2  # while something is being compiled

_NOT_INSTALLED = "structured output needs the package xgrammar, which cannot be imported here"


class _Job:
    """One grammar on its way through the compiler, and the outputs that wait for it."""

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.started: float | None = None  # monotonic seconds
        self.result: Future[xgrammar.CompiledGrammar]

    def begin(self, compile_grammar: Callable[[str], xgrammar.CompiledGrammar], text: str) -> xgrammar.CompiledGrammar:
        """Run by a thread of the pool."""
        self.started = time.monotonic()
        return compile_grammar(text)


class GrammarServer:
    """Answers one engine over `socket`, from one thread; others compile."""

    def __init__(self, socket: zmq.Socket[bytes], setup: wire.Setup) -> None:
        self._socket = socket
        self._compile_seconds = setup.compile_seconds
        self._compiler: GrammarCompiler | None = None
        self._writer: MaskWriter
        self._matcher: type[GrammarMatcher]
        self._pool = ThreadPoolExecutor(COMPILERS, thread_name_prefix="compile")
        self._jobs: dict[str, _Job] = {}
        self._matchers: dict[int, GrammarMatcher] = {}
        try:
            from negamax.text.grammar_matcher import GrammarCompiler, GrammarMatcher, MaskWriter  # seconds of import
        except ImportError as error:
            logger.warning("%s: %s", _NOT_INSTALLED, error)
            return
        tokenizer = Tokenizer.from_folder(Path(setup.tokenizer_folder))
        self._matcher = GrammarMatcher
        self._compiler = GrammarCompiler(
            tokenizer,
            vocab_size=setup.vocab_size,
            eos_token_ids=setup.eos_token_ids,
            num_threads=setup.num_threads,
        )
        self._writer = MaskWriter(self._compiler, num_threads=setup.num_threads)

    def serve(self) -> None:
        """Until the engine says stop."""
        while True:
            if self._socket.poll(POLL_MS if self._jobs else None):
                frame = self._socket.recv()
                if not frame:
                    return
                self._handle(wire.to_grammars.decode(frame))
            for text in [text for text, job in self._jobs.items() if self._is_over(job)]:
                self._answer(self._jobs.pop(text))

    def _handle(self, message: wire.ToGrammars) -> None:
        match message:
            case wire.OpenGrammar():
                self._open(message)
            case wire.AdvanceGrammars():
                self._advance(message)
            case wire.CloseGrammars():
                for key in message.keys:
                    self._matchers.pop(key, None)
                for job in self._jobs.values():
                    job.keys = [key for key in job.keys if key not in message.keys]

    def _open(self, message: wire.OpenGrammar) -> None:
        if self._compiler is None:
            self._send(wire.GrammarRefused(message.key, _NOT_INSTALLED))
            return
        try:
            text = structural_tag(message.grammar, message.reasoning)
        except InvalidRequestError as error:
            self._send(wire.GrammarRefused(message.key, str(error)))
            return
        job = self._jobs.get(text)
        if job is None:
            job = self._jobs[text] = _Job()
            job.result = self._pool.submit(job.begin, self._compiler.compile, text)
        job.keys.append(message.key)

    def _is_over(self, job: _Job) -> bool:
        if job.result.done():
            return True
        return job.started is not None and time.monotonic() - job.started > self._compile_seconds

    def _answer(self, job: _Job) -> None:
        if not job.result.done():
            message = f"the grammar takes longer than {self._compile_seconds:g} s to compile; make it simpler"
            for key in job.keys:
                self._send(wire.GrammarRefused(key, message, is_timeout=True))
            return
        try:
            compiled = job.result.result()
        except Exception as error:
            if not isinstance(error, InvalidRequestError):
                logger.exception("a grammar cannot be compiled")
            reason = str(error) if isinstance(error, InvalidRequestError) else f"the grammar cannot be compiled: {error!r}"
            for key in job.keys:
                self._send(wire.GrammarRefused(key, reason))
            return
        for key in job.keys:
            matcher = self._matcher(compiled)
            (mask,) = self._writer.masks([matcher])
            if mask.any():
                self._matchers[key] = matcher
                self._send(wire.GrammarOpened(key, mask.tobytes()))
            else:
                self._send(wire.GrammarRefused(key, "the grammar allows no output at all"))

    def _advance(self, message: wire.AdvanceGrammars) -> None:
        answers: list[wire.NextMask] = []
        going: list[tuple[int, GrammarMatcher]] = []
        for key, parts in message.parts:
            matcher = self._matchers.get(key)
            if matcher is None:
                continue  # closed meanwhile
            refused = next((part for part in parts if not matcher.take(part)), None)
            if refused is not None:
                answers.append(wire.NextMask(key, None, f"the grammar does not allow {refused!r} where it was generated"))
            elif matcher.has_ended:
                answers.append(wire.NextMask(key, None))
            else:
                going.append((key, matcher))
        masks = self._writer.masks([matcher for _, matcher in going]) if going else []
        for (key, _), mask in zip(going, masks, strict=True):
            error = None if mask.any() else "the grammar allows no further token"
            answers.append(wire.NextMask(key, mask.tobytes(), error))
        self._send(wire.NextMasks(answers))

    def _send(self, message: wire.FromGrammars) -> None:
        self._socket.send(wire.encoder.encode(message))


def main(address: str) -> int:
    """Serve one engine until it says stop; the exit code of the process."""
    exit_with_parent()
    log.setup_as_parent()
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    share = int(env.main_memory() * MEMORY_SHARE)
    resource.setrlimit(resource.RLIMIT_DATA, (share if most == resource.RLIM_INFINITY else min(share, most), most))
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.linger = 0
        socket.connect(address)
        setup = msgspec.msgpack.decode(socket.recv(), type=wire.Setup)
        GrammarServer(socket, setup).serve()
    exit_now(0)  # a compiler that is still at it would hold up an orderly end


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
