"""Child processes: how they are started, and that they never outlive their parent."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import NoReturn


def spawn(module: str, *args: str) -> subprocess.Popen[bytes]:
    """Start `python -m module args` in a session of its own (a terminal's Ctrl-C reaches the parent only).

    The child's standard input is a pipe that nobody writes: it reaches its end when the parent is gone, by whatever cause.
    """
    return subprocess.Popen([sys.executable, "-m", module, *args], stdin=subprocess.PIPE, start_new_session=True)


def exit_with_parent() -> None:
    """In a child started by `spawn`: end this process as soon as the parent is gone."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def exit_now(code: int) -> NoReturn:
    """End this process from any of its threads, without waiting for the others."""
    os._exit(code)


def stop(process: subprocess.Popen[bytes], *, timeout: float) -> None:
    """Close the child's input, give it `timeout` seconds to end, then terminate and at last kill it."""
    if process.stdin is not None:
        process.stdin.close()
    for end in (process.terminate, process.kill):
        try:
            process.wait(timeout)
            return
        except subprocess.TimeoutExpired:
            end()
    process.wait()
