"""An engine that answers from a script: `python -m tools.replay.engine FOLDER`.

`tests.stub_server` starts this process. REPLAY_SCRIPT names a MessagePack file, {salt: [tokens,
pace]}. A request's `cache_salt`, SESSION/TURN, selects its answer, and a step yields up to `pace`
tokens. The engine writes each request's prompt to `NUMBER.u32` in the folder REPLAY_RECORD, and a
line to `requests.jsonl` when the request ends. It reports as many cached tokens as a prefix cache
of the session would.
"""

import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from negamax.engine.core.source import ModelSource
from negamax.scheduler.request import GenerateRequest
from tests.stub_engine import BLOCK_SIZE, Answer, run

Tokens = NDArray[np.uint32]


@dataclass(frozen=True)
class Played:
    salt: str
    number: int  # number of the file with the prompt
    num_cached_tokens: int
    num_output_tokens: int
    is_whole: bool  # False if the client disconnected


class ScriptReader:
    """The prepared answers. The reader also records the prompts."""

    def __init__(self, source: ModelSource) -> None:
        script = Path(os.environ["REPLAY_SCRIPT"]).read_bytes()
        self._answers = msgspec.msgpack.decode(script, type=dict[str, tuple[list[int], int]])
        self._folder = Path(os.environ["REPLAY_RECORD"])
        # session -> its last prompt and answer
        self._computed: dict[str, Tokens] = {}
        self._num_requests = 0
        # request -> number, prompt, cached tokens
        self._prompts: dict[str, tuple[int, Tokens, int]] = {}

    def begin(self, request: GenerateRequest) -> Answer:
        tokens, pace = self._answers[request.cache_salt]
        session = request.cache_salt.partition("/")[0]
        prompt = np.array(request.prompt_token_ids, np.uint32)
        known = self._computed.get(session, prompt[:0])
        cached = min(num_common(known, prompt), len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        number = self._num_requests
        self._num_requests += 1
        prompt.tofile(self._folder / f"{number}.u32")
        self._prompts[request.request_id] = number, prompt, cached
        steps = _paces(request.cache_salt, pace)
        return Answer(request, tokens, steps=steps, num_cached_tokens=cached)

    def end(self, answer: Answer) -> None:
        """Store the computed tokens, and record the outcome."""
        salt = answer.request.cache_salt
        number, prompt, cached = self._prompts.pop(answer.request.request_id)
        done = answer.tokens[: answer.position]
        self._computed[salt.partition("/")[0]] = np.concatenate([prompt, np.array(done, np.uint32)])
        played = Played(salt, number, cached, len(done), len(done) == len(answer.tokens))
        with (self._folder / "requests.jsonl").open("a") as record:
            record.write(json.dumps(asdict(played)) + "\n")


def num_common(one: Tokens, other: Tokens) -> int:
    """Return the length of the common prefix."""
    length = min(len(one), len(other))
    differences = np.flatnonzero(one[:length] != other[:length])
    return int(differences[0]) if len(differences) else length


def _paces(salt: str, pace: int) -> Iterator[int]:
    rng = random.Random(salt)
    while True:
        yield rng.randint(1, pace)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], new_author=ScriptReader))
