import concurrent.futures
import contextlib
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.attacks.concurrent_client import unnoticed
from tests.e2e.conftest import Server, eventually
from tests.ports import free_port

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="no nginx here")
CONFIG = Path(__file__).parents[2] / "deploy" / "nginx.conf"
FLOODER, OTHER = "127.0.0.1", "127.0.0.2"
BURST = 40  # requests that may arrive at once; then 10 per second may follow
OPEN_REQUESTS = 64  # open requests of one address
CHAT = "/v1/chat/completions"


@pytest.fixture
def port(server: Server, tmp_path: Path) -> Iterator[int]:
    """Run nginx with deploy/'s configuration before the shared server. Yield nginx's port."""
    port = free_port()
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost"
    files = ["-keyout", str(tmp_path / "tls.key"), "-out", str(tmp_path / "tls.pem")]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    config = CONFIG.read_text()
    for found, wanted in (
        ("server 127.0.0.1:8000;", f"server {server.url.removeprefix('http://')};"),
        ("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
        ("server_name llm.example;", "server_name localhost;"),
        ("/etc/nginx/tls/llm.example", str(tmp_path / "tls")),
    ):
        assert found in config
        config = config.replace(found, wanted)
    folders = "".join(
        f"{name}_temp_path {tmp_path}/{name};"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    head = f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/error.log; events {{}}"
    whole = f"{head} http {{ access_log off; {folders} {config} }}"
    (tmp_path / "nginx.conf").write_text(whole)
    nginx = subprocess.Popen(["nginx", "-e", "stderr", "-c", str(tmp_path / "nginx.conf")])
    try:
        assert eventually(lambda: is_open(port))
        yield port
    finally:
        nginx.terminate()
        nginx.wait(120)


def is_open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def client_at(address: str, port: int) -> httpx.Client:
    transport = httpx.HTTPTransport(local_address=address, verify=False)
    return httpx.Client(base_url=f"https://127.0.0.1:{port}", transport=transport, timeout=120)


def check_refusal(answer: httpx.Response) -> None:
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "address_limit"


def test_an_address_over_its_rate_is_refused_and_others_are_not(server: Server, port: int) -> None:
    def flood() -> list[int]:
        statuses = []
        with client_at(FLOODER, port) as http:
            for _ in range(100):
                answer = http.get("/livez")
                statuses.append(answer.status_code)
                if answer.status_code != 200:
                    check_refusal(answer)
        return statuses

    started = time.monotonic()
    with client_at(OTHER, port) as http, concurrent.futures.ThreadPoolExecutor(2) as pool:
        flood_twice = lambda: sum(pool.map(lambda _: flood(), range(2)), list[int]())  # noqa: E731
        other = lambda: client_at(OTHER, port)  # noqa: E731
        statuses = unnoticed(server, flood_twice, client=other, gap=1.0)
        assert http.get("/livez").status_code == 200
        assert http.get("/metrics").status_code == 404
    seconds = time.monotonic() - started
    # No request is refused on a machine that needs longer for 200 requests than the rate allows.
    assert set(statuses) == {200, 429} or seconds > (2 * 100 - BURST) / 10
    assert statuses.count(200) <= BURST + 2 + 10 * seconds


@pytest.mark.full
def test_open_requests_of_an_address_are_limited(port: int) -> None:
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        "content-length: 1000\r\n\r\n{"
    )
    with contextlib.ExitStack() as stack:
        for _ in range(OPEN_REQUESTS):
            plain = socket.create_connection(("127.0.0.1", port), source_address=(FLOODER, 0))
            connection = stack.enter_context(tls.wrap_socket(plain))
            connection.sendall(head.encode())  # The body never arrives.
            connection.settimeout(0.1)  # The requests stay within the rate.
            with contextlib.suppress(TimeoutError):
                raise AssertionError(connection.recv(1000))
        with client_at(FLOODER, port) as http:
            check_refusal(http.get("/livez"))
        with client_at(OTHER, port) as http:
            assert http.get("/livez").status_code == 200
    with client_at(FLOODER, port) as http:
        assert eventually(lambda: http.get("/livez").status_code == 200)
