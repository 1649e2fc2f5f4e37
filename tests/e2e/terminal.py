import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator

_SECONDS = 120.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\][^\x07]*\x07|\x1b[=>]")


class Terminal:
    """Type into a command and read its output. Only one test may use a terminal."""

    def __init__(self, process: subprocess.Popen[bytes], controller: int) -> None:
        self.process = process
        self._controller = controller
        self.raw = ""  # all output so far, including escape sequences

    @property
    def text(self) -> str:
        return _ESCAPES.sub("", self.raw).replace("\r", "")

    def type(self, text: str) -> None:
        os.write(self._controller, text.encode())

    def wait_for(self, words: str, *, count: int = 1) -> str:
        self._read_until(lambda: self.text.count(words) >= count, words)
        return self.text

    def say(self, line: str, words: str, *, count: int = 1) -> str:
        self.type(f"{line}\n")
        return self.wait_for(words, count=count)

    def interrupt(self, words: str) -> None:
        """Press Ctrl-C until `words` are shown.

        Python ignores a Ctrl-C that arrives just before the command begins to wait.
        """
        for _ in range(10):
            self.type("\x03")
            deadline = time.monotonic() + 10.0
            while (left := deadline - time.monotonic()) > 0 and self._read(left):
                if words in self.text:
                    return
        raise AssertionError(f"{words!r} was not shown:\n{self.text}")

    def wait_for_prompt(self) -> None:
        """Read until the command waits for a line, since earlier input is handled differently."""
        self._read_until(lambda: self.text.endswith("> "), "> ")

    def end(self) -> int:
        deadline = time.monotonic() + _SECONDS
        while self._read(max(0.0, deadline - time.monotonic())):
            pass
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def _read_until(self, is_shown: Callable[[], bool], words: str) -> None:
        deadline = time.monotonic() + _SECONDS
        while not is_shown():
            left = deadline - time.monotonic()
            assert left > 0, f"{words!r} was not shown:\n{self.text}"
            assert self._read(left), f"the command ended before {words!r}:\n{self.text}"

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._controller], [], [], seconds)
        if not ready:
            return seconds > 0 and self.process.poll() is None
        try:
            data = os.read(self._controller, 65536)
        except OSError:  # Linux reports the closed other end.
            return False
        self.raw += data.decode("utf-8", "replace")
        return bool(data)


@contextlib.contextmanager
def in_terminal(
    *arguments: str, env: dict[str, str] | None = None, rows: int = 40, columns: int = 100
) -> Iterator[Terminal]:
    controller, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "negamax", *arguments],
        stdin=end,
        stdout=end,
        stderr=end,
        env={**os.environ, "TERM": "xterm-256color", **(env or {})},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C becomes SIGINT.
    )
    os.close(end)
    try:
        yield Terminal(process, controller)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(controller)
