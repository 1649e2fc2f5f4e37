import json
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.conftest import MODEL, serving, talking

PATH = "/v1/shout"
BODY = {"model": MODEL, "prompt": "Tell me.", "max_tokens": 12}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("shout")
    talk = talking(folder, tokens_per_second=1000)
    program = "tests.e2e.example_endpoint"
    with (
        serving(*talk, log_file=folder / "log", program=program) as server,
        server.http() as client,
    ):
        yield client


def test_answers_whole_and_as_a_stream(http: httpx.Client) -> None:
    completion = http.post("/v1/completions", json=BODY).json()
    expected = completion["choices"][0]["text"].upper()
    assert expected
    assert http.post(PATH, json=BODY).json() == {"text": expected}
    stream = http.post(PATH, json={**BODY, "stream": True})
    *events, end = stream.text.strip().split("\n\n")
    assert end == "data: [DONE]"
    texts = [json.loads(event.removeprefix("data: "))["text"] for event in events]
    assert "".join(texts) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"temperature": 9}, "temperature"),
        ({"top_p": "x"}, "top_p"),
    ],
)
def test_fields_are_checked(http: httpx.Client, fields: dict[str, object], param: str) -> None:
    refused = http.post(PATH, json=BODY | fields)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param


def test_is_listed_and_described(http: httpx.Client) -> None:
    assert f"POST {PATH}" in http.get("/v1").json()["endpoints"]
    operation = http.get("/openapi.json").json()["paths"][PATH]["post"]
    assert operation["requestBody"]["required"]
