import concurrent.futures
import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.api_support import CHAT, HELLO, error_of
from tests.e2e.conftest import MODEL, Server, eventually, serving, shared
from tests.e2e.test_server_processes import is_alive, ranks_of, wait_until_ready

RUNNING, TOKENS = "vllm:num_requests_running", "vllm:generation_tokens_total"
HEADER = "X-Data-Parallel-Rank"
TEXTS = ["The cat sat on", "2 + 2 =", "Hello", "Once upon a time there", "A", "x = [1, 2,"]
# each endpoint that generates, with a short request
REQUESTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 4},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
    "/v1/messages": {"model": MODEL, "messages": HELLO, "max_tokens": 4},
    "/generate": {"text": "Hello", "sampling_params": {"max_new_tokens": 4}},
}
two = shared("--num-replicas 2 --api-server-count 2 --device cpu")


def completion(server: Server, prompt: Any, *, rank: int | None = None, **fields: Any) -> Any:
    body = {"prompt": prompt, "temperature": 0.0, "max_tokens": 24, "ignore_eos": True} | fields
    headers = {} if rank is None else {HEADER: str(rank)}
    return server.post("/v1/completions", body, headers=headers)


def num_tokens(server: Server) -> dict[str, float]:
    """Return each rank's generated tokens, after the first server process has counted all."""
    time.sleep(0.5)  # two heartbeats
    return server.by_rank(TOKENS)


def test_replicas_give_the_answers_of_one_engine(two: Server, server: Server) -> None:
    expected = [completion(server, text)["choices"][0]["text"] for text in TEXTS]
    for rank in (0, 1, None):
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda text, at=rank: completion(two, text, rank=at), TEXTS))
        assert [each["choices"][0]["text"] for each in found] == expected


def test_requests_are_spread_over_replicas_unless_a_field_pins_them(two: Server) -> None:
    before = num_tokens(two)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: completion(two, [at + 5] * 9, max_tokens=64), range(8)))
    gained = {rank: count - before[rank] for rank, count in num_tokens(two).items()}
    assert sorted(gained) == ["0", "1"] and sum(gained.values()) == 512
    assert min(gained.values()) >= 3 * 64
    before = num_tokens(two)
    completion(two, "a", routed_dp_rank=1)
    completion(two, "a", data_parallel_rank=1)
    completion(two, "a", routed_dp_rank=0, rank=1)
    assert num_tokens(two) == {"0": before["0"], "1": before["1"] + 72}


