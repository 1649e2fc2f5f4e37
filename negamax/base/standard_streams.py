"""Handle closed and broken standard streams."""

import os
import sys

# modes that fail to read and write; messages on stderr are lost
_MODES = {"stdin": ("r", os.O_WRONLY), "stdout": ("w", os.O_RDONLY), "stderr": ("w", os.O_WRONLY)}


def open_missing() -> None:
    """Open the standard streams that this process lacks, so that no other file becomes one. Reading
    stdin and writing stdout still fail; writes to stderr are lost.
    """
    for number, (name, (mode, flags)) in enumerate(_MODES.items()):
        if getattr(sys, name) is None:
            _open_null(number, flags)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def drop_unwritable() -> None:
    """Flush the output; drop what fails, so that the end of the process does not fail again."""
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
