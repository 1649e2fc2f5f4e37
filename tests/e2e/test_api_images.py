import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.e2e.api_support import CHAT, WEATHER
from tests.e2e.conftest import STUB, Server, serving

TEMPLATE = """\
{% macro show(content) %}{% if content is string %}{{ content }}{% else %}\
{% for part in content %}{% if part.type == 'image' %}]<]image[>[{% else %}{{ part.text }}\
{% endif %}{% endfor %}{% endif %}{% endmacro %}\
{% for message in messages %}{{ message.role }}: {{ show(message.content) }}
{% endfor %}"""
TOKENS = 32 + 2  # tokens of the image below and its markers


def make_url(width: int = 224, height: int = 112) -> str:
    stream = io.BytesIO()
    Image.effect_noise((width, height), 50).save(stream, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


URL = make_url()
SOURCE = {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}
TEXT = {"type": "text", "text": "a picture"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("images")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STUB_VISION", "1")
        options = ("--chat-template", str(template))
        started: dict[str, Any] = {"model": "nano-m3", "program": STUB, "is_forked": False}
        with serving(*options, log_file=folder / "log", **started) as running:
            yield running
            assert "Traceback" not in running.log


def count(http: httpx.Client, path: str, body: dict[str, Any]) -> int:
    response = http.post(path, json={"model": "nano-m3", **body})
    assert response.status_code == 200, response.text
    usage = response.json().get("usage", {})
    return int(usage.get("prompt_tokens") or usage["input_tokens"])


def chat(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 2}


CHAT_IMAGE = {"type": "image_url", "image_url": {"url": URL}}


def test_chats_count_image_tokens(http: httpx.Client) -> None:
    without = count(http, CHAT, chat(TEXT))
    assert count(http, CHAT, chat(TEXT, CHAT_IMAGE)) == without + TOKENS
    assert count(http, CHAT, chat(TEXT, CHAT_IMAGE, CHAT_IMAGE)) == without + 2 * TOKENS
    body = chat(TEXT, CHAT_IMAGE)
    counted = http.post("/tokenize", json={"messages": body["messages"]}).json()
    assert counted["count"] == without + TOKENS
    assert counted["tokens"].count(4121) == TOKENS - 2


def test_messages_and_their_tool_results_have_images(http: httpx.Client) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}}

    def body(*shown: Any) -> dict[str, Any]:
        result = {"type": "tool_result", "tool_use_id": "t1", "content": [TEXT, *shown, TEXT]}
        return {
            "messages": [
                {"role": "user", "content": [TEXT, *shown]},
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result]},
            ],
            "tools": [{"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}],
        }

    image = {"type": "image", "source": SOURCE}
    with_images = count(http, "/v1/messages", {**body(image), "max_tokens": 2})
    without = count(http, "/v1/messages", {**body(), "max_tokens": 2})
    assert with_images in range(without + 2 * TOKENS - 1, without + 2 * TOKENS + 2)
    counted = http.post("/v1/messages/count_tokens", json={"model": "nano-m3", **body(image)})
    assert counted.json() == {"input_tokens": with_images}


def test_responses_and_their_tool_results_have_images(http: httpx.Client) -> None:
    text, image = {"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": URL}
    call = {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"}

    def body(*shown: Any) -> dict[str, Any]:
        result = {"type": "function_call_output", "call_id": "c", "output": [text, *shown]}
        message = {"role": "user", "content": [text, *shown]}
        return {"input": [message, call, result], "max_output_tokens": 16, "store": False}

    without = count(http, "/v1/responses", body())
    assert count(http, "/v1/responses", body(image)) == without + 2 * TOKENS


def test_a_stored_response_keeps_its_images(http: httpx.Client) -> None:
    image = {"type": "input_image", "image_url": make_url(1024, 1024)}
    first = {"input": [{"role": "user", "content": [image]}], "max_output_tokens": 16}
    stored = http.post("/v1/responses", json={"model": "nano-m3", **first}).json()
    again = {"input": "go on", "previous_response_id": stored["id"], "max_output_tokens": 16}
    assert count(http, "/v1/responses", again) > 1369


@pytest.mark.parametrize(
    ("url", "status", "problem"),
    [
        ("data:image/png;base64,AAAA", 400, "cannot be decoded"),
        ("http://169.254.169.254/latest", 400, "opens no URLs"),
        ("file:///etc/passwd", 400, "neither a data URL"),
        (make_url(1, 300), 400, "at most 200 times"),
    ],
)
def test_refusals_name_the_part_in_each_dialect(
    http: httpx.Client, url: str, status: int, problem: str
) -> None:
    image = {"type": "image_url", "image_url": {"url": url}}
    message = [{"role": "user", "content": "a"}, {"role": "user", "content": [TEXT, image]}]
    source = {"type": "url", "url": url}
    block = {"type": "image", "source": source}
    last = [{"role": "user", "content": [TEXT, block]}]
    item = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
    for path, body, place in (
        (CHAT, {"messages": message}, "messages[1].content[1]"),
        ("/v1/messages", {"messages": last, "max_tokens": 2}, "messages[0].content[1]"),
        ("/v1/responses", {"input": [item]}, "input[0].content[0]"),
    ):
        response = http.post(path, json={"model": "nano-m3", **body})
        assert response.status_code == status, response.text
        text = response.json()["error"]["message"]
        assert problem in text and place in text, text


def test_bodies_may_have_64_mib_and_the_server_lives_on(http: httpx.Client) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:;base64," + "A" * (45 << 20)}}
    response = http.post(CHAT, json={"model": "nano-m3", **chat(image)})
    assert response.status_code == 413 and "messages[0].content[0]" in response.text
    video = {"type": "video_url", "video_url": {"url": "data:,"}}
    refused = http.post(CHAT, json={"model": "nano-m3", **chat(video)})
    assert refused.status_code == 400 and "does not read videos" in refused.text
    assert count(http, CHAT, chat(CHAT_IMAGE)) > TOKENS
