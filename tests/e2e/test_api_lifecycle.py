import json
import os
import shutil
import signal
import socket
import ssl
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from negamax.cli.main import main
from negamax.config.embedded import EMBEDDED
from tests.certificates import make_certificate
from tests.e2e.api_support import CHAT, HELLO, MESSAGES, RESPONSES, error_of, serving_stub
from tests.e2e.conftest import MODEL, STUB, Server, eventually, launch, serving
from tests.e2e.listening import process_tree, unexpected_addresses
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
    for member in process_tree(pid):
        fields = Path(f"/proc/{member}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_server_is_ready_within_seconds_and_an_interrupt_stops_it_at_once(tmp_path: Path) -> None:
    options = ("--drain-timeout", "200")
    with serving(*options, log_file=tmp_path / "log", is_forked=False) as server:
        assert eventually(lambda: server.get("/health").status_code == 200)
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


BODY = {"messages": HELLO, "max_tokens": 2}
PAGE = "https://chat.example"


def test_without_a_key_only_own_and_listed_host_names_are_served(tmp_path: Path) -> None:
    options = ("--allowed-hosts", "models.example", "--allowed-origins", f'["{PAGE}"]')
    with serving_stub(tmp_path, *options) as (server, http):
        port = httpx.URL(server.url).port
        own = ("localhost", f"127.0.0.1:{port}", f"[::1]:{port}")
        for host in (*own, "Models.Example", f"models.example:{port}"):
            assert http.post(CHAT, json=BODY, headers={"host": host}).status_code == 200, host
        evil = ("evil.example", f"evil.example:{port}", "localhost.evil.example")
        for host in (*evil, "127.0.0.1.evil.example", "192.168.0.7"):
            refused = http.post(CHAT, json=BODY, headers={"host": host})
            error_of(refused, 403, code="host_not_allowed")
            assert http.get("/health", headers={"host": host}).status_code == 403

        asked = {"origin": PAGE, "access-control-request-method": "POST"}
        asked |= {"access-control-request-headers": "content-type"}
        preflight = http.options(CHAT, headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert preflight.headers["x-request-id"]
        for status, body in ((200, BODY), (400, BODY | {"temperature": 9})):
            answer = http.post(CHAT, json=body, headers={"origin": PAGE})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == PAGE
        foreign = http.options(CHAT, headers=asked | {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in foreign.headers
        other = http.post(CHAT, json=BODY, headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_one_server_process_listens_on_one_port(server: Server) -> None:
    assert unexpected_addresses(server) == (set(), set())


ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")


def test_cors_is_closed_and_keys_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# clients\nfirst-key\n\nsecond-key\n")
    monkeypatch.setenv("NEGAMAX_API_KEY", "third-key, fourth-key")
    # A server on a public address requires a key.
    options = ("--host", "0.0.0.0", "--api-key-file", str(keys), "--api-key", "fifth-key")
    with serving_stub(tmp_path, *options) as (server, http):

        def status(**headers: str | bytes) -> int:
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            return http.get("/v1/models", headers=names).status_code

        for name in ORDINALS[:5]:
            assert status(authorization=f"bearer {name}-key") == 200, name
            assert status(x_api_key=f"{name}-key", host="any.example") == 200, name
        foreign = "first-ke\u00ff".encode("latin-1")
        for key in ("# clients", "", "first-key,second-key", foreign, "third-key, fourth-key"):
            error_of(http.get("/v1/models", headers={"x-api-key": key}), 401)
        asked = {"origin": PAGE, "access-control-request-method": "POST", "x-api-key": "first-key"}
        preflight = http.options(CHAT, headers=asked)
        assert preflight.status_code == 405
        assert "access-control-allow-origin" not in preflight.headers
        keys.write_text("")
        server.process.send_signal(signal.SIGHUP)
        assert eventually(lambda: "contains no key" in server.log)
        assert status(x_api_key="first-key") == 200
        keys.write_text("second-key\nsixth-key\n")
        server.process.send_signal(signal.SIGHUP)
        assert eventually(lambda: "were reloaded" in server.log)
        statuses = [status(x_api_key=f"{name}-key") for name in ORDINALS]
        assert statuses == [401, 200, 200, 200, 200, 200]
        assert "first-key" not in server.log and "third-key" not in server.log


def test_tls_with_a_certificate_and_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STUB_STEP_MS", "5")

    def make(name: str) -> tuple[str, str]:
        certificate, key = str(tmp_path / f"{name}.crt"), str(tmp_path / f"{name}.key")
        make_certificate(certificate, key)
        return certificate, key

    certificate, key = make("server")
    other_certificate, other_key = make("other")
    options = ("--ssl-certfile", certificate, "--ssl-keyfile", key, "--api-server-count", "2")
    with serving(*options, program=STUB, log_file=tmp_path / "log") as server:
        assert server.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=certificate)

        def status(path: str, context: ssl.SSLContext) -> int:
            return httpx.get(f"{server.url}{path}", verify=context, timeout=120).status_code

        for _ in range(8):  # Each process answers, and one of them asks the other.
            assert status("/metrics", context) == 200
        with httpx.Client(base_url=server.url, verify=context, timeout=120) as http:
            assert http.get("/livez").status_code == 200
            with http.stream("POST", CHAT, json=BODY | {"stream": True}) as answer:
                assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"
            long = BODY | {"stream": True, "max_tokens": 300, "ignore_eos": True}
            with http.stream("POST", CHAT, json=long) as answer:
                lines = (line for line in answer.iter_lines() if line)
                next(lines)
                shutil.copy(other_certificate, certificate)
                # Until both files are replaced, they do not match.
                server.process.send_signal(signal.SIGHUP)
                assert eventually(lambda: server.log.count("--ssl-keyfile cannot be used") == 2)
                assert status("/livez", context) == 200
                shutil.copy(other_key, key)
                server.process.send_signal(signal.SIGHUP)
                assert eventually(lambda: server.log.count("the files were reloaded") == 2)
                renewed = ssl.create_default_context(cafile=other_certificate)
                for _ in range(8):
                    assert status("/livez", renewed) == 200
                with pytest.raises(httpx.ConnectError):
                    status("/livez", context)
                assert list(lines)[-1] == "data: [DONE]"
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http") + "/readyz", timeout=120)
    _, other_key = make("third")
    command = ["serve", "nano", "--port", "0", "--log-level", "error"]
    assert main([*command, "--ssl-certfile", certificate, "--ssl-keyfile", other_key]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "--ssl-keyfile" in line


def test_public_address_without_a_key_needs_an_option(tmp_path: Path) -> None:
    options = ("--host", "0.0.0.0", "--allow-unauthenticated")
    with serving_stub(tmp_path, *options) as (_, http):
        assert http.get("/v1/models", headers={"host": "any.example"}).status_code == 200
