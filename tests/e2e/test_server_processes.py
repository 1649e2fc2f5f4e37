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

from tests.e2e.conftest import (
    MODEL,
    START_SECONDS,
    STUB,
    Server,
    eventually,
    launch,
    serving,
    talking,
)
from tests.e2e.listening import strangers_doors
from tests.e2e.test_api_errors import error_of
from tests.e2e.test_engine_restarts import is_alive, wait_until_ready

CHAT = "/v1/chat/completions"
COUNT = 3
RATE = 200  # tokens per second of a stream: slow, so that streams last
HANG_SECONDS = 6
LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "ignore_eos": True,
    "max_tokens": 3000,
}
SHORT = LONG | {"max_tokens": 8}


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("several")
    talk = talking(folder, tokens_per_second=RATE)
    options = f"--api-server-count {COUNT} --max-num-seqs 8 --engine-hang-timeout {HANG_SECONDS}"
    with serving(*talk, *options.split(), log_file=folder / "log") as server:
        yield server
        assert "Traceback" not in server.log


def keeper(response_id: str) -> int:
    return int(response_id[-2:], 16)


def response_from(server: Server, index: int, **fields: Any) -> Any:
    """Return a response that process `index` has answered.

    Connections are spread at random, and a new process needs time.
    """
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with server.http() as http:
            answer = http.post(
                "/v1/responses", json={"input": "Hello", "max_output_tokens": 8, **fields}
            )
        assert answer.status_code == 200, answer.text
        if keeper(answer.json()["id"]) == index:
            return answer.json()
    raise AssertionError(f"process {index} answers nothing")


def streams_under_way(
    server: Server, pool: concurrent.futures.Executor, count: int, **fields: Any
) -> list[concurrent.futures.Future[list[str]]]:
    """Start long streams; each returns its last two lines, or none if its connection is lost."""
    begun = threading.Semaphore(0)

    def run() -> list[str]:
        with (
            contextlib.suppress(httpx.TransportError),
            server.http() as http,
            http.stream("POST", CHAT, json=LONG | {"stream": True} | fields) as running,
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
        for _ in range(6):  # through separate connections
            with several.http() as http:
                assert http.get(f"/v1/responses/{kept['id']}").json() == kept
                items = http.get(f"/v1/responses/{kept['id']}/input_items").json()["data"]
                assert items[0]["content"] == [{"type": "input_text", "text": "Hello"}]
                going_on = {
                    "input": "And?",
                    "previous_response_id": kept["id"],
                    "max_output_tokens": 4,
                }
                second = http.post("/v1/responses", json=going_on).json()
                # a conversation stays where it began
                assert keeper(second["id"]) == keeper(kept["id"])
                assert second["usage"]["input_tokens"] > kept["usage"]["total_tokens"]
                item = kept["output"][0]["id"]
                referring = {
                    "input": [
                        {"type": "item_reference", "id": item},
                        {"role": "user", "content": "?"},
                    ]
                }
                assert (
                    http.post(
                        "/v1/responses", json=referring | {"max_output_tokens": 4}
                    ).status_code
                    == 200
                )
    with several.http() as http:
        for kept in first:
            assert http.delete(f"/v1/responses/{kept['id']}").json()["deleted"]
            error_of(http.get(f"/v1/responses/{kept['id']}"), 404, code="response_not_found")


def test_processes_listen_only_on_the_shared_port(several: Server) -> None:
    assert strangers_doors(several) == (set(), set())


def test_relayed_stream_is_a_stream(several: Server) -> None:
    for index in range(COUNT):
        kept = response_from(several, index)
        for _ in range(4):
            client = several.openai()
            events = list(
                client.responses.create(
                    model=MODEL,
                    input="More",
                    previous_response_id=kept["id"],
                    stream=True,
                    max_output_tokens=24,
                )
            )
            assert events[0].type == "response.created"
            assert events[-1].type in ("response.completed", "response.incomplete")
            assert [event.sequence_number for event in events] == list(range(len(events)))


def test_refusals_are_relayed_with_their_request_ids(several: Server) -> None:
    kept = response_from(several, 1)
    for _ in range(8):
        with several.http() as http:
            body = {
                "input": "x",
                "previous_response_id": kept["id"],
                "max_output_tokens": 10**9,
                "temperature": 7,
            }
            refused = http.post("/v1/responses", json=body, headers={"x-request-id": "mine"})
            error_of(refused, 400, param="temperature")
            assert refused.headers.get_list("x-request-id") == ["mine"]


def test_hanging_up_on_a_relayed_stream_ends_it(several: Server) -> None:
    kept = response_from(several, 2)
    body = {
        "input": "x",
        "previous_response_id": kept["id"],
        "max_output_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
    }
    for _ in range(6):
        with several.http() as http, http.stream("POST", "/v1/responses", json=body) as running:
            next(running.iter_lines())
    assert eventually(lambda: several.gauge("vllm:num_requests_running") == 0)
    assert eventually(lambda: several.gauge("negamax:open_requests") == 0)


def test_response_in_the_background_can_be_cancelled_from_anywhere(several: Server) -> None:
    seen = set[int]()
    wanted = {"input": "Hello", "background": True, "max_output_tokens": 3000, "ignore_eos": True}
    while seen != set(range(COUNT)):
        with several.http() as http:
            running = http.post("/v1/responses", json=wanted).json()
        with several.http() as http:
            assert (
                http.post(f"/v1/responses/{running['id']}/cancel").json()["status"] == "cancelled"
            )
            assert http.get(f"/v1/responses/{running['id']}").json()["status"] == "cancelled"
        seen.add(keeper(running["id"]))


def test_metrics_count_all_processes(several: Server) -> None:
    before = (
        several.gauge("sglang:num_requests_total"),
        several.gauge("vllm:e2e_request_latency_seconds_count"),
    )
    for _ in range(24):
        with several.http() as http:
            assert http.post(CHAT, json=SHORT).status_code == 200
    for _ in range(12):  # whichever process answers
        assert several.gauge("sglang:num_requests_total") == before[0] + 24
        assert several.gauge("vllm:e2e_request_latency_seconds_count") == before[1] + 24
    assert several.gauge("vllm:generation_tokens_total") >= 24 * 8


def test_abort_reaches_the_requests_of_all_processes(several: Server) -> None:
    def run(number: int) -> str:
        with several.http() as http:
            sampling = {"max_new_tokens": 3000, "ignore_eos": True}
            answer = http.post(
                "/generate", json={"text": "x", "rid": f"r{number}", "sampling_params": sampling}
            )
            return str(answer.json()["meta_info"]["finish_reason"]["type"])

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(run, number) for number in range(6)]
        assert eventually(lambda: several.gauge("vllm:num_requests_running") == 6)
        with several.http() as http:
            assert http.post("/abort_request", json={"rid": "r3"}).json()["num_aborted"] == 1
            assert answers[3].result(120) == "abort"
            assert http.post("/abort_request", json={"abort_all": True}).json()["num_aborted"] == 5
        assert {answer.result(120) for answer in answers} == {"abort"}


