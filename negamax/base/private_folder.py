"""Create private folders for the sockets and shared files of one process tree.

The creating process holds a lock on a file in its folder. The creation of a folder also removes
unlocked folders that killed processes have left.
"""

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
_MOST_BYTES = 103  # Longest path of a socket on macOS, in bytes; Linux allows 107 bytes.
# `_OWN_BYTES`: longest path of a socket, relative to the private folder's parent, in bytes.
_OWN_BYTES = len(f"/{_PREFIX}12345678/requests-63")
_SECONDS_TO_LOCK = 10.0  # Age in seconds at which an unlocked folder is removed.


class PrivateFolder:
    """A new folder, which `remove` deletes. Raises `ResourceError` if its path is too long."""

    def __init__(self) -> None:
        parent = _parent()
        _remove_abandoned(parent)
        self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        self._lock = os.open(f"{self.path}/{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove the folder and its content. Calls after the first call have no effect."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _parent() -> str:
    """Return a writable parent folder with a path that is short enough for sockets."""
    preferred = tempfile.gettempdir()
    longest = _MOST_BYTES - _OWN_BYTES
    for folder in (preferred, env.get("XDG_RUNTIME_DIR"), "/tmp"):
        if folder and len(os.fsencode(folder)) <= longest and env.is_writable(Path(folder)):
            return folder
    raise ResourceError(
        f"the folder for temporary files has a path of {len(os.fsencode(preferred))} bytes "
        f"({preferred}); sockets in the folder need a path of at most {longest} bytes",
        hint="set TMPDIR to a folder with a shorter path",
    )


def _remove_abandoned(parent: str) -> None:
    """Remove private folders in `parent` whose creating process has ended."""
    for folder in Path(parent).glob(f"{_PREFIX}*"):
        # An error means that the folder belongs to another user or program, or was just removed.
        with contextlib.suppress(OSError):
            found = folder.lstat()
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if found.st_uid == os.getuid() and time.time() - found.st_mtime > _SECONDS_TO_LOCK:
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
