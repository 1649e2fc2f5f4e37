"""Negamax: a serving engine for the MiniMax model family.

`LLM` runs the engine in this process. `negamax serve MODEL` runs the engine behind HTTP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from negamax.engine.llm import LLM
    from negamax.scheduler.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import negamax` does not import torch."""
    if name == "LLM":
        from negamax.base import env

        env.set_openmp_defaults()  # This call must precede the import of torch.
        from negamax.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from negamax.scheduler.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'negamax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
