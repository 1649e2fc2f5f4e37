"""What a command does before and while it loads a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from negamax.config.options import EngineOptions
from negamax.scheduler.request import SamplingParams

_ANY_VOCABULARY = 2**31  # the model's size is not known yet


def check_sampling(sampling: SamplingParams, engine: EngineOptions) -> None:
    """Refuse parameters that no model takes. Errors: `InvalidRequestError`."""
    sampling.check(max_logprobs=engine.max_logprobs, vocab_size=_ANY_VOCABULARY)


@contextmanager
def loading(model: str) -> Iterator[None]:
    """A line that moves and counts the seconds on a terminal; nothing where nobody looks."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn(f"loading {model}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task("", total=None)
        yield
