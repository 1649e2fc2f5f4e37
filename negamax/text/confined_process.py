"""The process of a `text.confined.Confined`: `python -m negamax.text.confined_process FD`.

It loads a template or a tokenizer and forks children, which share its memory. It has one thread,
uses no secrets, and ends with its parent.
"""

import json
import os
import resource
import signal
import socket
import sys
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from negamax.base import env
from negamax.base.errors import NegamaxError
from negamax.base.supervision import exit_now
from negamax.text.chat_template import ChatTemplate
from negamax.text.confined import (
    BYTES,
    ERROR,
    JSON,
    LOAD_BYTES,
    LOAD_SECONDS,
    TEXT,
    compute_limits,
    pack,
    receive,
    send,
)
from negamax.text.tokenizer import Tokenizer, TooManyTokensError, Way

_KEPT_VARIABLES = ("TZ", "LANG", "LC_ALL", "LC_TIME")
_LONGEST_JOB = 1 << 30  # bytes; a server limits its bodies

Functions = Mapping[str, Callable[..., object]]


def load(kind: str, *setup: Any) -> tuple[object, Functions]:
    """Return the facts and the functions of a "chat template" (source, variables, name) or a
    "tokenizer" (folder). Errors: `CheckpointError`.
    """
    if kind == "tokenizer":
        tokenizer = Tokenizer.from_folder(Path(setup[0]), is_trusted=True)

        def encode(parts: list[str], way: Way, max_tokens: int | None) -> int | bytes:
            """Return the counts and then the ids of the parts, or how many are too many."""
            try:
                found = tokenizer.encode_parts(parts, way=way, max_tokens=max_tokens)
            except TooManyTokensError as error:
                return error.count
            counts = array("I", map(len, found))
            return b"".join(ids.tobytes() for ids in (counts, *found))

        return None, {"encode": encode}
    source, variables, origin = setup
    template = ChatTemplate(source, variables=variables, origin=origin)
    facts = [sorted(template.variables), template.has_root_role, template.shows_earlier_thinking]
    return facts, {"render": template.render_values}


def main(fd: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps children
    env.keep_variables(_KEPT_VARIABLES)
    env.set_variable("TOKENIZERS_PARALLELISM", "false")
    control = socket.socket(fileno=fd)
    _, setup = receive(control, most=_LONGEST_JOB)
    _limit(LOAD_SECONDS, _address_space() + LOAD_BYTES)
    try:
        facts, functions = load(*json.loads(setup))
    except NegamaxError as error:
        send(control, ERROR, pack([error.message, error.hint, error.param]))
        return
    _limit(0.0, None)
    send(control, JSON, pack(facts))
    while True:
        asked, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not asked:
            return
        if os.fork() == 0:
            control.close()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries print where they failed
            serve(socket.socket(fileno=fds[0]), functions)
        os.close(fds[0])


def serve(connection: socket.socket, functions: Functions) -> None:
    """Answer calls until the parent closes the connection; any failure ends this process."""
    base = _address_space()
    try:
        while True:
            _, job = receive(connection, most=_LONGEST_JOB)
            seconds, memory, most = compute_limits(len(job))
            _limit(seconds, base + memory)
            kind, answer = _answer(functions, job)
            _limit(0.0, None)
            if len(answer) > most:
                break
            send(connection, kind, answer)
    except BaseException:  # of Rust's panics, too
        pass
    exit_now(1)


def _answer(functions: Functions, job: bytearray) -> tuple[bytes, bytes]:
    function, *arguments = json.loads(job)
    try:
        found = functions[function](*arguments)
    except NegamaxError as error:
        return ERROR, pack([error.message, error.hint, error.param])
    except RecursionError:
        return ERROR, pack(["the messages or tools are nested too deeply", None, "messages"])
    if isinstance(found, str):
        return TEXT, found.encode("utf-8", "surrogatepass")
    return (BYTES, found) if isinstance(found, bytes) else (JSON, pack(found))


def _address_space() -> int:
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _limit(seconds: float, num_bytes: int | None) -> None:
    """Let the kernel end this process after `seconds` of processor time (0: never), and refuse it
    more than `num_bytes` of memory (None: any size; only Linux refuses).
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        if num_bytes is None or num_bytes > hard != resource.RLIM_INFINITY:
            num_bytes = hard
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))


if __name__ == "__main__":
    main(int(sys.argv[1]))