def test_a_prompt_goes_where_its_prefix_is_from_any_server_process(two: Server) -> None:
    prompt = [40 + at % 80 for at in range(200)]
    cached = []
    for turn in range(6):
        usage = completion(two, [*prompt, *range(3, 8 + turn)], max_tokens=1)["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 and min(cached[1:]) >= 192


def test_every_endpoint_pins_ranks_and_refuses_unknown_ones(two: Server) -> None:
    """Repeat each request, so that both server processes answer."""
    before = num_tokens(two)
    for path, number in itertools.product(REQUESTS, range(4)):
        with two.http() as http:
            headers = {(HEADER, HEADER.lower())[number % 2]: "1"}
            pinned = http.post(path, json=REQUESTS[path], headers=headers)
            assert pinned.status_code == 200, pinned.text
            for value in ("2", "-1", "one", "1.0", "", "99999999999999999999"):
                refused = http.post(path, json=REQUESTS[path], headers={HEADER: value})
                assert refused.status_code == 400, value
                assert "allowed: 0 to 1" in refused.text and HEADER.lower() in refused.text.lower()
            refused = http.post(path, json=REQUESTS[path] | {"routed_dp_rank": 2})
            assert refused.status_code == 400
            assert "routed_dp_rank is '2'; allowed: 0 to 1" in refused.text
    after = num_tokens(two)
    assert after["1"] >= before["1"] + 4 * len(REQUESTS) and after["0"] == before["0"]


def test_single_rank_accepts_only_0(server: Server, http: httpx.Client) -> None:
    assert completion(server, "a", rank=0)["choices"]
    refused = http.post("/v1/completions", json={"prompt": "a"}, headers={HEADER: "1"})
    error = error_of(refused, 400)
    assert error["code"] == "no_such_data_parallel_rank"
    assert "'1'; allowed: 0, the only rank" in error["message"]
    both = [(HEADER, "0"), (HEADER, "1")]
    twice = http.post("/v1/completions", json={"prompt": "a"}, headers=both)
    assert "'0, 1'" in error_of(twice, 400)["message"]


class Stream:
    def __init__(self, server: Server, rank: int, **fields: Any) -> None:
        self.lines: list[str] = []
        self.begun = threading.Event()
        body = {"messages": HELLO, "ignore_eos": True, "max_tokens": 400, "stream": True} | fields

        def run() -> None:
            with (
                server.http() as http,
                http.stream("POST", CHAT, json=body, headers={HEADER: str(rank)}) as running,
            ):
                for line in filter(None, running.iter_lines()):
                    self.lines.append(line)
                    self.begun.set()
            self.begun.set()

        self.thread = threading.Thread(target=run)
        self.thread.start()
        assert self.begun.wait(120)

    def end(self) -> str:
        self.thread.join(120)
        assert self.lines[-1] == "data: [DONE]"
        return self.lines[-2]


def test_a_dead_replica_fails_its_own_requests_and_restarts(tmp_path: Path) -> None:
    options = ["--num-replicas", "2", "--api-server-count", "2", "--max-engine-restarts", "1"]
    with serving(*options, log_file=tmp_path / "log", rate=120) as server, server.http() as http:
        dead = server.engine_pids()[1]
        streams = [Stream(server, rank) for rank in (0, 1) for _ in range(3)]
        os.kill(dead, signal.SIGKILL)
        for stream in streams[3:]:
            assert "service_unavailable_error" in stream.end()
        # The replica is back within a second or two. Until then the other one answers.
        assert http.get("/health").json()["replicas"][0] == {"replica": 0, "status": "ok"}
        assert http.post(CHAT, json=REQUESTS[CHAT]).status_code == 200
        for stream in streams[:3]:
            assert '"finish_reason":"length"' in stream.end()

        assert eventually(lambda: http.get("/health").json()["status"] == "ok")
        assert not is_alive(dead)
        assert server.by_rank("negamax:engine_restarts_total") == {"0": 0.0, "1": 1.0}
        for _ in range(6):  # Any server process may answer.
            assert server.send(CHAT, REQUESTS[CHAT], headers={HEADER: "1"}).status_code == 200

        # A replica that dies too often stays dead. The server ends with the last replica.
        os.kill(server.engine_pids()[1], signal.SIGKILL)
        failed = {"replica": 1, "status": "failed"}
        assert eventually(lambda: http.get("/health").json().get("replicas", [0])[-1] == failed)
        assert http.get("/health").json()["status"] == "degraded"
        assert http.get("/readyz").status_code == 200
        refused = http.post(CHAT, json=REQUESTS[CHAT], headers={HEADER: "1"})
        error_of(refused, 503, code="engine_dead")
        for _ in range(6):
            assert server.send(CHAT, REQUESTS[CHAT]).status_code == 200
        assert server.by_rank("negamax:engine_up") == {"0": 1.0, "1": 0.0}
        first = server.engine_pid()
        os.kill(first, signal.SIGKILL)
        assert eventually(lambda: server.engine_pids() not in ([], [first]))
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert server.process.wait(120) == 1
        assert "replica 1: the engine process ended with exit code -9" in server.log
        assert "too often" in server.log and "Traceback" not in server.log


@pytest.mark.full
def test_ranks_of_one_engine_are_pinned_counted_and_restarted(tmp_path: Path) -> None:
    options = ("--data-parallel-size", "2", "--device", "cpu")
    with serving(*options, log_file=tmp_path / "log") as server:
        texts = [completion(server, "Hello", rank=rank)["choices"][0]["text"] for rank in (1, 1, 0)]
        assert len(set(texts)) == 1
        assert num_tokens(server) == {"0": 24.0, "1": 48.0}
        refused = server.send(CHAT, REQUESTS[CHAT], headers={HEADER: "2"})
        assert "allowed: 0 to 1" in error_of(refused, 400)["message"]
        streams = [Stream(server, rank, max_tokens=3000) for rank in (0, 1)]
        assert eventually(lambda: server.by_rank(RUNNING) == {"0": 1.0, "1": 1.0})
        engine = server.engine_pid()
        ranks = ranks_of(engine)
        os.kill(ranks[1], signal.SIGKILL)
        for stream in streams:  # All ranks run each step together.
            assert "service_unavailable_error" in stream.end()
        wait_until_ready(server)
        assert not any(map(is_alive, (engine, *ranks)))
        for rank in (0, 1):
            assert completion(server, "Hello", rank=rank)["choices"][0]["text"] == texts[0]
        assert "rank 1 ended with exit code -9" in server.log
