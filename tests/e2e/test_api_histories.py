"""Content that every route must accept in a history, since agents resend it."""

import json
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import MODEL

RENDER = "/v1/chat/completions/render"
IMAGE = "[an image, which this model cannot see]"
PIXEL = "data:image/png;base64,AAAA"
CUT = '{"path": "a", "content": "abc'
TOOL = {"name": "write", "description": "Write a file.", "parameters": {"type": "object"}}
RAW_SMILE = rb"half \ud83d of \ude00 a \ud83d\ude00"


def chat(arguments: str = CUT) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "write", "arguments": arguments}}
    image = {"type": "image_url", "image_url": {"url": PIXEL}}
    return {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Look:"}, image]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {
                "role": "tool",
                "tool_call_id": "c1",
                "content": [{"type": "text", "text": "half SMILE"}, image],
            },
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "max_tokens": 2,
    }


def anthropic_messages() -> dict[str, Any]:
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
    }
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [image, {"type": "text", "text": "half SMILE"}],
    }
    return {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Look:"}, image]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t1", "name": "write", "input": CUT}],
            },
            {"role": "user", "content": [result, image]},
        ],
        "tools": [{"name": "write", "input_schema": {"type": "object"}}],
        "model": MODEL,
        "max_tokens": 2,
    }


def responses() -> dict[str, Any]:
    image = {"type": "input_image", "image_url": PIXEL, "detail": "auto"}
    return {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Look:"}, image]},
            {"type": "function_call", "call_id": "c1", "name": "view_image", "arguments": CUT},
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": [{"type": "input_text", "text": "half SMILE"}, image],
            },
        ],
        "tools": [{"type": "function", **TOOL}],
        "max_output_tokens": 2,
    }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat()),
        ("/v1/messages", anthropic_messages()),
        ("/v1/responses", responses()),
    ],
    ids=["chat", "messages", "responses"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_images_truncated_calls_and_lone_surrogates_are_accepted(
    http: httpx.Client, path: str, body: dict[str, Any], stream: bool
) -> None:
    content = json.dumps({**body, "stream": stream}).encode().replace(b"half SMILE", RAW_SMILE)
    assert b"\\ud83d of" in content
    answer = http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    assert "error" not in answer.text or '"error":null' in answer.text


def test_prompt_has_notes_raw_arguments_and_replacement_characters(http: httpx.Client) -> None:
    content = json.dumps(chat()).encode().replace(b"half SMILE", RAW_SMILE)
    prompt = http.post(
        RENDER, content=content, headers={"content-type": "application/json"}
    ).json()["prompt"]
    assert f"Look:\n{IMAGE}" in prompt
    assert f'<parameter name="arguments">{CUT}</parameter>' in prompt
    assert (
        f"<response>half \ufffd of \ufffd a \U0001f600\n</response>\n<response>{IMAGE}\n</response>"
        in prompt
    )


@pytest.mark.parametrize("arguments", ["null", "", "{}"])
def test_a_call_without_arguments_has_none_in_the_prompt(
    http: httpx.Client, arguments: str
) -> None:
    prompt = http.post(RENDER, json=chat(arguments)).json()["prompt"]
    assert (
        '<invoke name="write">' in prompt
        and "<parameter" not in prompt.rpartition('<invoke name="write">')[2]
    )
