"""What a command does before and while it loads a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from negamax.base.progress import CLEAR_LINE
from negamax.options.engine import EngineOptions
from negamax.scheduler.request import SamplingParams

_ANY_VOCABULARY = 2**31  # the model's size is not known yet


def check_sampling(sampling: SamplingParams, engine: EngineOptions) -> None:
    """Refuse parameters that no model takes. Errors: `InvalidRequestError`."""
    sampling.check(max_logprobs=engine.max_logprobs, vocab_size=_ANY_VOCABULARY)


@contextmanager
def loading(model: str) -> Iterator[None]:
    """On a terminal a line, until the engine's own progress (`base.progress`) takes its place; it
    is gone when the model is there. Elsewhere nothing."""
    is_shown = sys.stderr.isatty()
    if is_shown:
        print(f"loading {model} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if is_shown:
            print(CLEAR_LINE, end="", file=sys.stderr, flush=True)
