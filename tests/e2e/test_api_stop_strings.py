from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.test_api_chat import QUESTION

if TYPE_CHECKING:
    import openai

THOUGHT_STOP = "\n"  # in the thinking, not in the content
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def whole(server: Any) -> tuple[str, str]:
    with server.openai() as client:
        message = client.chat.completions.create(messages=QUESTION, **GREEDY).choices[0].message
    return message.model_extra["reasoning"], message.content


def read(
    http: httpx.Client, path: str, body: dict[str, Any], *, is_streamed: bool
) -> tuple[str, str, Any]:
    """Return thinking, content, and the reported stop string (Responses report none)."""
    response = http.post(path, json={**GREEDY, **body, "stream": is_streamed})
    assert response.status_code == 200, response.text
    events = (
        [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        if is_streamed
        else []
    )
    if path == "/v1/responses":
        items = (events[-1]["response"] if is_streamed else response.json())["output"]
        told = "".join(
            event["delta"] for event in events if event["type"] == "response.output_text.delta"
        )
        thought, said = (item["content"][0]["text"] for item in items)
        assert told == said or not is_streamed
        return thought, said, body["stop"][0]
    if path == "/v1/messages":
        if not is_streamed:
            thought, said = response.json()["content"]
            return thought["thinking"], said["text"], response.json()["stop_sequence"]
        deltas = [
            event["delta"]
            for event in events
            if event["type"] in ("content_block_delta", "message_delta")
        ]
        thought, said = (
            "".join(delta.get(key, "") for delta in deltas) for key in ("thinking", "text")
        )
        return thought, said, deltas[-1]["stop_sequence"]
    choices = (
        [event["choices"][0] for event in events] if is_streamed else response.json()["choices"]
    )
    messages = [choice.get("delta", choice.get("message")) for choice in choices]
    thought, said = (
        "".join(message.get(key) or "" for message in messages) for key in ("reasoning", "content")
    )
    return thought, said, choices[-1]["stop_reason"]


def body_for(path: str, stop: list[str]) -> dict[str, Any]:
    if path == "/v1/responses":
        return {"input": QUESTION, "stop": stop}
    if path == "/v1/messages":
        return {"messages": QUESTION, "stop_sequences": stop, "max_tokens": 300}
    return {"messages": QUESTION, "stop": stop}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_stop_strings_end_content_but_not_thinking(
    http: httpx.Client, whole: tuple[str, str], path: str, is_streamed: bool
) -> None:
    thought, said = whole
    assert THOUGHT_STOP in thought and THOUGHT_STOP not in said
    assert read(http, path, body_for(path, [THOUGHT_STOP]), is_streamed=is_streamed)[:2] == (
        thought,
        said,
    )
    word = said.split()[-1][-3:]  # it may occur in the thinking, too
    cut = read(http, path, body_for(path, [word, THOUGHT_STOP]), is_streamed=is_streamed)
    assert cut == (thought, said.partition(word)[0], word)


def test_the_stop_string_is_kept_on_request(http: httpx.Client, whole: tuple[str, str]) -> None:
    word = whole[1].split()[-1][-3:]
    body = body_for("/v1/chat/completions", [word]) | {"include_stop_str_in_output": True}
    for is_streamed in (False, True):
        said = read(http, "/v1/chat/completions", body, is_streamed=is_streamed)[1]
        before, _, _ = whole[1].partition(word)
        assert said == before + word


@pytest.mark.parametrize("thinking", ["disabled", "adaptive"])
def test_answers_without_thinking_end_at_once(client: openai.OpenAI, thinking: str) -> None:
    body = {"thinking": {"type": thinking}, "stream_interval": 50}
    options: dict[str, Any] = {"messages": QUESTION, "n": 2, "temperature": 0, "extra_body": body}
    plain = client.chat.completions.create(model=MODEL, **options).choices[0].message.content or ""
    word = plain.split()[1]
    for choice in client.chat.completions.create(model=MODEL, stop=[word], **options).choices:
        assert choice.message.content == plain.partition(word)[0] and choice.finish_reason == "stop"


def test_completions_stop_within_thinking_text(http: httpx.Client, whole: tuple[str, str]) -> None:
    prompt = http.post("/v1/chat/completions/render", json={"messages": QUESTION}).json()["prompt"]
    body = {**GREEDY, "prompt": prompt, "max_tokens": 200, "stop": THOUGHT_STOP}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    assert (
        choice["text"] == whole[0].partition(THOUGHT_STOP)[0]
        and choice["stop_reason"] == THOUGHT_STOP
    )
