import json
import re
from typing import Any

import httpx
import pytest

from tests.e2e.api_support import CHAT
from tests.e2e.conftest import MODEL, Server, eventually, shared

KEY = "secret-key-of-the-test"
PROMPT = "Where does the night train to Vienna stop?"
talkative = shared(
    "--log-format json --log-level debug --enable-log-requests --enable-access-log "
    f"--log-stats-interval 0.3 --api-server-count 2 --max-log-len 40 --api-key {KEY}"
)


def records(server: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log.split("\n")[:-1]]


def logged(server: Server, logger: str, **fields: Any) -> list[dict[str, Any]]:
    return [
        record
        for record in records(server)
        if record["logger"] == f"negamax.{logger}" and record.items() >= fields.items()
    ]


def test_all_processes_log_like_the_first_which_names_the_page(talkative: Server) -> None:
    assert talkative.ready_line.endswith(f"chat page: {talkative.url}/\n")
    with talkative.http() as http:
        page = http.get("/", auth=("any", KEY))
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    (table,) = logged(talkative, "engine.core.setup", level="debug")
    assert table["message"].startswith("kernels:")
    assert table["pid"] == talkative.engine_pid()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]{12}[+-]\d\d:\d\d", table["time"])


def test_request_is_logged_at_its_begin_and_end_and_never_with_a_key(talkative: Server) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 9, "top_k": 3}
    with talkative.http() as http:
        headers = {"authorization": f"Bearer {KEY}", "x-request-id": "train-1"}
        headers |= {"x-forwarded-for": "203.0.113.9"}  # No proxy with this address was configured.
        asked = http.post(f"{CHAT}?api_key={KEY}", json=body, headers=headers).json()
    assert eventually(lambda: bool(logged(talkative, "api.request_log", path=CHAT)))
    (access,) = logged(talkative, "api.request_log", path=CHAT, x_request_id="train-1")
    assert access["client"].startswith("127.0.0.1:")
    (began,) = logged(talkative, "api.request_log", route=CHAT, x_request_id="train-1")
    assert began["request_id"].startswith(asked["id"])
    assert began["prompt_tokens"] == asked["usage"]["prompt_tokens"]
    assert began["sampling"].items() >= {"max_tokens": 9, "top_k": 3}.items()
    assert "seed" in began["sampling"]  # The log has all that is needed to repeat the request.
    assert len(began["prompt"]) == 41 and "Vienna" not in talkative.log
    ends = logged(talkative, "api.request_log", request_id=began["request_id"])
    (ended,) = [record for record in ends if "finish_reason" in record]
    assert ended["finish_reason"] == asked["choices"][0]["finish_reason"]
    assert ended["output_tokens"] == asked["usage"]["completion_tokens"]
    assert 0 <= ended["queue_s"] <= ended["first_token_s"] <= ended["total_s"]
    (access,) = logged(talkative, "api.request_log", path=CHAT, x_request_id="train-1")
    assert (access["method"], access["status"]) == ("POST", 200)
    assert KEY not in talkative.log


def test_refused_request_is_in_the_logs(talkative: Server) -> None:
    with talkative.http() as http:
        headers = {"authorization": f"Bearer {KEY}"}
        http.post(CHAT, json={"messages": [], "temperature": 9}, headers=headers)
        http.get("/v1/nowhere", headers={"authorization": f"Bearer {KEY}"})
        http.get("/v1/models", headers={"authorization": "Bearer wrong"})
    assert eventually(lambda: len(logged(talkative, "api.request_log", path="/v1/models")) == 1)
    assert logged(talkative, "api.request_log", path="/v1/nowhere")[0]["status"] == 404
    assert logged(talkative, "api.request_log", path="/v1/models")[0]["status"] == 401
    (refused,) = logged(talkative, "api.request_log", route=CHAT, status=400)
    assert "temperature" in refused["reason"] or "messages" in refused["reason"]


def test_one_process_logs_the_load_and_an_idle_server_is_silent(talkative: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
    headers = {"authorization": f"Bearer {KEY}"}

    def has_been_seen() -> bool:
        """Return whether a log line reports a load. A stalled process may write no such line."""
        with talkative.http() as http:
            assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
        lines = [line for line in logged(talkative, "api.load_report") if line["running"]]
        return bool(lines) and max(line["decode_tokens_per_s"] for line in lines) > 0

    assert eventually(has_been_seen)
    assert eventually(lambda: logged(talkative, "api.load_report")[-1]["running"] == 0)
    lines = logged(talkative, "api.load_report")
    assert {line["pid"] for line in lines} == {talkative.process.pid}
    assert max(line["kv_cache_usage"] for line in lines if line["running"]) > 0
    more = len(lines) + 1  # One line may be late.
    assert not eventually(lambda: len(logged(talkative, "api.load_report")) > more, seconds=1)


def test_quiet_server_logs_no_request(server: Server, http: httpx.Client) -> None:
    assert http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2}).status_code == 200
    assert "negamax.api.request_log" not in server.log and "Vienna" not in server.log
    assert "kernels:" not in server.log
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO +negamax\.", server.log)


@pytest.mark.parametrize("path", ["/v1", "/v1/"])
def test_v1_describes_the_server(http: httpx.Client, path: str) -> None:
    described = http.get(path).json()
    assert described["name"] == "negamax" and described["models"] == [MODEL]
    assert described["max_model_len"] == 4096
    assert {"POST /v1/chat/completions", "POST /v1/messages"} <= set(described["endpoints"])
    for endpoint in ("GET /health", "GET /v1/models", "GET /metrics"):
        assert endpoint in described["endpoints"]
        assert http.get(endpoint.split()[1]).status_code == 200
