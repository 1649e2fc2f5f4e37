import os
import re
import socket
import subprocess
import sys

import httpx

from tests.e2e.conftest import STUB, eventually
from tests.ports import free_port


def test_unread_output_and_malformed_requests_block_nothing() -> None:
    port = free_port()
    read, write = os.pipe()
    os.close(read)  # No process reads the pipe after the ready line.
    options = f"serve nano --num-threads 1 --port {port} --enable-access-log"
    command = [sys.executable, "-m", STUB, *options.split()]
    server = subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
            assert eventually(lambda: is_ready(http))
            for _ in range(100):
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(b"\x16\x03\x01 no HTTP at all\r\n\r\n")
                    stranger.recv(1000)
            for number in range(400):  # These lines are longer than the pipe's buffer.
                assert http.get(f"/v1/models/%0aforged%1b[2J{number}{'x' * 200}").status_code == 404
            body = {"model": "nano", "prompt": "Hello", "max_tokens": 2}
            assert http.post("/v1/completions", json=body).status_code == 200
    finally:
        server.terminate()
        _, log = server.communicate(timeout=120)
    lines = log.decode().splitlines()
    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", log)
    assert not any(line.startswith("forged") for line in lines)
    assert sum("Invalid HTTP request" in line for line in lines) <= 20
    (said,) = [line for line in lines if "standard output cannot be written" in line]
    assert "Negamax is ready" in said
    assert server.returncode == 0


def is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/readyz").status_code == 200
    except httpx.HTTPError:
        return False
