import http.server
import json
import re
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_service

from negamax.cli.main import main
from tests.e2e.api_support import CHAT
from tests.e2e.conftest import MODEL, Server, eventually, serving, shared
from tests.ports import free_port

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
    page = talkative.get("/", auth=("any", KEY))
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    (table,) = logged(talkative, "engine.core.setup", level="debug")
    assert table["message"].startswith("kernels:")
    assert table["pid"] == talkative.engine_pid()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]{12}[+-]\d\d:\d\d", table["time"])


def test_request_is_logged_at_its_begin_and_end_and_never_with_a_key(talkative: Server) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 9, "top_k": 3}
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": "train-1"}
    headers |= {"x-forwarded-for": "203.0.113.9"}  # No proxy with this address was configured.
    asked = talkative.post(f"{CHAT}?api_key={KEY}", body, headers=headers)
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
    headers = {"authorization": f"Bearer {KEY}"}
    talkative.send(CHAT, messages=[], temperature=9, headers=headers)
    talkative.get("/v1/nowhere", headers=headers)
    talkative.get("/v1/models", headers={"authorization": "Bearer wrong"})
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
        talkative.post("/v1/completions", body, headers=headers)
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


TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "top_p": 0.5, "n": 2}


class Collector(http.server.ThreadingHTTPServer):
    """Receive spans while the `with` block runs."""

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), Receiver)
        self.paths, self.services, self.spans = set[str](), set[str](), list[Any]()
        self.done = threading.Event()
        threading.Thread(target=partial(self.serve_forever, 0.02), daemon=True).start()

    def __exit__(self, *error: Any) -> None:
        self.done.set()
        self.shutdown()
        super().__exit__(*error)


class Receiver(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        request = trace_service.ExportTraceServiceRequest()
        request.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
        self.server.paths.add(self.path)
        for resource in request.resource_spans:
            named = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
            self.server.services.add(named["service.name"])
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.send_header("content-length", str(2**30))  # more bytes than a client should read
        self.end_headers()
        self.wfile.write(bytes(2**17))
        self.server.done.wait(60)

    def log_message(self, *args: Any) -> None:
        """Do nothing, so that requests are not logged."""


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for entry in span.attributes:
        kind = entry.value.WhichOneof("value")
        value = getattr(entry.value, kind)
        is_list = kind == "array_value"
        found[entry.key] = [v.string_value for v in value.values] if is_list else value
    return found


def test_spans_are_sent_and_requests_succeed_without_a_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    path, log_file = "/v1/chat/completions", tmp_path / "log"
    options = ("--otlp-traces-endpoint", endpoint, "--log-format", "json")
    with serving(*options, log_file=log_file, rate=100) as server, server.http() as http_client:
        for _ in range(3):  # No collector listens yet.
            assert http_client.post(path, json=BODY).status_code == 200
        assert eventually(lambda: "cannot be sent" in server.log)
        with Collector(port) as collector:
            assert http_client.post(path, json=BODY).status_code == 200
            assert eventually(lambda: "are sent to" in server.log)
            before = time.time_ns()
            for flags in ("00", "01"):  # The first request and its parent are not sampled.
                headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}", "x-request-id": flags}
                answer = http_client.post(path, json=BODY, headers=headers).json()
            after = time.time_ns()
            assert http_client.post(path, json=BODY | {"temperature": 9}).status_code == 400
            assert server.stop() == 0  # The server sends the remaining spans.
    ids = "http.request.header.x-request-id"
    (span,) = [each for each in collector.spans if attributes(each)[ids] in ("00", "01")]
    assert collector.paths == {"/v1/traces"} and collector.services == {"negamax"}
    assert span.name == "llm_request" and span.kind == span.SPAN_KIND_SERVER
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert before < span.start_time_unix_nano < span.end_time_unix_nano < after
    found = attributes(span)
    assert found["gen_ai.request.id"].startswith(answer["id"])
    assert found["gen_ai.usage.prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.completion_tokens"] == answer["usage"]["completion_tokens"]
    assert found["gen_ai.response.model"] == MODEL
    assert found["gen_ai.request.n"] == 2 and found["gen_ai.request.top_p"] == 0.5
    reasons = [choice["finish_reason"] for choice in answer["choices"]]
    assert found["gen_ai.response.finish_reasons"] == reasons
    queue, first, whole = (
        found[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e")
    )
    assert 0 <= queue < first <= whole
    span_ns = span.end_time_unix_nano - span.start_time_unix_nano
    assert whole * 1e9 == pytest.approx(span_ns, abs=1e6)
    lines = [json.loads(line) for line in log_file.read_text().splitlines()]
    said = [line for line in lines if line["logger"] == "negamax.api.tracing"]
    assert len(said) == 2, said  # one line for the outage, and one for its end


@pytest.mark.parametrize("endpoint", ["localhost:4318", "http://[", "http://localhost:4318"])
def test_refuses_endpoints_that_cannot_be_used(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"is {endpoint!r}, which is not an HTTP address"
    if "//l" in endpoint:
        words = "(pip install 'negamax[otlp]')"
        for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    assert main(["serve", MODEL, "--port", "0", "--otlp-traces-endpoint", endpoint]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_nothing_is_imported_for_a_server_without_traces() -> None:
    code = (  # FastAPI imports the API of OpenTelemetry.
        "import sys, negamax.api.server;assert not {'opentelemetry.sdk', "
        "'opentelemetry.exporter'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
