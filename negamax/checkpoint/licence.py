"""The licence of a model is said before its weights are downloaded: its name, and where it stands.

What is said here of a licence was read in that licence; the licence alone counts.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from negamax.base.log import get_logger

logger = get_logger(__name__)

# Models whose licence limits what many want to do with them: a part of their names in lower case,
# and the limit. https://github.com/MiniMax-AI/MiniMax-M2.7/blob/main/LICENSE, of 2026
_LIMITS = {
    "minimax-m2.7": "it prohibits commercial use without a prior written authorization from MiniMax"
}


@dataclass(frozen=True)
class Licence:
    """What a model's card says of its licence."""

    name: str | None
    link: str  # to the licence, or to the card
    base_models: Sequence[str] = ()  # that the model was made from


def say_licence(model: str, licence: Licence) -> None:
    """One line: in the log, or on standard error where the log leaves such lines out."""
    name = licence.name or "not named on the model's card"
    line = f"licence of {model}: {name}, see {licence.link}"
    for part, limit in _LIMITS.items():
        if any(part in known.lower() for known in (model, *licence.base_models)):
            line += f"; {limit}"
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", line)
    else:
        print(line, file=sys.stderr, flush=True)
