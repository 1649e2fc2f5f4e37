import concurrent.futures
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.attacks.concurrent_client import unnoticed
from tests.e2e.conftest import Server, eventually

CHAT, GENERATE = "/v1/chat/completions", "/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "Hello"}]
GAP = 0.5  # seconds, for bodies of the gate's sizes
FULL_GAP = 1.0
MiB = 2**20


@pytest.fixture
def server(talker: Server) -> Server:
    return talker


def listed(element: str, count: int) -> str:
    return f"[{','.join([element] * count)}]"


def body(listed_field: str, value: str, **fields: Any) -> bytes:
    return f'{json.dumps(fields)[:-1]}{", " if fields else ""}"{listed_field}": {value}}}'.encode()


def wrong_lists(count: int) -> dict[str, tuple[str, bytes]]:
    wrong = listed("true", count)
    chat: dict[str, Any] = {"model": "nano", "messages": HELLO, "max_tokens": 1}
    return {
        "input_ids": (GENERATE, body("input_ids", wrong)),
        "text": (GENERATE, body("text", wrong)),
        "sampling_params": (GENERATE, body("sampling_params", wrong, text="x")),
        "rid": (GENERATE, body("rid", wrong, text="x")),
        "allowed_token_ids": (CHAT, body("allowed_token_ids", wrong, **chat)),
        "guided_choice": (CHAT, body("guided_choice", wrong, **chat)),
        "stop": (CHAT, body("stop", wrong, **chat)),
        "tools": (CHAT, body("tools", wrong, **chat)),
        "messages": (CHAT, body("messages", wrong)),
        "input": (RESPONSES, body("input", wrong)),
        "include": (RESPONSES, body("include", wrong, input="x")),
        "metadata": (RESPONSES, body("metadata", members(count // 4), input="x")),
        "system": (MESSAGES, body("system", wrong, **chat)),
    }


def members(count: int) -> str:
    return json.dumps({str(number): 1 for number in range(count)})


def question(content: str) -> str:
    return f'[{{"role": "user", "content": "{content}"}}]'


def post(server: Server, path: str, content: bytes) -> httpx.Response:
    with server.http() as http:
        return http.post(path, content=content, headers={"content-type": "application/json"})


def resident_bytes(server: Server) -> int:
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * 4096


# number of elements, and limits in seconds for a concurrent client and for the answer
SMALL = pytest.param(400_000, GAP, 1.0, id="small")
LARGEST = pytest.param(3_000_000, FULL_GAP, 3.0, id="largest", marks=pytest.mark.full)


@pytest.mark.parametrize("name", wrong_lists(1))
@pytest.mark.parametrize(("count", "gap", "seconds"), [SMALL, LARGEST])
def test_list_of_wrong_elements_is_refused_at_once(
    server: Server, name: str, count: int, gap: float, seconds: float
) -> None:
    before = resident_bytes(server)
    wrong = wrong_lists(count)[name]
    answer = unnoticed(server, lambda: post(server, *wrong), gap=gap, seconds=seconds)
    assert answer.status_code == 400 and len(answer.content) < 1000
    assert resident_bytes(server) - before < 200 * MiB


def expensive_bodies(scale: int) -> dict[str, tuple[str, bytes]]:
    """Return paths and bodies by name, with much to decode. `scale` 1 is the largest size."""
    chat: dict[str, Any] = {"model": "nano", "messages": HELLO, "max_tokens": 1}
    text = 30 * MiB // scale
    inner = f'[{{"role": "user", "content": "x", "more": {listed("[]", 200_000 // scale)}}}]'
    return {
        "numbers": (GENERATE, body("input_ids", listed("1", 7_500_000 // scale))),
        "numbers within the limit": (GENERATE, body("input_ids", listed("1", 1_000_000 // scale))),
        "prompts": (GENERATE, body("input_ids", listed(listed("1", 10_000), 100 // scale))),
        "ignored numbers": (CHAT, body("metadata", listed("1", 7_500_000 // scale), **chat)),
        "ignored text": (CHAT, body("metadata", f'"{"x" * text}"', **chat)),
        "unknown members": (CHAT, body("made_up", members(200_000 // scale), **chat)),
        "lists": (CHAT, body("messages", listed("[]", 200_000 // scale))),
        "objects": (CHAT, body("messages", listed("{}", 200_000 // scale))),
        "members": (CHAT, body("chat_template_kwargs", members(200_000 // scale), **chat)),
        "lists in a message": (CHAT, body("messages", inner, model="nano", max_tokens=1)),
        "text": (CHAT, body("messages", question("word " * (text // 5)))),
        "escapes": (CHAT, body("messages", question("\\n" * (text // 2)))),
        "instructions": (RESPONSES, body("instructions", f'"{"a" * text}"', input="x")),
        "system": (MESSAGES, body("system", f'"{"a" * text}"', **chat)),
    }


@pytest.mark.parametrize("name", expensive_bodies(1000))
@pytest.mark.parametrize(
    ("scale", "gap"), [(5, GAP), pytest.param(1, FULL_GAP, marks=pytest.mark.full)]
)
def test_expensive_bodies_stall_no_other(server: Server, name: str, scale: int, gap: float) -> None:
    body = expensive_bodies(scale)[name]
    answer = unnoticed(server, lambda: post(server, *body), gap=gap)
    assert answer.status_code in (200, 400) or (scale == 1 and answer.status_code == 413)


def test_ignored_fields_are_not_kept_while_the_answer_is_written(server: Server) -> None:
    long = {"model": "nano", "messages": HELLO, "max_tokens": 300, "ignore_eos": True}
    content = body("metadata", listed('"xyz"', 1_000_000), **long)
    before = resident_bytes(server)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, server, CHAT, content)
        # The server has received and read the body.
        assert eventually(lambda: server.gauge("vllm:num_requests_running") == 1)
        grown = resident_bytes(server) - before
        assert not answer.done()
        assert answer.result().status_code == 200 and grown < 32 * MiB
