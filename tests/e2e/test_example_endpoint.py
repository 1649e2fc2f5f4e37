from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.api_support import COMPLETIONS, error_of, join, post, stream
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
    expected = post(http, COMPLETIONS, **BODY)["choices"][0]["text"].upper()
    assert expected
    assert post(http, PATH, **BODY) == {"text": expected}
    assert join(stream(http, PATH, **BODY), "text") == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"temperature": 9}, "temperature"),
        ({"top_p": "x"}, "top_p"),
    ],
)
def test_fields_are_checked(http: httpx.Client, fields: dict[str, object], param: str) -> None:
    error_of(http.post(PATH, json=BODY | fields), 400, param=param)


def test_is_listed_and_described(http: httpx.Client) -> None:
    assert f"POST {PATH}" in http.get("/v1").json()["endpoints"]
    operation = http.get("/openapi.json").json()["paths"][PATH]["post"]
    assert operation["requestBody"]["required"]
