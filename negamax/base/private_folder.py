"""Folders for the sockets and shared files of one process tree, which only this user can enter.

Each holds a lock for as long as its maker lives. What a process that was killed left behind is
removed when the next folder is made beside it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from negamax.base import env
from negamax.base.errors import ResourceError

_PREFIX = "negamax-"
_LOCK = "lock"
_MOST_BYTES = 103  # of a socket's path: macOS; Linux has 107
# the longest path in a folder, from the folder above on
_OWN_BYTES = len(f"/{_PREFIX}12345678/requests-63")
_SECONDS_TO_LOCK = 10.0  # younger folders may be about to be locked


class PrivateFolder:
    """A new folder, until `remove`. Errors: `ResourceError` where no folder for temporary files
    will do.
    """

    def __init__(self) -> None:
        parent = _parent()
        _remove_abandoned(parent)
        self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        self._lock = os.open(f"{self.path}/{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove the folder and what is in it; again, nothing."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _parent() -> str:
    """Where sockets can be: the folder for temporary files, or another one where its name is too
    long for them.
    """
    preferred = tempfile.gettempdir()
    for folder in (preferred, env.get("XDG_RUNTIME_DIR"), "/tmp"):
        if (
            folder is not None
            and len(os.fsencode(folder)) + _OWN_BYTES <= _MOST_BYTES
            and env.is_writable(Path(folder))
        ):
            return folder
    raise ResourceError(
        f"the folder for temporary files has a path of {len(os.fsencode(preferred))} bytes "
        f"({preferred}); "
        f"sockets in it need one of at most {_MOST_BYTES - _OWN_BYTES}",
        hint="set TMPDIR to a shorter one",
    )


def _remove_abandoned(parent: str) -> None:
    """Remove the folders in `parent` whose makers are gone."""
    for folder in Path(parent).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # not ours, not such a folder, or just removed
            found = folder.lstat()
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if found.st_uid == os.getuid() and time.time() - found.st_mtime > _SECONDS_TO_LOCK:
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
