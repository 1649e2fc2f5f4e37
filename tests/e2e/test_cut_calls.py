"""On every route, a call truncated by the token limit does not look complete."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.conftest import MODEL, Server
from tests.e2e.test_api_chat import WEATHER, WEATHER_QUESTION, joined_calls, stream
from tests.e2e.test_api_messages import TOOL as ANTHROPIC_TOOL
from tests.e2e.test_api_responses import TOOL as RESPONSES_TOOL

if TYPE_CHECKING:
    import openai

LAST_TOKENS = 16  # tokens at the end of the answer that the tested limits cover
CHAT: dict[str, Any] = {"messages": WEATHER_QUESTION, "tools": [WEATHER], "temperature": 0}


@pytest.fixture(scope="module")
def whole(server: Server) -> tuple[str, int]:
    with server.openai() as client:
        answer = client.chat.completions.create(model=MODEL, **CHAT)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert answer.usage
    return call.function.arguments, answer.usage.completion_tokens


def check_every_limit(whole: tuple[str, int], called: Callable[[int], str | None]) -> None:
    arguments, num_tokens = whole
    num_cut = 0
    for limit in range(num_tokens - LAST_TOKENS, num_tokens):
        made = called(limit)
        if made is None or made == arguments:
            continue
        num_cut += 1
        assert made and arguments.startswith(made)
        with pytest.raises(json.JSONDecodeError):
            json.loads(made)
    assert num_cut >= 3


@pytest.mark.parametrize("is_streamed", [False, True])
def test_chat(client: openai.OpenAI, whole: tuple[str, int], is_streamed: bool) -> None:
    def called(limit: int) -> str | None:
        if is_streamed:
            chunks = stream(client, max_tokens=limit, **CHAT)
            reason, calls = (
                chunks[-1].choices[0].finish_reason,
                [arguments for _, arguments in joined_calls(chunks)],
            )
        else:
            (choice,) = client.chat.completions.create(
                model=MODEL, max_tokens=limit, **CHAT
            ).choices
            reason, calls = (
                choice.finish_reason,
                [call.function.arguments for call in choice.message.tool_calls or ()],
            )
        assert reason == "length"
        return calls[0] if calls else None

    check_every_limit(whole, called)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_responses(client: openai.OpenAI, whole: tuple[str, int], is_streamed: bool) -> None:
    def called(limit: int) -> str | None:
        options: dict[str, Any] = {
            "input": WEATHER_QUESTION,
            "tools": [RESPONSES_TOOL],
            "temperature": 0,
        }
        options |= {"model": MODEL, "max_output_tokens": limit}
        if is_streamed:
            events = list(client.responses.create(stream=True, **options))
            response = events[-1].response
            done = [event.item for event in events if event.type == "response.output_item.done"]
            assert events[-1].type == "response.incomplete" and done == response.output
        else:
            response = client.responses.create(**options)
        assert response.status == "incomplete"
        (call,) = [item for item in response.output if item.type == "function_call"] or (None,)
        if call is None:
            return None
        assert call.status == ("completed" if call.arguments == whole[0] else "incomplete")
        return str(call.arguments)

    check_every_limit(whole, called)


def messages_body(limit: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "max_tokens": limit,
        "messages": WEATHER_QUESTION,
        "tools": [ANTHROPIC_TOOL],
    }


def test_messages_stream_only_what_was_generated(
    http: httpx.Client, whole: tuple[str, int]
) -> None:
    def called(limit: int) -> str | None:
        text = http.post(
            "/v1/messages", json={**messages_body(limit), "temperature": 0, "stream": True}
        ).text
        events = [
            json.loads(line.removeprefix("data: "))
            for line in text.splitlines()
            if line.startswith("data: ")
        ]
        assert events[-2]["delta"]["stop_reason"] == "max_tokens"
        kinds = [
            event["content_block"]["type"]
            for event in events
            if event["type"] == "content_block_start"
        ]
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        parts = [delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta"]
        return "".join(parts) if "tool_use" in kinds else None

    check_every_limit(whole, called)


def test_whole_messages_omit_a_truncated_call(server: Server, whole: tuple[str, int]) -> None:
    import anthropic

    arguments, num_tokens = whole
    num_without = 0
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        for limit in range(num_tokens - LAST_TOKENS, num_tokens):
            message = client.messages.create(extra_body={"temperature": 0}, **messages_body(limit))
            calls = [block for block in message.content if block.type == "tool_use"]
            assert message.stop_reason == "max_tokens"
            assert all(call.input == json.loads(arguments) for call in calls)
            num_without += not calls
    assert num_without >= 3


def test_a_response_continues_after_a_truncated_call(
    client: openai.OpenAI, whole: tuple[str, int]
) -> None:
    options: dict[str, Any] = {"model": MODEL, "tools": [RESPONSES_TOOL], "temperature": 0}
    cut = client.responses.create(input=WEATHER_QUESTION, max_output_tokens=whole[1] - 6, **options)  # type: ignore[arg-type]
    assert cut.output[-1].type == "function_call" and cut.output[-1].status == "incomplete"
    again = client.responses.create(
        previous_response_id=cut.id, input="Please try again.", max_output_tokens=4, **options
    )
    assert again.usage and again.usage.output_tokens == 4
