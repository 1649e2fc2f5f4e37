import json
import os
import random
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.api_support import CHAT
from tests.e2e.conftest import Server, eventually, ready_server, serving
from tests.e2e.test_disaggregation import COMPLETIONS, find_kv_port, serving_pair, tokens
from tests.e2e.test_kv_event_stream import catch_up, complete, make_option
from tests.forked_children import start
from tests.ports import free_port
from tests.unit.event_support import Subscriber

READY = re.compile(r"ready: (\S+)/v1 has (\d) of (\d) servers")
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
# parts that differ between two answers to the same request
OWN = re.compile(
    rb'"(?:id|created|created_at|completed_at|item_id|\w*signature)":\s*("[^"]*"|[\d.]+)'
)


@contextmanager
def routing(folder: Path, *options: str, log_name: str = "router-log") -> Iterator[Server]:
    log_file = folder / log_name
    with log_file.open("w", encoding="utf-8") as log:
        command = ("negamax", "route", "--port", "0", *options)
        process = start(*command, stdout=subprocess.PIPE, stderr=log, text=True)
    with ready_server(process, log_file, READY) as router:
        yield router
        assert "Traceback" not in router.log


def by_server(router: Server, name: str) -> dict[str, float]:
    text = router.get("/metrics").text
    found = re.findall(
        rf'^negamax:router_{name}(?:_total)?{{[^}}]*server="([^"]+)"}} (\S+)$', text, re.M
    )
    return {url: float(value) for url, value in found}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    with ExitStack() as stack:
        servers = []
        for _ in range(2):
            log_file, port = tmp_path_factory.mktemp("routed") / "log", free_port()
            events = make_option(port, replay_endpoint=f"tcp://127.0.0.1:{port + 1}")
            servers.append(stack.enter_context(serving(events, log_file=log_file, rate=200.0)))
        yield servers[0], servers[1]


@pytest.fixture
def router(pair: tuple[Server, Server], tmp_path: Path) -> Iterator[Server]:
    with routing(tmp_path, pair[0].url, pair[1].url) as router:
        yield router


def chat(text: str = "Hello", *, max_tokens: int = 20, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "nano", "messages": messages, "max_tokens": max_tokens, **fields}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat()),
        # Timing decides how many tokens an event has, so request one token.
        (CHAT, chat(max_tokens=1, stream=True, stream_options={"include_usage": True})),
        (COMPLETIONS, {"model": "nano", "prompt": "Say it", "max_tokens": 1, "stream": True}),
        (MESSAGES, chat()),
        (MESSAGES, chat(max_tokens=1, stream=True)),
        (RESPONSES, {"model": "nano", "input": "Hi", "max_output_tokens": 1, "stream": True}),
        (CHAT, chat(max_tokens=-1)),
        ("/v1/no-such-route", {}),
    ],
)
def test_answers_are_the_servers_byte_for_byte(
    pair: tuple[Server, Server], router: Server, path: str, body: dict[str, Any]
) -> None:
    answers = []
    for server in (pair[0], router):
        with server.http() as http:
            # The prompt of the last answer is in the cache of one of the servers.
            headers = {"x-request-id": "mine"}
            answers.append([http.post(path, json=body, headers=headers) for _ in range(3)][-1])
    direct, routed = answers
    assert routed.status_code == direct.status_code
    assert OWN.sub(b"", routed.content) == OWN.sub(b"", direct.content)
    own = ("date", "content-length")
    for answer in answers:
        assert answer.headers["x-request-id"] == "mine"
    first, second = ({k: v for k, v in each.headers.items() if k not in own} for each in answers)
    assert first == second


def test_a_wrong_key_is_refused_by_the_server(tmp_path: Path) -> None:
    with (
        serving(
            "--api-key", "secret", "--api-key", "other", log_file=tmp_path / "log", rate=200.0
        ) as server,
        routing(tmp_path, server.url) as router,
        router.http() as http,
    ):
        for headers in ({}, {"authorization": "Bearer wrong"}):
            answer = http.post(CHAT, json=chat(), headers=headers)
            assert answer.status_code == 401 and "key" in answer.json()["error"]["message"]
            assert answer.headers["www-authenticate"] == "Bearer"
        assert http.post(MESSAGES, json=chat(), headers={"x-api-key": "secret"}).status_code == 200
        # Prompts of two tenants have no common block.
        found = [
            http.post(f"{path}/kv_blocks", json=story(1), headers={"x-api-key": key}).json()
            for path, key in zip(
                (CHAT, MESSAGES, CHAT, CHAT), ("secret", "secret", "other", "secret"), strict=True
            )
        ]
        blocks = [set(each["block_hashes"]) for each in found]
        assert blocks[0] == blocks[1] == blocks[3] and not blocks[0] & blocks[2]
        assert len(blocks[0]) == (found[0]["num_tokens"] - 1) // found[0]["block_size"] > 60


