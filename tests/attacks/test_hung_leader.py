import concurrent.futures
import json
import os
import signal
import threading
import time
from pathlib import Path

import httpx

from tests.attacks.test_tenants_of_several_processes import holder
from tests.e2e.api_support import CHAT, HELLO
from tests.e2e.conftest import Server, eventually, serving, shared
from tests.e2e.test_server_processes import is_alive

LONG = {"messages": HELLO, "ignore_eos": True, "max_tokens": 3000, "n": 8, "stream": True}
HANG_SECONDS = 5
two = shared(f"--api-server-count 2 --engine-hang-timeout {HANG_SECONDS}", rate=100)


def children_of(server: Server) -> list[int]:
    return [*server.member_pids(), server.engine_pid()]


def last_lines(http: httpx.Client, begun: threading.Event) -> tuple[list[str], float]:
    with http.stream("POST", CHAT, json=LONG) as answer:
        lines: list[str] = []
        for line in filter(None, answer.iter_lines()):
            begun.set()
            lines = [*lines[-1:], line]
    return lines, time.monotonic()


def test_first_process_that_resumes_in_time_stays(two: Server) -> None:
    family = children_of(two)
    with holder(two, "any", 1) as http:
        for _ in range(2):
            os.kill(two.process.pid, signal.SIGSTOP)
            time.sleep(1.0)
            os.kill(two.process.pid, signal.SIGCONT)
            assert eventually(lambda: http.get("/readyz").status_code == 200)
    assert children_of(two) == family


def test_server_continues_after_all_its_processes_were_stopped(two: Server) -> None:
    family = [two.process.pid, *children_of(two)]
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(HANG_SECONDS + 1)
    for pid in reversed(family):  # The first process ends last.
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.2)
    time.sleep(1)
    assert [two.process.pid, *children_of(two)] == family
    assert "sends no heartbeat" not in two.log


def test_hung_first_process_is_ended_by_its_children(two: Server) -> None:
    """This test ends the shared server, so it must be the last one."""
    family = children_of(two)
    pool, begun = concurrent.futures.ThreadPoolExecutor(1), threading.Event()
    with holder(two, "any", 1) as probing, holder(two, "any", 1) as streaming, pool:
        stream = pool.submit(last_lines, streaming, begun)
        assert begun.wait(120)
        os.kill(two.process.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        assert eventually(lambda: probing.get("/readyz").status_code == 503)
        assert probing.get("/readyz").json()["error"]["code"] == "server_process_silent"
        assert probing.get("/livez").status_code == 200
        (error, done), ended = stream.result(120)
    assert done == "data: [DONE]"
    reported = json.loads(error.removeprefix("data: "))["error"]
    assert reported["type"] == "service_unavailable_error"
    assert "the first server process sends no heartbeat" in reported["message"]
    assert ended - stopped > HANG_SECONDS - 1
    assert two.process.wait(120) == -signal.SIGKILL
    assert eventually(lambda: not any(map(is_alive, family)))
    assert f"sends no heartbeat for {HANG_SECONDS} s and is killed" in two.log


def test_server_of_one_process_is_ended_by_its_engine(tmp_path: Path) -> None:
    options = ("--engine-hang-timeout", str(HANG_SECONDS))
    with serving(*options, log_file=tmp_path / "log", rate=100) as server:
        engine = server.engine_pid()
        os.kill(server.process.pid, signal.SIGSTOP)
        ended = eventually(lambda: server.process.poll() is not None)
        server.process.kill()
        assert ended and server.process.returncode == -signal.SIGKILL
        assert eventually(lambda: not is_alive(engine))
        assert "sends no heartbeat" in server.log and "Traceback" not in server.log
