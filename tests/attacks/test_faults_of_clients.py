"""Check that nonsensical requests are client errors, never a 500 or a log line."""

import itertools
from typing import Any

import httpx
import pytest

from tests.attacks.test_tenants_of_several_processes import BY_ID
from tests.e2e.conftest import Server, shared

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "x"}
NO_IDS = (
    "x-1", "resp_-f", "x+1", "x 1", "x_1", "-1", "0x", "٣٣", "%2d1",
    "%0a2026-01-01%20ERROR%20forged-1",
)  # fmt: skip
WRONG: tuple[Any, ...] = (
    None, True, 0, 1.5, "x", "", [], [1], [None], ["a"], {}, [{}], [[]], [{"id": "1"}],
    [{"function": {}}],
    [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
)  # fmt: skip


two = shared("--api-server-count 2", rate=100)


@pytest.mark.parametrize("count", [1, 2])
def test_ids_of_nothing_are_not_found(request: pytest.FixtureRequest, count: int) -> None:
    server: Server = request.getfixturevalue("server" if count == 1 else "two")
    with server.http() as http:
        for response_id in NO_IDS:
            place = f"/v1/responses/{response_id}"
            answers = [http.request(method, f"{place}{end}") for method, end in BY_ID]
            for body in (
                {"input": "x", "previous_response_id": response_id},
                {"input": [{"type": "item_reference", "id": response_id}]},
            ):
                ends = ("", "/input_tokens")
                answers += [http.post(f"/v1/responses{end}", json=body) for end in ends]
            assert {answer.status_code for answer in answers} == {404}, response_id
    assert not [line for line in server.log.splitlines() if line.startswith("2026-01-01 ERROR")]


@pytest.mark.parametrize("role", ["system", "developer", "user", "root"])
def test_refuses_calls_of_others_than_the_assistant(http: httpx.Client, role: str) -> None:
    for calls, lead in itertools.product(WRONG, ([], [USER])):
        message = {"role": role, "content": "x", "tool_calls": calls}
        answer = http.post(CHAT, json={"messages": [*lead, message, USER], "max_tokens": 1})
        assert answer.status_code == (200 if calls in (None, []) else 400), (calls, answer.text)
        if answer.status_code == 400:
            assert answer.json()["error"]["param"] == f"messages[{len(lead)}].tool_calls"
