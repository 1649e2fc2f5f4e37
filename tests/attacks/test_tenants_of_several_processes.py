import concurrent.futures
import contextlib
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.attacks.test_tenants import FOREVER, KEYS, MESSAGES, as_holder, begin
from tests.e2e.api_support import CHAT, RESPONSES, error_of
from tests.e2e.conftest import Server, eventually, shared

BY_ID = (("GET", ""), ("GET", "/input_items"), ("DELETE", ""), ("POST", "/cancel"))
COUNT = 2
QUEUE = 8
SIZES = f"--max-num-seqs 2 --max-queued-requests {QUEUE} --api-server-count {COUNT}"
keyed = shared(f"{KEYS} --api-key carl {SIZES}", rate=200)


@contextlib.contextmanager
def holder(server: Server, key: str, index: int) -> Iterator[httpx.Client]:
    for _ in range(100):
        with as_holder(server, key) as http:
            answer = http.post(RESPONSES, json={"input": "Hello", "max_output_tokens": 1})
            if int(answer.json()["id"][-2:], 16) == index:
                yield http
                return
    raise AssertionError(f"process {index} answered no request")


# (API server process of the owner's first request, of all later requests): equal or different
BOTH = [(0, 0), (1, 0), *(pytest.param(*pair, marks=pytest.mark.full) for pair in ((0, 1), (1, 1)))]


@pytest.mark.parametrize(("one", "other"), BOTH)
def test_responses_are_their_own_keys(keyed: Server, one: int, other: int) -> None:
    with holder(keyed, "anna", one) as anna:
        kept = anna.post(RESPONSES, json={"input": "Hello", "max_output_tokens": 4}).json()
        assert int(kept["id"][-2:], 16) == one
    place = f"{RESPONSES}/{kept['id']}"
    reference = {"type": "item_reference", "id": kept["output"][0]["id"]}
    for key in ("bert", "root"):
        with holder(keyed, key, other) as stranger:
            for method, end in BY_ID:
                assert stranger.request(method, place + end).status_code == 404, (method, end)
            continued = {"input": "And?", "previous_response_id": kept["id"]}
            for body in (continued, {"input": [reference]}):
                for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
                    assert stranger.post(path, json=body).status_code == 404
    with holder(keyed, "anna", other) as anna:
        assert anna.get(place).json() == kept
        for body in (continued, {"input": [reference]}):
            assert anna.post(RESPONSES, json=body | {"max_output_tokens": 1}).status_code == 200
        assert anna.delete(place).status_code == 200


@pytest.mark.parametrize(("one", "other"), BOTH)
def test_background_responses_are_cancelled_by_key(keyed: Server, one: int, other: int) -> None:
    wanted = {"input": "Hello", "background": True, "max_output_tokens": 30_000, "ignore_eos": True}
    with holder(keyed, "anna", one) as anna:
        place = f"{RESPONSES}/{anna.post(RESPONSES, json=wanted).json()['id']}"
    with holder(keyed, "bert", other) as bert:
        assert bert.post(f"{place}/cancel").status_code == 404
    with holder(keyed, "anna", other) as anna:
        assert anna.get(place).json()["status"] == "in_progress"
        assert anna.post(f"{place}/cancel").json()["status"] == "cancelled"


@pytest.mark.parametrize(("one", "other"), BOTH)
def test_aborts_end_what_their_own_key_asked_for(keyed: Server, one: int, other: int) -> None:
    with holder(keyed, "anna", one) as anna:
        running = begin(anna, rid="mine")
        next(running)
        with holder(keyed, "bert", other) as bert:
            assert bert.post("/abort_request", json={"rid": "mine"}).json() == {"num_aborted": 0}
            answer = bert.post("/abort_request", json={"abort_all": True})
            error_of(answer, 403, code="admin_key_needed")
        next(running)
        with holder(keyed, "anna", other) as same:
            assert same.post("/abort_request", json={"rid": "mine"}).json() == {"num_aborted": 1}
        assert len(list(running)) < FOREVER["max_tokens"]
        running = begin(anna, rid="other")
        next(running)
        with as_holder(keyed, "root") as root:
            assert root.post("/abort_request", json={"rid": "other"}).json() == {"num_aborted": 1}
        list(running)


def test_internal_routes_are_closed_to_clients(keyed: Server) -> None:
    for index in range(COUNT):
        with holder(keyed, "root", index) as root:
            for path in ("/internal/abort", "/internal/item"):
                answer = root.post(path, json={"name": None, "tenant": None, "id": ""})
                assert answer.status_code == 404


def test_prefixes_are_found_again_by_their_own_key(keyed: Server) -> None:
    body = {"messages": [{"role": "user", "content": "word " * 200}], "max_tokens": 1}

    def cached(key: str, index: int, **fields: Any) -> bool:
        with holder(keyed, key, index) as http:
            usage = http.post(CHAT, json=body | fields).json()["usage"]
        return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0) > 100

    assert not cached("anna", 0) and cached("anna", 0) and cached("anna", 1)
    assert not cached("bert", 1) and cached("bert", 0)
    assert not cached("anna", 1, cache_salt="s") and cached("anna", 0, cache_salt="s")
    assert not cached("bert", 0, cache_salt="s")


def waiting_of(server: Server) -> float:
    with as_holder(server, "root") as http:
        text = http.get("/metrics").text
    (found,) = re.findall(r"^vllm:num_requests_waiting\{\S* (\S+)$", text, re.MULTILINE)
    return float(found)


def test_one_key_leaves_room_in_the_queue_for_the_next(keyed: Server) -> None:
    body = {"messages": MESSAGES, **FOREVER, "stream": False}

    def last_status(http: httpx.Client) -> int:
        return http.post(CHAT, json=body).status_code

    with contextlib.ExitStack() as stack:
        first, *annas = [stack.enter_context(holder(keyed, "anna", i % COUNT)) for i in range(6)]
        berts = [stack.enter_context(holder(keyed, "bert", i)) for i in range(COUNT)]
        carl = stack.enter_context(holder(keyed, "carl", 0))
        root = stack.enter_context(as_holder(keyed, "root"))
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(7))
        running = begin(first, n=2, max_tokens=30_000)  # The response runs until it is aborted.
        next(running)
        answers = []
        for number, http in enumerate((*annas[:4], *berts, carl)):
            if http is berts[0]:
                refused = annas[4].post(CHAT, json=body)
                error = error_of(refused, 429)
                assert error["code"] == "queue_share_full" and "leaves free" in error["message"]
                assert int(refused.headers["retry-after"]) >= 1
            answers.append(pool.submit(last_status, http))
            assert eventually(lambda expected=number + 1: waiting_of(keyed) == expected)
        assert annas[4].post(CHAT, json=body).status_code == 429
        while not all(answer.done() for answer in answers):
            root.post("/abort_request", json={"abort_all": True})
        assert {answer.result() for answer in answers} == {200}
        list(running)
    assert eventually(lambda: waiting_of(keyed) == 0)
