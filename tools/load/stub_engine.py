"""An engine without a model: answers every request with a prepared text, one token per step, as fast as told.

It speaks the engine's real wire protocol and stands in its place to measure the server alone:
`python -m tools.load.stub_engine FOLDER`, started by `tools.load.stub_server`. STUB_STEP_MS (0: as fast as it can) is the time
between two steps, STUB_LOG a file that gets the monotonic time of every step (float64) right before it is sent.
"""

from __future__ import annotations

import itertools
import os
import struct
import sys
import time
from pathlib import Path

import msgspec
import zmq

from negamax.base.process import exit_with_parent
from negamax.config.options import EngineOptions
from negamax.engine import wire
from negamax.engine.connection import EngineAddress
from negamax.engine.source import locate
from negamax.scheduler.request import GenerateRequest
from negamax.scheduler.step import SequenceUpdate
from negamax.text.tokenizer import Tokenizer

MAX_NUM_SEQS = 1024
PROSE = (
    "The lighthouse keeper counts the ships that pass at night, writes their names into a long grey book and wonders, now and "
    "then, where the small ones go when the wind turns north. Nobody asks him; nobody has asked for years.\n"
)
CALL = (
    '\n<minimax:tool_call>\n<invoke name="write_file">\n<parameter name="path">notes.txt</parameter>\n'
    '<parameter name="content">'
)
CALL_END = "</parameter>\n</invoke>\n</minimax:tool_call>"


class Script:
    """The tokens of an answer: a third reasoning, a third content, a third the string argument of a tool call."""

    def __init__(self, tokenizer: Tokenizer, *, eos: int) -> None:
        self._prose = tokenizer.encode(PROSE)
        self._think_end = tokenizer.encode("\n</think>\n\n")
        self._call = tokenizer.encode(CALL)
        self._call_end = tokenizer.encode(CALL_END)
        self._eos = eos
        self._made: dict[int, list[int]] = {}

    def tokens(self, count: int) -> list[int]:
        """`count` tokens, the last of them the end of the sequence where there is room for a whole call."""
        made = self._made.get(count)
        if made is None:
            made = self._made[count] = self._make(count)
        return made

    def _make(self, count: int) -> list[int]:
        fixed = [*self._think_end, *self._call, *self._call_end, self._eos]
        if count <= len(fixed) + 3:
            return list(itertools.islice(itertools.cycle(self._prose), count))
        share, rest = divmod(count - len(fixed), 3)
        prose = list(itertools.islice(itertools.cycle(self._prose), share + rest))
        return [*prose, *self._think_end, *prose[:share], *self._call, *prose[:share], *self._call_end, self._eos]


class Answer:
    """A request on its way: which token comes next."""

    def __init__(self, request: GenerateRequest, script: Script) -> None:
        self.request_id = request.request_id
        self.tokens = script.tokens(request.sampling.max_tokens or 1)
        self.position = 0

    def step(self, eos: int) -> SequenceUpdate:
        token = self.tokens[self.position]
        self.position += 1
        ended = "stop" if token == eos else "length" if self.position == len(self.tokens) else None
        return SequenceUpdate(self.request_id, [token], None, None, ended, None, 0, None)


class StubEngine:
    """Requests in, one token per request and step out."""

    def __init__(self, options: EngineOptions) -> None:
        source = locate(options)
        self._eos = source.generation.eos_token_ids[0]
        self._script = Script(Tokenizer.from_folder(source.tokenizer_folder), eos=self._eos)
        self._answers: dict[str, Answer] = {}
        self._steps = 0
        self._tokens = 0
        self.info = wire.ModelInfo(
            model=options.model,
            served_model_name=source.name,
            architecture=source.spec.architecture,
            max_model_len=100_000,
            vocab_size=source.spec.vocab_size,
            eos_token_ids=source.generation.eos_token_ids,
            bos_token_id=source.spec.bos_token_id,
            sampling_defaults=source.generation.sampling,
            max_logprobs=options.max_logprobs,
            max_num_seqs=MAX_NUM_SEQS,
            block_size=16,
            num_kv_blocks=100_000,
            device="stub",
            dtype="none",
        )

    @property
    def has_work(self) -> bool:
        return bool(self._answers)

    def take(self, message: wire.ToEngine) -> bool:
        """Process a message; False: it said stop."""
        if isinstance(message, wire.AddRequest):
            self._answers[message.request.request_id] = Answer(message.request, self._script)
        elif isinstance(message, wire.AbortRequests):
            for request_id in message.request_ids:
                self._answers.pop(request_id, None)
        elif isinstance(message, wire.Shutdown):
            return False
        return True

    def step(self) -> wire.StepOutputs:
        """One token for everyone."""
        updates = [answer.step(self._eos) for answer in self._answers.values()]
        for update in updates:
            if update.finish_reason is not None:
                del self._answers[update.request_id]
        self._steps += 1
        self._tokens += len(updates)
        stats = wire.EngineStats(len(self._answers), 0, 100_000, 100_000, self._steps, 0, 0, 0, self._tokens, 0.0)
        return wire.StepOutputs(updates, stats)


def main(folder: str) -> int:
    exit_with_parent()
    pause = float(os.environ.get("STUB_STEP_MS", "0")) / 1000
    log = os.environ.get("STUB_LOG")
    address = EngineAddress(folder)
    with zmq.Context() as context, context.socket(zmq.PULL) as requests, context.socket(zmq.PUSH) as outputs:
        requests.connect(address.requests)
        outputs.connect(address.outputs)
        engine = StubEngine(msgspec.msgpack.decode(requests.recv(), type=EngineOptions))
        outputs.send(wire.encoder.encode(wire.EngineReady(engine.info)))
        with Path(log or os.devnull).open("ab", buffering=0) as times:
            due = time.monotonic()
            while True:
                while not engine.has_work or requests.poll(0):
                    if not engine.take(wire.to_engine_decoder.decode(requests.recv())):
                        return 0
                    due = max(due, time.monotonic())
                if pause:
                    due += pause
                    time.sleep(max(0.0, due - time.monotonic()))
                frame = wire.encoder.encode(engine.step())
                times.write(struct.pack("d", time.monotonic()))
                outputs.send(frame)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
