"""An engine without a model, which answers each request with prepared text.

    python -m tests.stub_engine FOLDER

The process speaks the engine's wire protocol, and `tests.stub_server` starts it. An author decides
the answers. The author of this module writes as many tokens as requested, one per step.
STUB_STEP_MS is the time between two steps (0: none). STUB_LOG is a file for the monotonic time
(float64) of each step before it is sent. While the file STUB_HOLD exists, no answer continues after
its first step.
"""

import itertools
import os
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import zmq

from negamax.base.supervision import exit_with_parent
from negamax.config.vision import VisionSpec
from negamax.engine import wire
from negamax.engine.core.process import Outbox, listen
from negamax.engine.core.source import ModelSource, locate
from negamax.options.engine import EngineOptions
from negamax.scheduler.request import GenerateRequest
from negamax.scheduler.step import SequenceUpdate
from negamax.text.tokenizer import Tokenizer

MAX_NUM_SEQS = 1024
MAX_MODEL_LEN = 4_000_000
BLOCK_SIZE = 16
NUM_BLOCKS = 1_000_000
PROSE = (
    "The lighthouse keeper counts the ships that pass at night, writes their names into a long "
    "grey book and wonders, now and then, where the small ones go when the wind turns north. "
    "Nobody asks him; nobody has asked for years.\n"
)
CALL = (
    '\n<minimax:tool_call>\n<invoke name="write_file">\n'
    '<parameter name="path">notes.txt</parameter>\n<parameter name="content">'
)
CALL_END = "</parameter>\n</invoke>\n</minimax:tool_call>"


class Answer:
    def __init__(
        self, request: GenerateRequest, tokens: Sequence[int], *,
        steps: Iterator[int] | None = None, num_cached_tokens: int = 0,
    ) -> None:  # fmt: skip
        """Make an answer. `steps` yields the number of tokens of each step; the default is one."""
        self.request = request
        self.tokens = tokens
        self.position = 0
        self._steps = steps or itertools.repeat(1)
        self._num_cached_tokens = num_cached_tokens

    def step(self, eos: int) -> SequenceUpdate:
        """Return the tokens of one step."""
        tokens = list(self.tokens[self.position : self.position + next(self._steps)])
        self.position += len(tokens)
        is_over = self.position >= len(self.tokens)
        reason = None if not is_over else "stop" if tokens[-1] == eos else "length"
        name, cached = self.request.request_id, self._num_cached_tokens
        return SequenceUpdate(name, tokens, None, None, reason, None, cached, None)


class Author(Protocol):
    def begin(self, request: GenerateRequest) -> Answer:
        """Begin the answer to a request."""

    def end(self, answer: Answer) -> None:
        """Take note that an answer ended or was aborted."""


class Novelist:
    """Write equal parts of reasoning, content and a tool call, at different offsets per answer."""

    def __init__(self, source: ModelSource) -> None:
        tokenizer = Tokenizer.from_folder(source.tokenizer_folder)
        self._prose = tokenizer.encode(PROSE)
        self._think_end = tokenizer.encode("\n</think>\n\n")
        self._call = tokenizer.encode(CALL)
        self._call_end = tokenizer.encode(CALL_END)
        self._eos = source.generation.eos_token_ids[0]
        self._made: dict[tuple[int, int], list[int]] = {}
        self._num_begun = 0

    def begin(self, request: GenerateRequest) -> Answer:
        """Make an answer of `max_tokens` tokens, with the end token if a whole call fits."""
        count, start = request.sampling.max_tokens or 1, self._num_begun % len(self._prose)
        self._num_begun += 1
        made = self._made.get((count, start))
        if made is None:
            made = self._made[count, start] = self._make(count, start)
        return Answer(request, made)

    def end(self, answer: Answer) -> None:
        """Do nothing."""

    def _make(self, count: int, start: int) -> list[int]:
        fixed = [*self._think_end, *self._call, *self._call_end, self._eos]
        share, rest = divmod(count - len(fixed), 3)
        prose = list(itertools.islice(itertools.cycle(self._prose), start, start + count))
        if share < 1:
            return prose
        thought, text = prose[: share + rest], prose[:share]
        return [*thought, *self._think_end, *text, *self._call, *text, *self._call_end, self._eos]


