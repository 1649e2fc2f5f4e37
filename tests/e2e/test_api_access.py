import shutil
import signal
import ssl
from pathlib import Path

import httpx
import pytest

from negamax.cli.main import main
from tests.certificates import make_certificate
from tests.e2e.api_support import CHAT, HELLO, error_of, serving_stub
from tests.e2e.conftest import STUB, Server, eventually, serving
from tests.e2e.listening import strangers_doors

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
    assert strangers_doors(server) == (set(), set())


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
