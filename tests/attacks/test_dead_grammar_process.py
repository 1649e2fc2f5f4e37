import os
import signal
from pathlib import Path

from tests.attacks.concurrent_client import unnoticed
from tests.e2e.api_support import CHAT, HELLO
from tests.e2e.conftest import Server
from tests.e2e.listening import process_tree

REGEX = {"regex": "[a-z ]{600}"}
FOLLOWED = {"messages": HELLO, "structured_outputs": REGEX, "max_tokens": 600}


def kill_grammar_process(server: Server) -> None:
    found = [
        pid
        for pid in process_tree(server.process.pid)
        if b"grammar.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(max(found), signal.SIGKILL)  # The newest process has the highest id.


def test_stream_whose_grammar_process_is_killed_may_be_retried(talker: Server) -> None:
    def attack() -> None:
        with (
            talker.http() as http,
            http.stream("POST", CHAT, json=FOLLOWED | {"stream": True}) as running,
        ):
            lines = running.iter_lines()
            for _ in range(20):
                next(lines)
            kill_grammar_process(talker)
            error, done = [line for line in lines if line][-2:]
        assert "service_unavailable_error" in error and "grammar process ended" in error
        assert done == "data: [DONE]"
        with talker.http() as http:  # These answers come from a new process.
            assert http.post(CHAT, json=FOLLOWED | {"max_tokens": 5}).status_code == 200

    unnoticed(talker, attack, gap=1.0)
