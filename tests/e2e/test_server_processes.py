import concurrent.futures
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.api_support import CHAT, HELLO, RESPONSES, error_of
from tests.e2e.conftest import (
    HELD,
    MODEL,
    START_SECONDS,
    STUB,
    Server,
    eventually,
    launch,
    serving,
    shared,
)
from tests.e2e.listening import unexpected_addresses

COUNT = 3
RATE = 200  # tokens per second; streams are slow, so that they last
HANG_SECONDS = 6
LONG_ANSWER: dict[str, Any] = {"messages": HELLO, "ignore_eos": True, "max_tokens": 3000}
SHORT = LONG_ANSWER | {"max_tokens": 8}
SIZES = f"--api-server-count {COUNT} --max-num-seqs 8"
several = shared(f"{SIZES} --engine-hang-timeout {HANG_SECONDS}", rate=RATE)


def owner_of(response_id: str) -> int:
    return int(response_id[-2:], 16)


def response_from(server: Server, index: int, **fields: Any) -> Any:
    """Return a response of process `index`. Connections reach a random process, so retry."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        response = server.post("/v1/responses", input="Hello", max_output_tokens=8, **fields)
        if owner_of(response["id"]) == index:
            return response
    raise AssertionError(f"process {index} answered no request")


def start_streams(
    server: Server, pool: concurrent.futures.Executor, count: int, **fields: Any
) -> list[concurrent.futures.Future[list[str]]]:
    """Start long streams. A stream returns its last two lines, or no line if it is cut off."""
    begun = threading.Semaphore(0)

    def run() -> list[str]:
        with (
            contextlib.suppress(httpx.TransportError),
            server.http() as http,
            http.stream("POST", CHAT, json=LONG_ANSWER | {"stream": True} | fields) as running,
        ):
            lines = []
            for line in filter(None, running.iter_lines()):
                if not lines:
                    begun.release()
                lines = [*lines[-1:], line]
            return lines
        return []

    ends = [pool.submit(run) for _ in range(count)]
    for _ in range(count):
        assert begun.acquire(timeout=120)
    return ends


def test_every_process_answers_for_responses_of_the_others(several: Server) -> None:
    first = [response_from(several, index) for index in range(COUNT)]
    for kept in first:
        place, reference = f"/v1/responses/{kept['id']}", kept["output"][0]["id"]
        for _ in range(6):  # Each request has a new connection.
            assert several.get(place).json() == kept
            items = several.get(f"{place}/input_items").json()["data"]
            assert items[0]["content"] == [{"type": "input_text", "text": "Hello"}]
            going_on = {"input": "And?", "previous_response_id": kept["id"]}
            second = several.post("/v1/responses", max_output_tokens=4, **going_on)
            # A conversation stays with the process where it began.
            assert owner_of(second["id"]) == owner_of(kept["id"])
            assert second["usage"]["input_tokens"] > kept["usage"]["total_tokens"]
            items = [{"type": "item_reference", "id": reference}, {"role": "user", "content": "?"}]
            several.post("/v1/responses", input=items, max_output_tokens=4)
    with several.http() as http:
        for kept in first:
            assert http.delete(f"/v1/responses/{kept['id']}").json()["deleted"]
            error_of(http.get(f"/v1/responses/{kept['id']}"), 404, code="response_not_found")


def test_processes_listen_only_on_the_shared_port(several: Server) -> None:
    assert unexpected_addresses(several) == (set(), set())


def test_streams_and_refusals_are_relayed(several: Server) -> None:
    for index in range(COUNT):
        following = {"previous_response_id": response_from(several, index)["id"], "input": "More"}
        for _ in range(3):
            with several.openai() as client:
                limits = {"model": MODEL, "max_output_tokens": 24}
                events = list(client.responses.create(stream=True, **limits, **following))
            assert events[0].type == "response.created"
            assert events[-1].type in ("response.completed", "response.incomplete")
            assert [event.sequence_number for event in events] == list(range(len(events)))
    body = {"input": "x", "previous_response_id": response_from(several, 1)["id"]}
    for _ in range(8):
        headers = {"x-request-id": "mine"}
        refused = several.send(RESPONSES, body, temperature=7, headers=headers)
        error_of(refused, 400, param="temperature")
        assert refused.headers.get_list("x-request-id") == ["mine"]


def test_hanging_up_on_a_relayed_stream_ends_it(several: Server) -> None:
    body = {"input": "x", "previous_response_id": response_from(several, 2)["id"], "stream": True}
    body |= {"max_output_tokens": 3000, "ignore_eos": True}
    for _ in range(6):
        with several.http() as http, http.stream("POST", "/v1/responses", json=body) as running:
            next(running.iter_lines())
    assert eventually(lambda: several.gauge("vllm:num_requests_running") == 0)
    assert eventually(lambda: several.gauge("negamax:open_requests") == 0)


def test_response_in_the_background_can_be_cancelled_from_anywhere(several: Server) -> None:
    seen = set[int]()
    wanted = {"input": "Hello", "background": True, "max_output_tokens": 3000, "ignore_eos": True}
    while seen != set(range(COUNT)):
        place = f"/v1/responses/{(identity := several.post('/v1/responses', **wanted)['id'])}"
        assert several.post(f"{place}/cancel")["status"] == "cancelled"
        assert several.get(place).json()["status"] == "cancelled"
        seen.add(owner_of(identity))


def test_metrics_count_all_processes(several: Server) -> None:
    counts = ("sglang:num_requests_total", "vllm:e2e_request_latency_seconds_count")
    before = [several.gauge(name) for name in counts]
    for _ in range(24):
        several.post(CHAT, **SHORT)
    for _ in range(12):  # Any process may answer.
        assert [several.gauge(name) for name in counts] == [count + 24 for count in before]
    assert several.gauge("vllm:generation_tokens_total") >= 24 * 8


def test_abort_reaches_the_requests_of_all_processes(several: Server) -> None:
    def run(number: int) -> str:
        sampling = {"max_new_tokens": 3000, "ignore_eos": True}
        answer = several.post("/generate", text="x", rid=f"r{number}", sampling_params=sampling)
        return str(answer["meta_info"]["finish_reason"]["type"])

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(run, number) for number in range(6)]
        assert eventually(lambda: several.gauge("vllm:num_requests_running") == 6)
        assert several.post("/abort_request", rid="r3")["num_aborted"] == 1
        assert answers[3].result(120) == "abort"
        assert several.post("/abort_request", abort_all=True)["num_aborted"] == 5
        assert {answer.result(120) for answer in answers} == {"abort"}


def test_limit_of_the_queue_is_one_for_all(tmp_path: Path) -> None:
    options = f"--api-server-count {COUNT} --max-num-seqs 2 --max-queued-requests 3"
    with serving(*options.split(), log_file=tmp_path / "log", rate=RATE) as server:

        def all_are_decided() -> bool:
            held = ("vllm:num_requests_running", "vllm:num_requests_waiting")
            return len(refused) + sum(map(server.gauge, held)) >= 16

        def run() -> int:
            with (
                server.http() as http,
                http.stream("POST", CHAT, json=LONG_ANSWER | {"stream": True}) as running,
            ):
                if running.status_code == 200:
                    assert decided.wait(120)  # No request frees a place before that.
                else:
                    refused.append(running.status_code)
                return running.status_code

        refused: list[int] = []
        decided = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            futures = [pool.submit(run) for _ in range(16)]
            try:
                assert eventually(all_are_decided)
            finally:
                decided.set()
            found = sorted(future.result() for future in futures)
        # Simultaneous requests may exceed the limit by one per process.
        assert 5 <= found.count(200) <= 5 + COUNT - 1 and set(found) == {200, 429}
        assert eventually(lambda: server.gauge("negamax:waiting_tokens") == 0)
        server.post(CHAT, **SHORT)


def test_process_that_dies_is_started_again_and_only_its_requests_end(several: Server) -> None:
    wanted = {"input": "Hello", "ignore_eos": True, "max_output_tokens": 1200, "stream": True}
    owners: list[int] = []

    def run() -> tuple[int, bool]:
        seen: list[str] = []
        with several.http() as http, http.stream("POST", "/v1/responses", json=wanted) as running:
            lines = (line for line in running.iter_lines() if line.startswith("data:"))
            index = owner_of(json.loads(next(lines)[5:])["response"]["id"])
            owners.append(index)
            with contextlib.suppress(httpx.TransportError):
                seen.extend(lines)
        return index, "response.incomplete" in seen[-1]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(run) for _ in range(8)]
        assert eventually(lambda: len(owners) == 8)
        victim = max(1, 2, key=owners.count)
        pid = several.member_pids()[victim - 1]
        os.kill(pid, signal.SIGKILL)
        left = 8 - owners.count(victim)

        def only_the_others_run() -> bool:
            try:
                return several.gauge("vllm:num_requests_running") <= left
            except httpx.TransportError:  # The killed process had not accepted this connection.
                return False

        assert eventually(only_the_others_run)
        for index, has_ended in (stream.result(120) for stream in streams):
            assert has_ended == (index != victim)
    assert eventually(lambda: several.gauge("negamax:open_requests") == 0)
    assert eventually(lambda: len(several.member_pids()) == COUNT - 1)
    assert pid not in several.member_pids()
    response_from(several, victim)
    assert f"server process {victim} ended with exit code -9; it is started again" in several.log


def test_process_that_hangs_is_replaced(several: Server) -> None:
    stuck = several.member_pids()[-1]
    os.kill(stuck, signal.SIGSTOP)
    assert eventually(lambda: stuck not in several.member_pids())
    assert eventually(lambda: len(several.member_pids()) == COUNT - 1)
    assert "sends no heartbeat" in several.log
    for index in range(COUNT):
        response_from(several, index)


def test_all_processes_learn_of_a_dead_engine_and_use_the_next(several: Server) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        ends = start_streams(several, pool, 8)
        os.kill(several.engine_pid(), signal.SIGKILL)
        for end in ends:
            error, done = end.result(120)
            assert "service_unavailable_error" in error and done == "data: [DONE]"
    wait_until_ready(several)

    def all_ready() -> bool:
        closing = {"connection": "close"}
        with httpx.Client(base_url=several.url, headers=closing, timeout=180) as http:
            return all(http.get("/readyz").status_code == 200 for _ in range(16))

    assert eventually(all_ready)
    for index in range(COUNT):
        response_from(several, index)
    assert several.gauge("negamax:engine_restarts_total") == 1


@pytest.fixture
def ending(tmp_path: Path) -> Iterator[Server]:
    options = ("--api-server-count", str(COUNT))
    with serving(*options, log_file=tmp_path / "log", rate=RATE) as server:
        yield server
    assert "Traceback" not in server.log


def test_all_processes_drain_and_leave_together(ending: Server) -> None:
    family = [ending.engine_pid(), *ending.member_pids()]
    # A service manager sends SIGTERM to every process, but the first process ends the others.
    for pid in family:
        os.kill(pid, signal.SIGTERM)
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        ends = start_streams(ending, pool, 9, max_tokens=200)
        assert ending.stop() == 0
        for end in ends:
            last, done = end.result()
            assert '"finish_reason":"length"' in last and done == "data: [DONE]"
    assert not any(map(is_alive, family))


def test_second_signal_aborts_the_requests_of_all_processes(ending: Server) -> None:
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        ends = start_streams(ending, pool, 9)
        ending.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: ending.get("/readyz").status_code == 503)
        assert ending.stop() == 0
        for end in ends:
            error, done = end.result()
            assert "service_unavailable_error" in error and done == "data: [DONE]"


def refused_log(log_file: Path, *options: str) -> tuple[int, str]:
    process = launch(*options, log_file=log_file)
    code = process.wait(START_SECONDS)
    assert process.stdout is not None
    process.stdout.close()
    return code, log_file.read_text()


@pytest.mark.parametrize("count", ["1", "2"])
def test_port_of_another_server_is_refused(several: Server, tmp_path: Path, count: str) -> None:
    port = several.url.rsplit(":", 1)[1]
    code, log = refused_log(tmp_path / "log", "--api-server-count", count, "--port", port)
    assert code != 0 and "in use" in log


def test_engine_that_cannot_start_ends_all(tmp_path: Path) -> None:
    options = ("--api-server-count", "2", "--device", "cpu", "--max-model-len", "100000000")
    code, log = refused_log(tmp_path / "log", *options)
    assert code == 2 and "Traceback" not in log


def test_relayed_requests_need_the_key(tmp_path: Path) -> None:
    import openai

    options = ("--api-server-count", "2", "--api-key", "secret")
    key = {"x-api-key": "secret"}
    with serving(*options, program=STUB, log_file=tmp_path / "log") as server:
        client = server.openai("secret")
        kept = client.responses.create(model=MODEL, input="Hello", max_output_tokens=4)
        place = f"/v1/responses/{kept.id}"
        for _ in range(8):
            error_of(server.get(place), 401, code="missing_api_key")
            assert server.get(place, headers=key).status_code == 200
            assert server.get("/metrics", headers=key).status_code == 200
            assert server.send("/internal/abort").status_code == 401
            assert server.send("/internal/abort", headers=key).status_code == 404
        with pytest.raises(openai.AuthenticationError):
            server.openai("wrong").responses.retrieve(kept.id)


def test_processes_do_not_outlive_the_first(several: Server) -> None:
    """This test ends the shared server, so it must be the last one."""
    family = [several.engine_pid(), *several.member_pids()]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        streams = start_streams(several, pool, 8)
        os.kill(several.process.pid, signal.SIGKILL)
        # The first process is dead, so the others must report its end.
        reported = [lines for stream in streams if (lines := stream.result(120))]
    assert reported
    for error, done in reported:
        assert "service_unavailable_error" in error and "the first server process is gone" in error
        assert done == "data: [DONE]"
    assert eventually(lambda: not any(map(is_alive, family)))
    several.process.wait()


LONG = LONG_ANSWER | {"n": 4}


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
    assert eventually(lambda: server.get("/readyz").status_code == 200)


def last_lines_after(server: Server, act: Any, **fields: Any) -> list[str]:
    body = LONG | {"stream": True} | fields
    with server.http() as http, http.stream("POST", CHAT, json=body) as running:
        lines = running.iter_lines()
        next(lines)
        act()
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
    error_of(server.send(CHAT, LONG), 503, code="engine_dead")
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
    from_outside, local = unexpected_addresses(two_ranks)
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
    assert two_ranks.send(CHAT, LONG, max_tokens=5).status_code == 200
    os.kill(two_ranks.process.pid, signal.SIGKILL)
    assert eventually(lambda: not any(map(is_alive, family)))
    two_ranks.process.wait()