def test_a_stored_response_is_found_on_its_server(router: Server) -> None:
    with router.http() as http:
        asked = {"model": "nano", "max_output_tokens": 5}
        made = [http.post(RESPONSES, json={**asked, "input": f"{at} Hi"}).json() for at in range(4)]
        assert min(by_server(router, "requests").values()) > 0
        for each in made:
            assert http.get(f"{RESPONSES}/{each['id']}").json()["id"] == each["id"]
            more = {**asked, "input": "more", "previous_response_id": each["id"]}
            assert http.post(RESPONSES, json=more).status_code == 200
        assert http.get(f"{RESPONSES}/resp_{'0' * 48}").status_code == 404


def test_sessions_stay_on_their_servers(router: Server) -> None:
    histories = [[{"role": "system", "content": f"You are {name}. " * 100}] for name in "abcd"]
    with router.http() as http:
        for turn in range(4):
            for history in histories:
                history.append({"role": "user", "content": f"Question {turn}"})
                body = {"model": "nano", "messages": history, "max_tokens": 5}
                message = http.post(CHAT, json=body).json()["choices"][0]["message"]
                history.append({"role": "assistant", "content": message["content"]})
    assert list(by_server(router, "requests").values()) == [8, 8]
    assert list(by_server(router, "prefix_hits").values()) == [6, 6]


def test_a_client_that_leaves_ends_its_request_on_the_server(
    pair: tuple[Server, Server], router: Server
) -> None:
    before = sum(server.num_aborted for server in pair)
    with router.http() as http:
        with http.stream("POST", CHAT, json=chat(max_tokens=5000, stream=True)) as answer:
            lines = answer.iter_lines()
            for _ in range(6):
                next(lines)
            assert sum(by_server(router, "open").values()) == 1
        # The answer is not streamed, and the router times out before its first byte.
        with pytest.raises(httpx.TimeoutException):
            http.post(CHAT, json=chat(max_tokens=5000), timeout=0.3)
    assert eventually(lambda: sum(server.num_aborted for server in pair) == before + 2)
    assert eventually(lambda: sum(by_server(router, "open").values()) == 0)


def test_a_dead_server_harms_only_its_own_streams(
    pair: tuple[Server, Server], tmp_path: Path
) -> None:
    with (
        serving(log_file=tmp_path / "log", rate=50.0) as victim,
        # With this interval, no probe finds the dead server before a request does.
        routing(tmp_path, victim.url, pair[0].url, "--health-interval", "600") as router,
        router.http() as http,
        ExitStack() as stack,
    ):
        streams = []
        for at in range(4):
            body = chat(f"{at} Hello", max_tokens=300, stream=True)
            request = http.build_request("POST", CHAT, json=body)
            answer = http.send(request, stream=True)
            stack.callback(answer.close)
            streams.append((answer, answer.iter_lines()))
        for _, lines in streams:
            assert next(lines).startswith("data: ")
        assert by_server(router, "open") == {victim.url: 2, pair[0].url: 2}
        victim.stop(signal.SIGKILL)
        ends = []
        for _, lines in streams:
            events = [line[6:] for line in lines if line.startswith("data: ")]
            ends.append(events[-1] if events[-1] == "[DONE]" else json.loads(events[-1])["error"])
        assert [end == "[DONE]" for end in ends].count(True) == 2
        assert [end["code"] for end in ends if end != "[DONE]"] == ["server_gone"] * 2
        for at in range(6):
            answer = http.post(CHAT, json=chat(f"{at} again"))
            assert answer.status_code == 200
        assert by_server(router, "up") == {victim.url: 0, pair[0].url: 1}
        assert by_server(router, "failures") == {victim.url: 3, pair[0].url: 0}
        assert by_server(router, "retries") == {victim.url: 0, pair[0].url: 1}
        assert http.get("/health").json() == {"status": "degraded"}


