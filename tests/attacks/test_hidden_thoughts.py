"""Check that thoughts within signatures cannot turn a small body into a large prompt."""

from typing import Any

import pytest

from negamax.api.common.thought_signature import ThoughtSigner
from tests.attacks.concurrent_client import unnoticed
from tests.attacks.test_bodies import resident_bytes
from tests.e2e.conftest import MODEL, Server

MiB = 2**20
NUM_BOMBS = 20
BOMB = ThoughtSigner(MODEL).signature("x" * (7 * MiB), is_hidden=True)


def of_messages() -> list[dict[str, Any]]:
    block = {"type": "thinking", "thinking": "", "signature": BOMB}
    answer = {"role": "assistant", "content": [block] * NUM_BOMBS}
    return [{"role": "user", "content": "Go"}, answer]


def of_responses() -> list[dict[str, Any]]:
    reasoning = {"type": "reasoning", "summary": [], "encrypted_content": BOMB}
    return [{"role": "user", "content": "Go"}, *[reasoning] * NUM_BOMBS]


def requests(*, has_gone_on: bool) -> dict[str, dict[str, Any]]:
    """Return bodies by path. If `has_gone_on`, a user message follows, which removes thoughts."""
    more = [{"role": "user", "content": "And now?"}] if has_gone_on else []
    return {
        "/v1/messages": {"model": MODEL, "max_tokens": 1, "messages": of_messages() + more},
        "/v1/responses": {"max_output_tokens": 1, "input": of_responses() + more},
    }


@pytest.mark.parametrize("path", requests(has_gone_on=False))
def test_too_long_hidden_thoughts_are_refused_while_unpacking(server: Server, path: str) -> None:
    before = resident_bytes(server)
    body = requests(has_gone_on=False)[path]
    with server.http() as http:
        answer = unnoticed(server, lambda: http.post(path, json=body), gap=0.5, seconds=1.0)
    assert answer.status_code == 400 and "hidden thinking" in answer.text
    assert resident_bytes(server) - before < 20 * MiB


@pytest.mark.parametrize("path", requests(has_gone_on=True))
def test_thoughts_that_the_prompt_leaves_out_are_not_unpacked(server: Server, path: str) -> None:
    before = resident_bytes(server)
    answer = server.send(path, requests(has_gone_on=True)[path])
    assert answer.status_code == 200
    assert resident_bytes(server) - before < 20 * MiB
