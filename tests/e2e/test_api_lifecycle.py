import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from negamax.cli.main import main
from negamax.config.embedded import EMBEDDED
from tests.e2e.api_support import CHAT, HELLO, MESSAGES, RESPONSES, error_of, serving_stub
from tests.e2e.conftest import MODEL, eventually, launch, serving
from tests.e2e.listening import family_of
from tests.forked_children import finished
from tests.speed import slowness

LONG: dict[str, Any] = {"messages": HELLO, "ignore_eos": True, "max_tokens": 100_000, "n": 8}
LONG["stream"] = True


@pytest.fixture
def hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file. The stub engine continues its answers when the file is deleted."""
    path = tmp_path / "hold"
    path.touch()
    monkeypatch.setenv("STUB_HOLD", str(path))
    return path


def test_keys_overload_and_two_signals_during_a_stream(tmp_path: Path) -> None:
    keys = "--api-key sesame --api-key open --served-model-name a --served-model-name b"
    limits = "--max-num-seqs 2 --max-queued-requests 12"  # A key may fill half of the queue.
    options, log_file = (*keys.split(), *limits.split()), tmp_path / "log"
    with serving(*options, log_file=log_file, rate=100) as server, server.http() as http:
        wrong = [{"authorization": words} for words in ("Bearer wrong", "Basic sesame")]
        for headers in ({}, *wrong, {"x-api-key": "sesam"}):
            error_of(http.get("/v1/models", headers=headers), 401, type="authentication_error")
            error_of(http.get("/v1/nothing", headers=headers), 401)
            error_of(http.post(CHAT, json=LONG, headers=headers), 401)
            unkeyed = http.post(MESSAGES, json=LONG, headers=headers)
            assert unkeyed.status_code == 401
            assert unkeyed.json()["error"]["type"] == "authentication_error"
            assert unkeyed.json()["type"] == "error"  # The error has Anthropic's shape.
            for path in ("/metrics", "/version", "/openapi.json"):
                error_of(http.get(path, headers=headers), 401)
            for path in ("/livez", "/readyz", "/health", "/ping"):
                assert http.get(path, headers=headers).status_code == 200
        assert http.get("/version", headers={"x-api-key": "open"}).status_code == 200
        assert http.get("/v1/models", headers={"x-api-key": "sesame"}).status_code == 200
        assert [model.id for model in server.openai("sesame").models.list()] == ["a", "b"]

        key = {"authorization": "Bearer sesame"}
        with http.stream("POST", CHAT, json=LONG, headers=key) as running:
            lines = running.iter_lines()
            next(lines)
            response = http.post(CHAT, json=LONG, headers=key)
            error_of(response, 429, type="rate_limit_error")
            assert int(response.headers["retry-after"]) >= 1
            refused = http.post(MESSAGES, json=LONG, headers=key)
            assert refused.status_code == 429
            assert refused.json()["error"]["type"] == "rate_limit_error"
            server.process.send_signal(signal.SIGTERM)
            assert eventually(lambda: http.get("/readyz", headers=key).status_code == 503)
            # The second signal does not wait for open requests.
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert "service_unavailable_error" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert server.process.wait(120) == 0
        assert "Traceback" not in server.log


def test_draining_finishes_open_requests_and_refuses_new_ones(tmp_path: Path, hold: Path) -> None:
    with serving_stub(tmp_path) as (server, http), server.http() as other:
        assert eventually(lambda: other.get("/readyz").status_code == 200)
        with http.stream("POST", CHAT, json=LONG | {"n": 1, "max_tokens": 1000}) as running:
            lines = running.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert eventually(lambda: other.get("/readyz").status_code == 503)
            for stream in (True, False):
                refused = other.post(CHAT, json=LONG | {"stream": stream})
                error_of(refused, 503, code="draining")
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.headers["connection"] == "close"
            assert other.get("/livez").status_code == 200
            assert eventually(lambda: other.get("/health").status_code == 200)
            hold.unlink()
            rest = [line for line in lines if line]
        assert '"finish_reason":"stop"' in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert server.process.wait(120) == 0


def test_draining_waits_for_background_response_and_its_client(tmp_path: Path, hold: Path) -> None:
    """Let the client poll; while it does, the server has no open connection."""
    body = {"input": "Hello", "background": True, "ignore_eos": True, "max_output_tokens": 1000}
    with serving_stub(tmp_path) as (server, http):
        begun = http.post(RESPONSES, json=body).json()
        server.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: http.get("/readyz").status_code == 503)
        error_of(http.post(RESPONSES, json=body), 503, code="draining")

        def fetched() -> Any:
            return http.get(f"{RESPONSES}/{begun['id']}").json()

        assert fetched()["status"] == "in_progress"
        hold.unlink()
        while (response := fetched())["status"] == "in_progress":
            time.sleep(0.05)
        assert response["status"] == "completed" and response["usage"]["output_tokens"] == 1000
        assert server.process.wait(120) == 0  # The response was fetched, so the server ends.


def test_drain_timeout_aborts_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_STEP_MS", "5")
    with serving_stub(tmp_path, "--drain-timeout", "0.5") as (server, http):
        with http.stream("POST", CHAT, json=LONG) as running:
            lines = running.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert "service_unavailable_error" in rest[-2]
        assert server.process.wait(120) == 0


def cpu_seconds(pid: int) -> float:
    ticks = 0
    for member in family_of(pid):
        fields = Path(f"/proc/{member}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_server_is_ready_within_seconds_and_an_interrupt_stops_it_at_once(tmp_path: Path) -> None:
    options = ("--drain-timeout", "200")
    with serving(*options, log_file=tmp_path / "log", is_forked=False) as server:
        with server.http() as http:
            assert eventually(lambda: http.get("/health").status_code == 200)
        # CPU time does not depend on other load of the machine.
        assert cpu_seconds(server.process.pid) < 20 * slowness()
        started = time.monotonic()
        assert server.stop(signal.SIGINT) == 0
        assert time.monotonic() - started < 100  # The server does not wait for the stream.
        assert "Traceback" not in server.log


def test_signal_while_the_model_loads_ends_quietly(tmp_path: Path) -> None:
    process = launch(log_file=tmp_path / "log", is_forked=False)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    # The child is the engine process, which loads the model.
    assert eventually(lambda: bool(children.read_text()))
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_used_port_is_refused_before_the_model_is_loaded(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "no/such-model", "--port", port, "--log-level", "error"]) == 2
    output, errors = capfd.readouterr()
    (line,) = errors.splitlines()
    assert output == "" and port in line and "--port" in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("/no/such/folder",), "/no/such/folder"),
        ((MODEL, "--device", "cpu", "--max-model-len", "100000000"), "--max-model-len"),
        ((MODEL, "--chat-template", "/no/such/file"), "--chat-template"),
        ((MODEL, "--host", "256.256.256.256"), "--host"),
        ((MODEL, "--port", "70000"), "--port"),
        ((MODEL, "--host", "0.0.0.0"), "--allow-unauthenticated"),
        ((MODEL, "--ssl-certfile", "/no/such/file"), "--ssl-keyfile"),
        ((MODEL, "--api-key-file", "/no/such/file"), "--api-key-file"),
        ((MODEL, "--request-timeout", "-1"), "--request-timeout"),
    ],
)
def test_invalid_start_prints_one_line_and_exits_with_2(
    options: tuple[str, ...], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--port", "0", "--log-level", "error", *options]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert words in line


def damaged(folder: Path, damage: str) -> Path:
    copy = Path(shutil.copytree(EMBEDDED["nano"], folder / "copy"))
    shard = copy / "model-00001-of-00002.safetensors"
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1000])
    elif damage == "missing":
        shard.unlink()
    else:
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))
    return copy


@pytest.mark.parametrize(
    ("command", "damage", "words"),
    [
        ("generate", "truncated", "truncated or damaged"),
        ("generate", "missing", "cannot be found"),
        ("generate", "misshaped", "config.json requires"),
        pytest.param("serve", "truncated", "truncated or damaged", marks=pytest.mark.full),
        # The ranks detect this error last.
        ("serve --tensor-parallel-size 2", "misshaped", "config.json requires"),
    ],
)
def test_damaged_files_are_refused(command: str, damage: str, words: str, tmp_path: Path) -> None:
    name, *options = command.split()
    options += ["--prompt", "x"] if name == "generate" else ["--port", "0"]
    folder = str(damaged(tmp_path, damage))
    done = finished("negamax", name, folder, "--device", "cpu", "--log-level", "error", *options)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert words in line
