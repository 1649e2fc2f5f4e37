import httpx
import pytest

from tests.e2e.api_support import COMPLETIONS, error_of, join, post, stream
from tests.e2e.conftest import MODEL, shared

PATH = "/v1/shout"
BODY = {"model": MODEL, "prompt": "Tell me.", "max_tokens": 12}
WRONG = [("temprature", 1), ("temperature", 9), ("top_p", "x")]
server = shared(program="tests.e2e.example_endpoint", rate=1000)


def test_answers_whole_and_as_a_stream_and_is_listed(http: httpx.Client) -> None:
    expected = post(http, COMPLETIONS, **BODY)["choices"][0]["text"].upper()
    assert expected
    assert post(http, PATH, **BODY) == {"text": expected}
    assert join(stream(http, PATH, **BODY), "text") == expected
    assert f"POST {PATH}" in http.get("/v1").json()["endpoints"]
    assert http.get("/openapi.json").json()["paths"][PATH]["post"]["requestBody"]["required"]


@pytest.mark.parametrize(("param", "value"), WRONG)
def test_fields_are_checked(http: httpx.Client, param: str, value: object) -> None:
    error_of(http.post(PATH, json=BODY | {param: value}), 400, param=param)