def test_limit_of_the_queue_is_one_for_all(tmp_path: Path) -> None:
    talk = talking(tmp_path, tokens_per_second=RATE)
    options = f"--api-server-count {COUNT} --max-num-seqs 2 --max-queued-requests 3"
    with serving(*talk, *options.split(), log_file=tmp_path / "log") as server:

        def all_are_decided() -> bool:
            held = ("vllm:num_requests_running", "vllm:num_requests_waiting")
            return len(refused) + sum(map(server.gauge, held)) >= 16

        def run() -> int:
            with (
                server.http() as http,
                http.stream("POST", CHAT, json=LONG | {"stream": True}) as running,
            ):
                if running.status_code == 200:
                    assert decided.wait(120)  # no request frees a place before
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
        with server.http() as http:
            assert http.post(CHAT, json=SHORT).status_code == 200


def test_process_that_dies_is_started_again_and_only_its_requests_end(several: Server) -> None:
    wanted = {"input": "Hello", "ignore_eos": True, "max_output_tokens": 2500, "stream": True}
    keepers: list[int] = []

    def run() -> tuple[int, bool]:
        seen: list[str] = []
        with several.http() as http, http.stream("POST", "/v1/responses", json=wanted) as running:
            lines = (line for line in running.iter_lines() if line.startswith("data:"))
            index = keeper(json.loads(next(lines)[5:])["response"]["id"])
            keepers.append(index)
            with contextlib.suppress(httpx.TransportError):
                seen.extend(lines)
        return index, "response.incomplete" in seen[-1]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(run) for _ in range(8)]
        assert eventually(lambda: len(keepers) == 8)
        victim = max(1, 2, key=keepers.count)
        pid = several.member_pids()[victim - 1]
        os.kill(pid, signal.SIGKILL)
        left = 8 - keepers.count(victim)

        def only_the_others_run() -> bool:
            try:
                return several.gauge("vllm:num_requests_running") <= left
            except httpx.TransportError:  # a connection that the killed process had not accepted
                return False

        assert eventually(only_the_others_run)
        assert all(
            has_ended == (index != victim)
            for index, has_ended in (stream.result(120) for stream in streams)
        )
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
        ends = streams_under_way(several, pool, 8)
        os.kill(several.engine_pid(), signal.SIGKILL)
        for end in ends:
            error, done = end.result(120)
            assert "service_unavailable_error" in error and done == "data: [DONE]"
    wait_until_ready(several)

    def all_ready() -> bool:
        with httpx.Client(
            base_url=several.url, headers={"connection": "close"}, timeout=180
        ) as http:
            return all(http.get("/readyz").status_code == 200 for _ in range(16))

    assert eventually(all_ready)
    for index in range(COUNT):
        response_from(several, index)
    assert several.gauge("negamax:engine_restarts_total") == 1


