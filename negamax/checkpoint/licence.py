"""Messages about a download: errors of the hub's client, and the licence of the model.

`_LIMITS` summarizes restrictions of licences. Only the licences themselves are binding.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from negamax.base.log import get_logger

logger = get_logger(__name__)

# part of a model's name, in lower case -> restriction in the model's licence
# https://github.com/MiniMax-AI/MiniMax-M2.7/blob/main/LICENSE, of 2026
_LIMITS = {
    "minimax-m2.7": "it prohibits commercial use without a prior written authorization from MiniMax"
}


@dataclass(frozen=True)
class Licence:
    """The licence fields of a model card."""

    name: str | None
    link: str  # address of the licence, or of the model card
    base_models: Sequence[str] = ()


RETRY = "check the network and run again (finished files are kept), or give a local folder"


def describe_error(error: BaseException) -> str:
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def log_licence(model: str, licence: Licence) -> None:
    """Log the licence in one line. Write the line to standard error if the log level hides it."""
    name = licence.name or "not named on the model's card"
    line = f"licence of {model}: {name}, see {licence.link}"
    for part, limit in _LIMITS.items():
        if any(part in known.lower() for known in (model, *licence.base_models)):
            line += f"; {limit}"
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", line)
    else:
        print(line, file=sys.stderr, flush=True)
