import json
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.api_support import CHAT, GREEDY, HELLO, post
from tests.e2e.conftest import Server, eventually, launch, serving
from tests.e2e.test_server_processes import wait_until_ready
from tests.ports import free_port
from tests.unit.event_support import Subscriber, view_of_replay

SIZES = ("--num-kv-blocks=40", "--block-size=16", "--max-model-len=512")


def make_option(port: int, **changes: Any) -> str:
    config = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{port}"}
    return f"--kv-events-config={json.dumps(config | changes)}"


def catch_up(subscriber: Subscriber, server: Server) -> None:
    """Receive every batch that the engine has sent. The engine must be idle."""

    def is_complete() -> bool:
        has_some = subscriber.receive(wait_ms=300)  # The wait exceeds a heartbeat interval.
        return not has_some and subscriber.num_sent == server.gauge(
            "negamax:kv_event_batches_total"
        )

    assert eventually(is_complete)


def complete(http: httpx.Client, prompt: list[int], **fields: Any) -> int:
    body = GREEDY | {"prompt": prompt, "max_tokens": 4, "ignore_eos": True} | fields
    usage = post(http, "/v1/completions", **body)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def check_view(subscriber: Subscriber, server: Server, http: httpx.Client, prompts: Any) -> int:
    """Compare the tokens that the subscriber finds with those that the engine finds."""
    found = 0
    for prompt in prompts:
        catch_up(subscriber, server)
        expected = subscriber.view.count_found(prompt, 16)
        assert complete(http, prompt) == expected
        found += expected
    return found


def test_view_of_a_subscriber_is_the_cache_of_the_engine(tmp_path: Path) -> None:
    port = free_port()
    address = f"tcp://127.0.0.1:{port + 1}"
    events = make_option(port, replay_endpoint=address)
    rng = random.Random(5)
    prefixes = [[rng.randrange(40, 250) for _ in range(180)] for _ in range(5)]

    def make_prompt() -> list[int]:
        length = rng.randrange(20, 180)
        return rng.choice(prefixes)[:length] + [rng.randrange(40, 250) for _ in range(40)]

    log_file, size = tmp_path / "log", "--kv-offloading-ratio=2"
    with (
        serving(*SIZES, events, size, log_file=log_file) as server,
        server.http() as http,
        Subscriber(f"tcp://127.0.0.1:{port}") as subscriber,
    ):
        assert eventually(lambda: subscriber.receive(wait_ms=50) or not complete(http, [50] * 17))
        for question in ("What is 2 + 3?", "What is 2 + 4?"):
            messages = [{"role": "system", "content": "You add numbers. " * 9}, *HELLO]
            messages[-1] = {"role": "user", "content": question}
            answer = post(http, CHAT, **GREEDY, messages=messages, max_tokens=20)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 16
        with ThreadPoolExecutor(6) as pool:
            for _ in range(4):
                prompts = [make_prompt() for _ in range(12)]
                list(pool.map(lambda prompt: complete(http, prompt, max_tokens=60), prompts))
        assert server.gauge("vllm:num_preemptions_total") > 0
        assert server.gauge("negamax:kv_offload_evictions_total") > 0
        catch_up(subscriber, server)
        live = subscriber.view.cached
        assert len(live["GPU"]) > 10 and len(live["CPU"]) > 40 and live["CPU"] - live["GPU"]
        assert check_view(subscriber, server, http, [make_prompt() for _ in range(8)]) > 200

        catch_up(subscriber, server)
        assert view_of_replay(address).cached == live

        assert http.post("/flush_cache").status_code == 200
        catch_up(subscriber, server)
        assert not any(live.values()) and complete(http, prefixes[0]) == 0
        catch_up(subscriber, server)
        assert live["GPU"]

        cleared = subscriber.view.num_cleared
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert eventually(lambda: subscriber.receive(wait_ms=50) and not any(live.values()))
        assert subscriber.view.num_cleared > cleared
        wait_until_ready(server)
        assert check_view(subscriber, server, http, [prefixes[1], [*prefixes[1], 50]]) > 100
        assert server.gauge("negamax:kv_events_dropped_total") == 0


def test_each_replica_has_its_port_and_number(tmp_path: Path) -> None:
    port = free_port()
    with (
        serving(
            "--num-replicas=2", make_option(port), log_file=tmp_path / "log", rate=1e4
        ) as server,
        server.http() as http,
        Subscriber(f"tcp://127.0.0.1:{port + 1}") as second,
    ):
        header = {"X-data-parallel-rank": "1"}
        body = GREEDY | {"prompt": [9] * 200, "max_tokens": 2}

        def is_told() -> bool:
            assert http.post("/v1/completions", json=body, headers=header).status_code == 200
            body["prompt"] = [len(body["prompt"]) % 99] * (len(body["prompt"]) + 1)
            return second.receive(wait_ms=100) and len(second.view.cached["GPU"]) > 10

        assert eventually(is_told)
        assert {batch.data_parallel_rank for batch in second.batches} == {1}
        # The port of the first replica is in use.
        assert launch(make_option(port), log_file=tmp_path / "other").wait(120) == 2
        message = (tmp_path / "other").read_text()
    assert f"cannot listen at endpoint tcp://127.0.0.1:{port}: Address already in use" in message


def test_a_bad_config_is_refused(tmp_path: Path) -> None:
    process = launch('--kv-events-config={"endpoint": 5}', log_file=tmp_path / "log")
    assert process.wait(120) == 2
    assert (
        "--kv-events-config: endpoint is 5; allowed: tcp://HOST:PORT"
        in (tmp_path / "log").read_text()
    )