def test_all_processes_drain_and_leave_together(tmp_path: Path) -> None:
    options = (*talking(tmp_path, tokens_per_second=RATE), "--api-server-count", str(COUNT))
    with serving(*options, log_file=tmp_path / "log") as server:
        family = [server.engine_pid(), *server.member_pids()]
        # a service manager sends SIGTERM to every process; the first one decides when each ends
        for pid in family:
            os.kill(pid, signal.SIGTERM)
        with concurrent.futures.ThreadPoolExecutor(9) as pool:
            ends = streams_under_way(server, pool, 9, max_tokens=500)
            assert server.stop() == 0
            for end in ends:
                last, done = end.result()
                assert '"finish_reason":"length"' in last and done == "data: [DONE]"
        assert not any(map(is_alive, family))
        assert "Traceback" not in server.log


def test_second_signal_aborts_the_requests_of_all_processes(tmp_path: Path) -> None:
    options = (*talking(tmp_path, tokens_per_second=RATE), "--api-server-count", str(COUNT))
    with serving(*options, log_file=tmp_path / "log") as server:
        with concurrent.futures.ThreadPoolExecutor(9) as pool:
            ends = streams_under_way(server, pool, 9)
            server.process.send_signal(signal.SIGTERM)
            with server.http() as http:
                assert eventually(lambda: http.get("/readyz").status_code == 503)
            assert server.stop() == 0
            for end in ends:
                error, done = end.result()
                assert "service_unavailable_error" in error and done == "data: [DONE]"
        assert "Traceback" not in server.log


def test_port_of_another_server_is_refused(several: Server, tmp_path: Path) -> None:
    port = several.url.rsplit(":", 1)[1]
    for count in ("1", "2"):
        process = launch("--api-server-count", count, "--port", port, log_file=tmp_path / "log")
        assert process.wait(START_SECONDS) != 0
        assert process.stdout is not None
        process.stdout.close()
        assert "in use" in (tmp_path / "log").read_text()


def test_engine_that_cannot_start_ends_all(tmp_path: Path) -> None:
    options = ("--api-server-count", "2", "--device", "cpu", "--max-model-len", "100000000")
    process = launch(*options, log_file=tmp_path / "log")
    assert process.wait(START_SECONDS) == 2
    assert process.stdout is not None
    process.stdout.close()
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_relayed_requests_need_the_key(tmp_path: Path) -> None:
    import openai

    options = ("--api-server-count", "2", "--api-key", "secret")
    with serving(*options, program=STUB, log_file=tmp_path / "log") as server:
        client = server.openai("secret")
        kept = client.responses.create(model=MODEL, input="Hello", max_output_tokens=4)
        for _ in range(8):
            with server.http() as http:
                error_of(http.get(f"/v1/responses/{kept.id}"), 401, code="missing_api_key")
                assert (
                    http.get(
                        f"/v1/responses/{kept.id}", headers={"x-api-key": "secret"}
                    ).status_code
                    == 200
                )
                assert http.get("/metrics", headers={"x-api-key": "secret"}).status_code == 200
                assert http.post("/internal/abort", json=None).status_code == 401
                assert (
                    http.post(
                        "/internal/abort", json=None, headers={"x-api-key": "secret"}
                    ).status_code
                    == 404
                )
        with pytest.raises(openai.AuthenticationError):
            server.openai("wrong").responses.retrieve(kept.id)


def test_processes_do_not_outlive_the_first(several: Server) -> None:
    """Run last: it ends the shared server."""
    family = [several.engine_pid(), *several.member_pids()]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        streams = streams_under_way(several, pool, 8)
        os.kill(several.process.pid, signal.SIGKILL)
        # the first process can report nothing; the others report its end
        told = [lines for stream in streams if (lines := stream.result(120))]
    assert told
    for error, done in told:
        assert "service_unavailable_error" in error and "the first server process is gone" in error
        assert done == "data: [DONE]"
    assert eventually(lambda: not any(map(is_alive, family)))
    several.process.wait()
