"""Negamax: a serving engine for the MiniMax model family.

`from negamax import LLM, SamplingParams` runs the engine in this process; `negamax serve MODEL`
runs it behind HTTP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from negamax.engine.llm import LLM
    from negamax.scheduler.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """The public names on first use, so that a part of the package imports only what it needs."""
    if name == "LLM":
        from negamax.base import env

        env.set_openmp_defaults()  # before torch is imported
        from negamax.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from negamax.scheduler.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'negamax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
