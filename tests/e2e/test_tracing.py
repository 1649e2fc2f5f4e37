import http.server
import json
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_service

from negamax.cli.main import main
from tests.e2e.conftest import MODEL, eventually, serving
from tests.ports import free_port

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


def test_every_request_has_a_span_and_a_dead_collector_harms_nobody(
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