def test_open_streams_end_before_the_router_does(
    pair: tuple[Server, Server], tmp_path: Path
) -> None:
    with routing(tmp_path, pair[0].url) as router, router.http() as http:
        with http.stream("POST", CHAT, json=chat(max_tokens=100, stream=True)) as answer:
            lines = answer.iter_lines()
            next(lines)
            router.process.send_signal(signal.SIGTERM)
            assert eventually(lambda: "draining" in router.log)
            assert list(lines)[-2] == "data: [DONE]"
        assert router.process.wait(60) == 0


@contextmanager
def routing_by_events(folder: Path, *servers: Server) -> Iterator[Server]:
    """Run a router that has replayed events of each of `servers`."""
    urls, sources = [server.url for server in servers], list[str]()
    for server in servers:
        for option, key in (("source", "endpoint"), ("replay-source", "replay_endpoint")):
            (address,) = re.findall(rf" listen at {key} (\S+)$", server.log, re.M)
            sources += [f"--kv-event-{option}", f"{server.url}={address}"]
    with routing(folder, *urls, *sources) as router:
        assert eventually(lambda: min(by_server(router, "kv_blocks").values()) > 0)
        yield router


def story(number: int, more: str = "", **fields: Any) -> dict[str, Any]:
    return chat(f"{number} apples. " * 400 + more, max_tokens=2, **fields)


def ask_cached(http: httpx.Client, path: str, body: dict[str, Any]) -> int:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return int(details["cached_tokens"] if details else usage["cache_read_input_tokens"])


def test_prompts_go_to_the_server_whose_events_tell_of_their_blocks(
    pair: tuple[Server, Server], tmp_path: Path
) -> None:
    first, second = pair
    with first.http() as emptied, second.http() as direct:
        for at, http in enumerate((emptied, direct)):
            assert ask_cached(http, CHAT, story(at)) < 100
        with routing_by_events(tmp_path, *pair) as router, router.http() as http:

            def add(path: str, body: dict[str, Any]) -> None:
                before = by_server(router, "kv_blocks")[second.url]
                assert ask_cached(direct, path, body) < 100
                assert eventually(lambda: by_server(router, "kv_blocks")[second.url] > before + 60)

            assert eventually(lambda: min(by_server(router, "kv_blocks").values()) > 60)
            # The router has sent neither prompt.
            assert min(ask_cached(http, CHAT, story(at, "More")) for at in (1, 0)) > 1000
            hits = {first.url: 1, second.url: 1}
            assert by_server(router, "requests") == by_server(router, "kv_event_hits") == hits
            assert emptied.post("/flush_cache").status_code == 200
            assert eventually(lambda: by_server(router, "kv_blocks")[first.url] == 0)
            add(CHAT, story(0))
            # The router has sent this prefix to the first server only.
            assert ask_cached(http, CHAT, story(0, "More")) > 1000
            for path, field in ((MESSAGES, ""), (COMPLETIONS, "prompt"), (RESPONSES, "input")):
                body = story(2 + len(path))
                if field:
                    body |= {field: body.pop("messages")[0]["content"]}
                if path == RESPONSES:
                    body |= {"max_output_tokens": body.pop("max_tokens")}
                add(path, body)
                assert ask_cached(http, path, body) > 1000
            assert ask_cached(http, CHAT, story(0, cache_salt="other")) < 100
            assert by_server(router, "kv_event_hits") == {first.url: 1, second.url: 5}
            assert by_server(router, "kv_event_losses") == {first.url: 0, second.url: 0}


