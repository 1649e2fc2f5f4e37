"""Lines of text for people: in a terminal they break between words."""

from __future__ import annotations

import shutil
import sys
import textwrap


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
