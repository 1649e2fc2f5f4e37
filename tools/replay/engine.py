"""An engine that answers from a script: `python -m tools.replay.engine FOLDER`, started by
`tests.stub_server`.

REPLAY_SCRIPT names a MessagePack file, {salt: [tokens, pace]}: a request's `cache_salt`, which is
SESSION/TURN, says which answer it gets, and each step brings up to `pace` tokens of it. In the
folder REPLAY_RECORD each request leaves its prompt, `NUMBER.u32`, and when it is over a line in
`requests.jsonl`. What it would find in a prefix cache that holds the session so far is reported as
cached tokens.
"""

from __future__ import annotations

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
    """What became of one request."""

    salt: str
    number: int  # of the file with its prompt
    num_cached_tokens: int
    num_output_tokens: int
    is_whole: bool  # False: the client hung up


class ScriptReader:
    """Gives each request the answer that was prepared for it, and keeps what it was asked. Single
    writer: the engine.
    """

    def __init__(self, source: ModelSource) -> None:
        script = Path(os.environ["REPLAY_SCRIPT"]).read_bytes()
        self._answers = msgspec.msgpack.decode(script, type=dict[str, tuple[list[int], int]])
        self._folder = Path(os.environ["REPLAY_RECORD"])
        # by session: the prompt computed last, and what was answered
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
        return Answer(
            request, tokens, steps=_paces(request.cache_salt, pace), num_cached_tokens=cached
        )

    def end(self, answer: Answer) -> None:
        """Remember what was computed and note how it ended."""
        salt = answer.request.cache_salt
        number, prompt, cached = self._prompts.pop(answer.request.request_id)
        done = answer.tokens[: answer.position]
        self._computed[salt.partition("/")[0]] = np.concatenate([prompt, np.array(done, np.uint32)])
        played = Played(salt, number, cached, len(done), len(done) == len(answer.tokens))
        with (self._folder / "requests.jsonl").open("a") as record:
            record.write(json.dumps(asdict(played)) + "\n")


def num_common(one: Tokens, other: Tokens) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    differences = np.flatnonzero(one[:length] != other[:length])
    return int(differences[0]) if len(differences) else length


def _paces(salt: str, pace: int) -> Iterator[int]:
    rng = random.Random(salt)
    while True:
        yield rng.randint(1, pace)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], new_author=ScriptReader))
