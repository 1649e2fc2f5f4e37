import contextlib
import threading
import time
from typing import Any

import httpx
import pytest

from tests.attacks.concurrent_client import unnoticed
from tests.e2e.conftest import Server, eventually

SECONDS = 3.0
MANY = {f"p{i}": {"type": "integer"} for i in range(900)}
FORMS: dict[str, dict[str, Any]] = {
    "nested stars": {"regex": "((([a-z ]*)*)*)*z{5000}"},
    "ambiguous": {"grammar": 'root ::= e\ne ::= e e | "a" | e e e | [a-z]'},
    "left recursion": {"grammar": 'root ::= a "z"\na ::= a b | b a | b\nb ::= b b | [a-z] | ""'},
    "many optional properties": {"json": {"type": "object", "properties": MANY}},
}


def attack(server: Server, form: dict[str, Any], stop: threading.Event, answers: list[str]) -> None:
    """Send streams in turn. Each stream has a different grammar, so that no cache helps."""
    body = {
        "model": "nano", "messages": [{"role": "user", "content": "Hi"}],
        "structured_outputs": form, "chat_template_kwargs": {"enable_thinking": False},
        "thinking_token_budget": 0,
        "max_tokens": 200, "stream": True, "temperature": 1.0, "ignore_eos": True,
    }  # fmt: skip
    with httpx.Client(base_url=server.url, timeout=2.0) as client:
        while not stop.is_set():
            with (
                contextlib.suppress(httpx.TimeoutException),
                client.stream("POST", "/v1/chat/completions", json=body) as answer,
            ):
                for line in answer.iter_lines():
                    answers.append(line)
                    if stop.is_set():
                        return


@pytest.mark.parametrize(
    "name", ["nested stars", *(pytest.param(name, marks=pytest.mark.full) for name in [*FORMS][1:])]
)
def test_slow_masks_delay_no_other_stream(server: Server, http: httpx.Client, name: str) -> None:
    def attack_for_a_while() -> None:
        stop, answers = threading.Event(), list[str]()
        args = (server, FORMS[name], stop, answers)
        attackers = [threading.Thread(target=attack, args=args) for _ in range(2)]
        for thread in attackers:
            thread.start()
        try:
            time.sleep(SECONDS)
            assert eventually(lambda: len(answers) > 3)
        finally:
            stop.set()
            for thread in attackers:
                thread.join(120)

    followed = {"structured_outputs": {"regex": "[a-z ]{4000}"}, "thinking_token_budget": 0}
    unnoticed(server, attack_for_a_while, gap=1.0, **followed)
