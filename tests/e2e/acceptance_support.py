from typing import Any

import httpx

from tests.e2e.conftest import MODEL
from tests.e2e.test_api_chat import QUESTION, WEATHER_QUESTION
from tests.e2e.test_api_errors import error_of

CHAT = "/v1/chat/completions"
SHORT: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "temperature": 0}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
}
SECOND = {
    "id": "call_2",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
}
RESULT = {
    "role": "tool",
    "tool_call_id": "call_1",
    "content": '{"temperature": 19, "condition": "cloudy"}',
}
ASKED = [*WEATHER_QUESTION, {"role": "assistant", "content": None, "tool_calls": [CALL]}]


def answered(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post(CHAT, json={**SHORT, "messages": QUESTION, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert answer["usage"]["prompt_tokens"] > 0
    return answer


def refused(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {**SHORT, "messages": QUESTION, **fields}
    assert error_of(http.post(CHAT, json={**body, "stream": True}), 400)
    return error_of(http.post(CHAT, json=body), 400)
