"""Standard streams that are closed or broken."""

from __future__ import annotations

import os
import sys

# what nobody can read or write; messages are lost
_MODES = {"stdin": ("r", os.O_WRONLY), "stdout": ("w", os.O_RDONLY), "stderr": ("w", os.O_WRONLY)}


def open_missing() -> None:
    """Give this process the standard streams that it was started without, so that no file that it
    opens becomes one. Reading standard input and writing to standard output fail as on a closed
    file; what is written to standard error is lost.
    """
    for number, (name, (mode, flags)) in enumerate(_MODES.items()):
        if getattr(sys, name) is None:
            _open_null(number, flags)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def drop_unwritable() -> None:
    """Flush what was printed. Where that fails it is lost, so that the end of the process does not
    fail for it once more.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _open_null(stream.fileno(), os.O_WRONLY)


def _open_null(number: int, flags: int) -> None:
    opened = os.open(os.devnull, flags)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
    else:
        os.set_inheritable(number, True)
