"""Lines of text: for people they break between words in a terminal; for programs they are UTF-8,
whatever the locale is.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from typing import Any

from negamax.base.errors import ConfigError


def print_line(text: str, *, indent: int = 0) -> None:
    """Print `text`. In a terminal that is too narrow for it, it goes on below, behind `indent`
    spaces or a third of the width; a longer word stays whole. Elsewhere it is one line.
    """
    if not sys.stdout.isatty():
        print(text)
        return
    width = shutil.get_terminal_size().columns
    print(
        textwrap.fill(
            text,
            width=width,
            subsequent_indent=" " * min(indent, width // 3),
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def print_json(answer: Any) -> None:
    """Print `answer` on one line, in UTF-8."""
    try:
        line = json.dumps(answer, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # a lone surrogate
        line = json.dumps(answer).encode()
    sys.stdout.flush()
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.flush()


def read_text() -> str:
    """Standard input, in UTF-8. Errors: `ConfigError`."""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"standard input is no UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}"
        ) from None
