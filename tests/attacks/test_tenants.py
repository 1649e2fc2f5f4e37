import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.api_support import CHAT, RESPONSES, error_of
from tests.e2e.conftest import STUB, Server, eventually, serving, shared

FOREVER = {"max_tokens": 3000, "ignore_eos": True, "stream": True}
MESSAGES = [{"role": "user", "content": "Tell me something."}]
SHORT = {"messages": MESSAGES, "max_tokens": 1}


KEYS = "--api-key anna --api-key bert --admin-api-key root"
keyed = shared(f"{KEYS} --max-num-seqs 2", rate=200)


def as_holder(server: Server, key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=server.url, timeout=120, headers=headers)


def begin(http: httpx.Client, **fields: Any) -> Iterator[str]:
    with http.stream("POST", CHAT, json={"messages": MESSAGES, **FOREVER, **fields}) as answer:
        assert answer.status_code == 200, answer.read()
        yield from (line for line in answer.iter_lines() if line.startswith("data:"))


def test_an_abort_ends_exactly_the_named_request(http: httpx.Client) -> None:
    job, job_2 = begin(http, rid="job"), begin(http, rid="job-2")
    next(job), next(job_2)
    for name in ("jo", "chatcmpl", "chatcmpl-jo", "job-", "2", ".*", ""):
        answer = http.post("/abort_request", json={"rid": name})
        assert answer.status_code == 400 or answer.json() == {"num_aborted": 0}, name
    assert http.post("/abort_request", json={"rid": "job"}).json() == {"num_aborted": 1}
    assert len(list(job)) < 3000
    next(job_2)
    assert http.post("/abort_request", json={"rid": "chatcmpl-job-2"}).json() == {"num_aborted": 1}
    list(job_2)


def test_a_name_of_several_prompts_ends_them_all(http: httpx.Client) -> None:
    endless = {"max_new_tokens": 3000, "ignore_eos": True}
    body = {"text": ["a", "b"], "rid": "r", "sampling_params": endless, "stream": True}
    with http.stream("POST", "/generate", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert http.post("/abort_request", json={"rid": "r_0"}).json() == {"num_aborted": 1}
        # The server has noticed the disconnect.
        assert any('"type":"abort"' in line.replace(" ", "") for line in lines)
        assert http.post("/abort_request", json={"rid": "r"}).json() == {"num_aborted": 1}


def test_operations_on_all_need_the_admin_key(keyed: Server) -> None:
    with as_holder(keyed, "anna") as anna, as_holder(keyed, "root") as root:
        one = begin(anna)
        next(one)
        recording = [f"/{name}_expert_distribution_record" for name in ("start", "stop", "dump")]
        recording += ["/start_profile", "/stop_profile"]
        for path in ("/abort_request", "/flush_cache", *recording):
            body = {"abort_all": True} if path == "/abort_request" else {}
            error_of(anna.post(path, json=body), 403, code="admin_key_needed")
        next(one)
        assert root.post("/abort_request", json={"abort_all": True}).json() == {"num_aborted": 1}
        list(one)
        assert eventually(lambda: root.post("/flush_cache").status_code == 200)
        assert root.get("/v1/models").status_code == 200
        for http in (anna, root):
            assert http.get("/flush_cache").status_code == 405


def test_without_an_admin_key_no_client_is_administrator(tmp_path: Path) -> None:
    with (
        serving("--api-key", "anna", program=STUB, log_file=tmp_path / "log") as server,
        as_holder(server, "anna") as anna,
    ):
        assert anna.post("/flush_cache").status_code == 403
        assert anna.post("/abort_request", json={"abort_all": True}).status_code == 403
        assert anna.post("/abort_request", json={"rid": "x"}).json() == {"num_aborted": 0}


EVIL = {"origin": "https://evil.example"}
FOREIGN = [EVIL, EVIL | {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}]
FOREIGN += [{"origin": "null"}, {"origin": "http://127.0.0.1:1"}, {"origin": "http://["}]


@pytest.mark.parametrize("headers", FOREIGN, ids=json.dumps)
def test_pages_of_other_sites_change_nothing(http: httpx.Client, headers: dict[str, str]) -> None:
    for path in ("/flush_cache", "/abort_request", CHAT, RESPONSES):
        sent = {"content-type": "text/plain", **headers}
        answer = http.post(path, content=b'{"abort_all": true}', headers=sent)
        error_of(answer, 403, code="cross_site")


def test_own_pages_programs_keys_pass(server: Server, http: httpx.Client, keyed: Server) -> None:
    own = [{}, {"origin": server.url}]
    own += [{"origin": "https://proxy.example", "sec-fetch-site": "same-origin"}]
    for headers in own:
        assert http.post(CHAT, json=SHORT, headers=headers).status_code == 200, headers
    with as_holder(keyed, "anna") as anna:  # A page of another site cannot set this header.
        foreign = {"origin": "https://app.example"}
        assert anna.post(CHAT, json=SHORT, headers=foreign).status_code == 200


def test_one_key_does_not_keep_all_rows_from_another(keyed: Server) -> None:
    with as_holder(keyed, "anna") as anna, as_holder(keyed, "bert") as bert:
        many = begin(anna, n=40)
        next(many)
        for _ in range(3):
            assert bert.post(CHAT, json=SHORT).status_code == 200
        metrics = bert.get("/metrics").text
        (waiting,) = re.findall(r"(?m)^vllm:num_requests_waiting\S* (\S+)$", metrics)
        assert float(waiting) >= 38
        anna.close()


def test_priority_needs_the_option(http: httpx.Client) -> None:
    for path, body in (
        (CHAT, SHORT),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/messages", SHORT | {"model": "nano"}),
        (RESPONSES, {"input": "a", "max_output_tokens": 1}),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}}),
    ):
        assert http.post(path, json=body | {"priority": 0}).status_code == 200
        answer = http.post(path, json=body | {"priority": -(2**31)})
        assert answer.status_code == 400 and "--scheduling-policy priority" in answer.text, path


def test_with_the_option_priority_is_taken(tmp_path: Path) -> None:
    options = ("--scheduling-policy", "priority")
    with (
        serving(*options, program=STUB, log_file=tmp_path / "log") as server,
        server.http() as http,
    ):
        assert http.post(CHAT, json=SHORT | {"priority": -5}).status_code == 200
