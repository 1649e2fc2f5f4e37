import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.api_support import CHAT, HELLO, error_of
from tests.e2e.conftest import HELD, MODEL, STUB, Server, eventually, serving, shared
from tests.e2e.listening import strangers_doors

LONG: dict[str, Any] = {"messages": HELLO, "ignore_eos": True, "max_tokens": 3000, "n": 4}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ranks_of(engine: int) -> list[int]:
    children = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
    return [pid for pid, line in lines.items() if "rank_process" in line]


def wait_until_ready(server: Server) -> None:
    with server.http() as http:
        assert eventually(lambda: http.get("/readyz").status_code == 200, seconds=120)


def last_lines_after(server: Server, harm: Any, **fields: Any) -> list[str]:
    body = LONG | {"stream": True} | fields
    with server.http() as http, http.stream("POST", CHAT, json=body) as running:
        lines = running.iter_lines()
        next(lines)
        harm()
        return [line for line in lines if line][-2:]


def test_dead_engine_is_reported_and_restarted_until_it_dies_too_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openai

    held = tmp_path / "held"
    monkeypatch.setenv("ENGINE_MODULE", HELD)
    monkeypatch.setenv("HELD_ENGINE", str(held))
    with (
        serving("--max-engine-restarts", "1", log_file=tmp_path / "log", program=STUB) as server,
        server.http() as http,
    ):
        dead = server.engine_pid()
        held.touch()
        end = last_lines_after(server, lambda: os.kill(dead, signal.SIGKILL))
        assert '"error"' in end[0] and "service_unavailable_error" in end[0]
        assert end[1] == "data: [DONE]"
        for path in ("/health", "/readyz"):
            error_of(http.get(path), 503, code="engine_restarting")
        refused = http.post(CHAT, json=LONG)
        error_of(refused, 503, type="service_unavailable_error")
        assert int(refused.headers["retry-after"]) >= 1
        with pytest.raises(openai.InternalServerError):
            server.openai().completions.create(model=MODEL, prompt="x")
        assert http.get("/livez").status_code == 200

        held.unlink()
        wait_until_ready(server)
        answer = server.openai().completions.create(model=MODEL, prompt="x", max_tokens=3)
        assert answer.usage and answer.usage.completion_tokens
        assert server.gauge("negamax:engine_restarts_total") == 1
        # The counters include the tokens of the dead engine.
        assert server.gauge("vllm:generation_tokens_total") > 3
        assert not is_alive(dead)

        os.kill(server.engine_pid(), signal.SIGKILL)
        assert server.process.wait(120) == 1
        assert "too often" in server.log
        assert "Traceback" not in server.log


# The last test that uses this server ends it.
never_restarted = shared("--max-engine-restarts 0", rate=100)


def test_health_of_a_silent_idle_engine(never_restarted: Server) -> None:
    engine = never_restarted.engine_pid()
    with never_restarted.http() as http:
        os.kill(engine, signal.SIGSTOP)
        try:
            assert eventually(lambda: http.get("/readyz").status_code == 503)
            assert http.get("/livez").status_code == 200
        finally:
            os.kill(engine, signal.SIGCONT)
        assert eventually(lambda: http.get("/readyz").status_code == 200)


def test_whole_answer_of_a_dead_engine_is_a_503(never_restarted: Server) -> None:
    server = never_restarted

    def kill_soon() -> None:
        assert eventually(lambda: server.gauge("vllm:num_requests_running") > 0)
        os.kill(server.engine_pid(), signal.SIGKILL)

    killer = threading.Thread(target=kill_soon)
    killer.start()
    with server.http() as http:
        error_of(http.post(CHAT, json=LONG), 503, code="engine_dead")
    killer.join()
    assert server.process.wait(120) == 1


@pytest.mark.parametrize(
    ("options", "seconds"),
    [("--engine-hang-timeout 4", "4"), ("-pp 2 --nnodes 2 --master-addr 127.0.0.1", "2.4")],
)
def test_engine_without_a_heartbeat_is_replaced(
    options: str, seconds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_STEP_MS", "20")
    with serving(*options.split(), log_file=tmp_path / "log", program=STUB) as server:
        stopped = server.engine_pid()
        end = last_lines_after(server, lambda: os.kill(stopped, signal.SIGSTOP))
        assert "service_unavailable_error" in end[0]
        wait_until_ready(server)
        assert server.engine_pid() != stopped
        assert eventually(lambda: not is_alive(stopped))
        assert f"hangs: no heartbeat for {seconds} s" in server.log


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server with two ranks. The last test that uses this server ends it."""
    options = ("--device", "cpu", "--tensor-parallel-size", "2", "--engine-hang-timeout", "4")
    with serving(*options, log_file=tmp_path_factory.mktemp("two_ranks") / "log") as server:
        yield server


def test_ranks_listen_on_loopback_only(two_ranks: Server) -> None:
    """gloo needs a socket per rank and group. A store on all interfaces would accept any client."""
    from_outside, local = strangers_doors(two_ranks)
    assert from_outside == set()
    assert len(local) <= 6


def test_engine_with_a_stuck_rank_is_replaced_with_all_its_ranks(two_ranks: Server) -> None:
    engine = two_ranks.engine_pid()
    ranks = ranks_of(engine)
    assert len(ranks) == 2
    end = last_lines_after(two_ranks, lambda: os.kill(ranks[1], signal.SIGSTOP))
    assert "service_unavailable_error" in end[0]
    assert eventually(lambda: not any(map(is_alive, (engine, *ranks))))
    wait_until_ready(two_ranks)
    assert "rank 1 hangs" in two_ranks.log or "no step ended" in two_ranks.log
    assert len(ranks_of(two_ranks.engine_pid())) == 2


def test_engine_and_ranks_outlive_neither_the_server_nor_each_other(two_ranks: Server) -> None:
    engine = two_ranks.engine_pid()
    family = [engine, *ranks_of(engine)]
    assert len(family) == 3
    # A service manager sends SIGTERM to every process. The server decides when each one ends.
    for pid in family:
        os.kill(pid, signal.SIGTERM)
    with two_ranks.http() as http:
        assert http.post(CHAT, json=LONG | {"max_tokens": 5}).status_code == 200
    os.kill(two_ranks.process.pid, signal.SIGKILL)
    assert eventually(lambda: not any(map(is_alive, family)))
    two_ranks.process.wait()
