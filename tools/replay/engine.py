"""An engine that answers from a script: `python -m tools.replay.engine FOLDER`.

`tests.stub_server` starts it. REPLAY_SCRIPT names a MessagePack file, {salt: [tokens, pace]}. A
request's `cache_salt`, SESSION/TURN, selects its answer, and a step yields up to `pace` tokens. The
folder REPLAY_RECORD gets each request's prompt, `NUMBER.u32`, and at its end a line in
`requests.jsonl`. Cached tokens are those that a prefix cache of the session would find.
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
    """The outcome of one request."""

    salt: str
    number: int  # of the file with its prompt
    num_cached_tokens: int
    num_output_tokens: int
    is_whole: bool  # False: the client hung up


class ScriptReader:
    """Gives each request its prepared answer and records the prompt."""

    def __init__(self, source: ModelSource) -> None:
        script = Path(os.environ["REPLAY_SCRIPT"]).read_bytes()
        self._answers = msgspec.msgpack.decode(script, type=dict[str, tuple[list[int], int]])
        self._folder = Path(os.environ["REPLAY_RECORD"])
        # by session: the last prompt and its answer
        self._computed: dict[str, Tokens] = {}
        self._num_requests = 0
        # by request: number, prompt, cached tokens
        self._prompts: dict[str, tuple[int, Tokens, int]] = {}

    def begin(self, request: GenerateRequest) -> Answer:
        """The prepared answer."""
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
        """Remember the computed tokens and note the outcome."""
        salt = answer.request.cache_salt
        number, prompt, cached = self._prompts.pop(answer.request.request_id)
        done = answer.tokens[: answer.position]
        self._computed[salt.partition("/")[0]] = np.concatenate([prompt, np.array(done, np.uint32)])
        played = Played(salt, number, cached, len(done), len(done) == len(answer.tokens))
        with (self._folder / "requests.jsonl").open("a") as record:
            record.write(json.dumps(asdict(played)) + "\n")


def num_common(one: Tokens, other: Tokens) -> int:
    """The length of the common prefix."""
    length = min(len(one), len(other))
    differences = np.flatnonzero(one[:length] != other[:length])
    return int(differences[0]) if len(differences) else length


def _paces(salt: str, pace: int) -> Iterator[int]:
    rng = random.Random(salt)
    while True:
        yield rng.randint(1, pace)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], new_author=ScriptReader))
