"""Main module of the process that `Confined` starts (`python -m negamax.text.confined_process FD`).

The process loads a template, a tokenizer or the image decoder, and forks children that share its
memory. The process has one thread and ends when its parent ends.
"""

import gc
import json
import os
import resource
import signal
import sys
from array import array
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

from negamax.base import env
from negamax.base.errors import NegamaxError
from negamax.base.supervision import exit_now
from negamax.text import confined
from negamax.text.chat_template import ChatTemplate
from negamax.text.tokenizer import Tokenizer


def load(kind: str, *setup: Any) -> tuple[object, Callable[..., bytes]]:
    """Load the code of `kind`. Return a template's properties, and the function that answers calls.

    `setup` is (source, variables, name) for a "chat template", (folder) for a "tokenizer", and
    empty for an "image decoder". Raises `CheckpointError` if loading fails.
    """
    if kind == confined.IMAGE_DECODER:
        from negamax.images.decode import decode_image  # slow: imports Pillow

        return None, decode_image
    if kind == "tokenizer":
        tokenizer = Tokenizer.from_folder(Path(setup[0]), is_trusted=True)

        def encode(parts: list[str]) -> bytes:
            """Return uint32 numbers: the number of token ids of each part, then all token ids."""
            found = tokenizer.encode_parts(parts)
            return b"".join(ids.tobytes() for ids in (array("I", map(len, found)), *found))

        return None, encode
    source, variables, origin = setup
    template = ChatTemplate(source, variables=variables, origin=origin)

    def render(*arguments: Any) -> bytes:
        return template.render_values(*arguments).encode("utf-8", "surrogatepass")

    facts = [sorted(template.variables), template.has_root_role, template.shows_earlier_thinking]
    return facts, render


def main(fd: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    env.set_variable("TOKENIZERS_PARALLELISM", "false")
    control = Connection(fd)
    setup = json.loads(control.recv_bytes())
    _limit(confined.LOAD_SECONDS, confined.LOAD_BYTES)
    try:
        facts, function = load(*setup)
    except NegamaxError as error:
        control.send_bytes(confined.pack_error(error))
        return
    signal.setitimer(signal.ITIMER_PROF, 0)
    gc.freeze()  # so that garbage collection in children does not copy all memory pages
    control.send_bytes(confined.ANSWER + json.dumps(facts).encode())
    with suppress(EOFError):
        while True:
            handle = recv_handle(control)
            if os.fork() == 0:
                control.close()
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hide the error output of libraries
                serve(Connection(handle), setup[0], function)
            os.close(handle)


def serve(connection: Connection, kind: str, function: Callable[..., bytes]) -> None:
    """Answer calls until the parent closes the connection. Any failure ends this process."""
    try:
        while True:
            job = connection.recv_bytes()
            seconds, memory, most = confined.compute_limits(kind, len(job))
            _limit(seconds, memory)
            try:
                answer = confined.ANSWER + function(*json.loads(job))
            except NegamaxError as error:
                answer = confined.pack_error(error)
            if len(answer) > most:
                break
            connection.send_bytes(answer)
    except BaseException:  # a panic of a Rust library is a `BaseException` but not an `Exception`
        pass
    exit_now(1)


def _limit(seconds: float, num_bytes: int) -> None:
    """Limit this process to `seconds` of processor time and `num_bytes` of additional memory.

    The operating system ends the process after `seconds`. The limit of memory works only on Linux.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = used + num_bytes if hard == resource.RLIM_INFINITY else min(used + num_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


if __name__ == "__main__":
    main(int(sys.argv[1]))
