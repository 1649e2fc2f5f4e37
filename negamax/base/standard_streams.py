"""Handle closed and broken standard streams."""

import os
import sys

# With these modes, reads of stdin and writes to stdout fail, and stderr drops messages.
_MODES = {"stdin": ("r", os.O_WRONLY), "stdout": ("w", os.O_RDONLY), "stderr": ("w", os.O_WRONLY)}


def open_missing() -> None:
    """Open missing standard streams, so that no other file gets the descriptors 0 to 2. Reads of
    the new stdin fail. Writes to the new stdout fail. The new stderr drops messages.
    """
    for number, (name, (mode, flags)) in enumerate(_MODES.items()):
        if getattr(sys, name) is None:
            _open_null(number, flags)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def drop_unwritable() -> None:
    """Flush stdout and stderr. Drop unwritable output, which would raise an error again at exit."""
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