class StubEngine:
    def __init__(
        self, options: EngineOptions, *, new_author: Callable[[ModelSource], Author]
    ) -> None:
        source = locate(options)
        self._author = new_author(source)
        self._eos = source.generation.eos_token_ids[0]
        self._answers: dict[str, Answer] = {}
        self._aborted: list[SequenceUpdate] = []  # The next step reports aborts.
        self._hold = os.environ.get("STUB_HOLD")
        self._steps = 0
        self._tokens = 0
        spec, generation = source.spec, source.generation
        self.info = wire.ModelInfo(
            model=options.model, served_model_name=source.name, architecture=spec.architecture,
            max_model_len=MAX_MODEL_LEN, vocab_size=spec.vocab_size, bos_token_id=spec.bos_token_id,
            eos_token_ids=generation.eos_token_ids, sampling_defaults=generation.sampling,
            max_logprobs=options.max_logprobs, max_num_seqs=MAX_NUM_SEQS, block_size=BLOCK_SIZE,
            num_kv_blocks=NUM_BLOCKS, device="stub", dtype="none",
            vision=make_vision() if os.environ.get("STUB_VISION") else None,
        )  # fmt: skip

    @property
    def has_work(self) -> bool:
        return bool(self._aborted or self._due())

    def take(self, message: wire.ToEngine) -> bool:
        """Process a message. Return False for a shutdown."""
        if isinstance(message, wire.AddRequest):
            self._answers[message.request.request_id] = self._author.begin(message.request)
        elif isinstance(message, wire.AbortRequests):
            for request_id in message.request_ids:
                answer = self._answers.pop(request_id, None)
                if answer is not None:
                    self._author.end(answer)
                    update = SequenceUpdate(request_id, [], None, None, "abort", None, 0, None)
                    self._aborted.append(update)
        elif isinstance(message, wire.AbortServer):
            for name in list(self._answers):
                if wire.server_of(name) == message.server:
                    self._author.end(self._answers.pop(name))
        elif isinstance(message, wire.Shutdown):
            return False
        return True

    def step(self) -> wire.StepOutputs:
        """Return the next tokens of all requests."""
        updates = [answer.step(self._eos) for answer in self._due()]
        for update in updates:
            if update.finish_reason is not None:
                self._author.end(self._answers.pop(update.request_id))
        updates += self._aborted
        self._aborted = []
        self._steps += 1
        self._tokens += sum(len(update.token_ids) for update in updates)
        return wire.StepOutputs(updates, self._stats())

    def _due(self) -> Collection[Answer]:
        if self._hold is None or not Path(self._hold).exists():
            return self._answers.values()
        return [answer for answer in self._answers.values() if answer.position == 0]

    def beat(self) -> wire.Heartbeat:
        return wire.Heartbeat(self._steps, True, self._stats())

    def _stats(self) -> wire.EngineStats:
        counts = (len(self._answers), 0, NUM_BLOCKS, NUM_BLOCKS, self._steps, 0, 0, 0, self._tokens)
        return wire.EngineStats(*counts)


def make_vision() -> VisionSpec:
    """Make a vision tower for nano-m3; its image tokens are MiniMax-M3's ids minus 195,904."""
    return VisionSpec(
        hidden_size=160, num_layers=1, num_heads=2, intermediate_size=64, patch_size=14,
        spatial_merge_size=2, temporal_patch_size=2, projector_hidden_size=64, text_hidden=64,
        rope_theta=10_000.0, layer_norm_eps=1e-5,
        image_token_id=4121, image_start_id=4125, image_end_id=4126,
    )  # fmt: skip


def run(folder: str, *, new_author: Callable[[ModelSource], Author]) -> int:
    exit_with_parent()
    pause = float(os.environ.get("STUB_STEP_MS", "0")) / 1000
    log = os.environ.get("STUB_LOG")
    address = wire.EngineAddress(folder)
    with zmq.Context() as context, context.socket(zmq.PULL) as requests:
        requests.connect(address.requests(0))
        start = wire.start_decoder.decode(requests.recv())
        listen(requests, address, num_servers=start.num_servers)
        engine = StubEngine(start.options, new_author=new_author)
        outbox = Outbox(context, address, num_servers=start.num_servers, linger=0)
        outbox.send_first(wire.EngineReady(engine.info))
        with outbox, Path(log or os.devnull).open("ab", buffering=0) as times:
            due = time.monotonic()
            while True:
                while not engine.has_work or requests.poll(0):
                    if not engine.has_work and not requests.poll(int(1000 * wire.BEAT_SECONDS)):
                        outbox.send_all(engine.beat())
                        continue
                    if not engine.take(wire.to_engine_decoder.decode(requests.recv())):
                        return 0
                    due = max(due, time.monotonic())
                if pause:
                    due += pause
                    time.sleep(max(0.0, due - time.monotonic()))
                frames = outbox.frames(engine.step())
                times.write(struct.pack("d", time.monotonic()))
                outbox.send(frames)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], new_author=Novelist))
