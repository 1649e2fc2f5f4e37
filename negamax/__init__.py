"""Negamax: a serving engine for the MiniMax model family.

`from negamax import LLM, SamplingParams` runs the engine in this process; `negamax serve MODEL` runs it behind HTTP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from negamax.scheduler.request import SamplingParams

if TYPE_CHECKING:
    from negamax.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """`LLM` on first use, so that importing the package (as the HTTP server does) never imports torch."""
    if name == "LLM":
        from negamax.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'negamax' has no attribute {name!r}")