def test_the_server_with_most_cached_tokens_is_chosen_while_blocks_are_evicted(
    tmp_path: Path,
) -> None:
    """Compare the choices with the caches as an independent subscriber of both servers sees them.

    One request runs at a time, so the load of both servers is equal.
    """
    rng = random.Random(8)
    prefixes = [[rng.randrange(40, 250) for _ in range(560)] for _ in range(5)]
    sizes = ("--num-kv-blocks=90", "--block-size=16", "--max-model-len=768")
    found = []
    with ExitStack() as stack:
        servers, views = [], []
        for at in range(2):
            port = free_port()
            events = make_option(port, replay_endpoint=f"tcp://127.0.0.1:{port + 1}")
            # Only one server has a host tier.
            options = (*sizes, events, *(["--kv-offloading-ratio=1"] if at else []))
            servers.append(stack.enter_context(serving(*options, log_file=tmp_path / f"log {at}")))
            views.append(stack.enter_context(Subscriber(f"tcp://127.0.0.1:{port}")))
            http, number = stack.enter_context(servers[at].http()), count(50)
            # The first events are lost if the subscriber is not connected yet.
            while complete(http, [next(number)] * 17) or not views[at].receive(wait_ms=50):
                pass
            assert http.post("/flush_cache").status_code == 200
            complete(http, prefixes[at])
        router = stack.enter_context(routing_by_events(tmp_path, *servers))
        http = stack.enter_context(router.http())
        for number in range(40):
            for server, view in zip(servers, views, strict=True):
                catch_up(view, server)
                known = {server.url: len(set().union(*view.view.cached.values()))}
                assert eventually(
                    lambda known=known: known.items() <= by_server(router, "kv_blocks").items()
                )
            prefix = rng.choice(prefixes)[: rng.randrange(530, 560)]
            if number % 10 == 9:  # Another client's prompt changes one cache.
                with servers[number % 2].http() as direct:
                    complete(direct, prefix)
                continue
            prompt = [*prefix, *(rng.randrange(40, 250) for _ in range(80))]
            best = max(each.view.count_found(prompt, 16) for each in views)
            # The queued store of the last block may evict one block from main memory.
            assert best - 16 <= complete(http, prompt) <= best
            found.append(best)
        assert min(by_server(router, "kv_event_hits").values()) > 5
        assert len({best // 160 for best in found}) > 2, found  # Some prefixes were evicted.


def test_one_server_prefills_and_the_other_decodes(tmp_path: Path) -> None:
    """Compare both protocols with one server, and end the prefilling server under a request."""
    with serving_pair(tmp_path, kv_load_failure_policy="fail") as (first, second):
        # With this interval, no probe finds the dead server before a request does.
        line = ("--prefill", first.url, "--decode", second.url, "--health-interval", "600")
        room_line = ("--pd-disaggregation", *line[:2], find_kv_port(first), *line[2:])
        with (
            routing(tmp_path, *line) as router,
            routing(tmp_path, *room_line, log_name="rooms") as rooms,
            ThreadPoolExecutor() as threads,
        ):
            bodies: list[tuple[str, dict[str, Any]]] = [
                (COMPLETIONS, {"prompt": tokens(1, 300), "max_tokens": 12, "temperature": 0}),
                (CHAT, chat("What is 47 + 38? " * 20, temperature=0, n=2)),
                (COMPLETIONS, {"prompt": [tokens(3, 90), tokens(4, 90)], "temperature": 0}),
            ]
            for front, own in ((router, bodies[:2]), (rooms, bodies)):
                count = second.gauge("negamax:remote_prefills_total")
                for path, body in own:
                    routed = front.post(path, body, cache_salt=front.url)
                    assert routed["choices"] == first.post(path, body)["choices"]
                remote = second.gauge("negamax:remote_prefills_total") - count
                assert remote == (3 if front is router else 5)
                assert by_server(front, "requests") == dict.fromkeys(
                    (first.url, second.url), len(own)
                )
                assert not any(by_server(front, "failures").values())
            assert second.gauge("negamax:failed_remote_prefills_total") == 0
            local = second.gauge("negamax:local_prefills_total")
            body, engine = {"prompt": tokens(2, 300), "max_tokens": 5}, first.engine_pid()
            os.kill(engine, signal.SIGSTOP)  # so that the request is open
            waiting = threads.submit(rooms.post, COMPLETIONS, body)
            assert eventually(lambda: by_server(rooms, "open")[first.url] == 1)
            first.stop(signal.SIGKILL)
            os.kill(engine, signal.SIGCONT)
            assert waiting.result()["choices"][0]["text"]
            assert router.post(COMPLETIONS, body)["choices"][0]["text"]
            for front in (router, rooms):
                assert by_server(front, "failures") == {first.url: 1, second.url: 0}
            assert second.gauge("negamax:local_prefills_total") == local + 2
