from __future__ import annotations

import json
import os
import random
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.api_support import CHAT, QUESTION, WEATHER, WEATHER_QUESTION
from tests.e2e.conftest import Server, eventually, serving
from tests.ports import free_port
from tests.probes import needs_nixl

COMPLETIONS = "/v1/completions"
ASK_PREFILL: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
ASK_PREFILL |= {f"remote_{name}": None for name in ("engine_id", "block_ids", "host", "port")}
SIZES = ("--kv-offloading-size=0.1", "--num-kv-blocks=300", "--device=cpu")
PAIR = tuple[Server, Server]


def exchange(role: str, port: int, **fields: Any) -> str:
    given = {"kv_connector": "TcpConnector", "kv_role": role, "kv_port": port, **fields}
    return f"--kv-transfer-config={json.dumps(given)}"


@contextmanager
def serving_pair(
    folder: Path,
    *options: str,
    first: tuple[str, ...] = (),
    second: tuple[str, ...] = (),
    roles: tuple[str, str] = ("kv_producer", "kv_consumer"),
    model: str = "nano",
    **fields: Any,
) -> Iterator[PAIR]:
    servers = []
    with ExitStack() as stack:
        for role, own in zip(roles, (first, second), strict=True):
            line = (*SIZES, exchange(role, free_port(), **fields), *options, *own)
            log_file = folder / f"log-{len(servers)}"
            servers.append(stack.enter_context(serving(*line, log_file=log_file, model=model)))
        yield servers[0], servers[1]
        assert "Traceback" not in servers[0].log + servers[1].log


def find_kv_port(server: Server) -> str:
    (line,) = [line for line in server.log.splitlines() if "exchanges prompts" in line]
    (port,) = re.findall(r":(\d+) as ", line)
    return str(port)


def prefill(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Let a server compute a prompt as vLLM's proxies do. Return the `kv_transfer_params`."""
    once = {"max_tokens": 1, "stream": False, "kv_transfer_params": ASK_PREFILL}
    params: dict[str, Any] = server.post(path, body, **once)["kv_transfer_params"]
    assert params["do_remote_prefill"] and not params["do_remote_decode"]
    return params


def run_apart(pair: PAIR, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return pair[1].post(path, body, kv_transfer_params=prefill(pair[0], path, body))


def run_alone(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return server.post(path, body, cache_salt="alone")


def tokens(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 1900) for _ in range(length)]


def check_same(pair: PAIR, path: str, body: dict[str, Any], *, num_remote: int = 1) -> None:
    """Compare the answer of two servers with that of the prefilling server alone."""
    count = pair[1].gauge("negamax:remote_prefills_total")
    apart, alone = run_apart(pair, path, body), run_alone(pair[0], path, body)
    assert apart["choices"] == alone["choices"]
    for usage in (apart["usage"], alone["usage"]):
        usage.pop("prompt_tokens_details")
    assert apart["usage"] == alone["usage"]
    assert pair[1].gauge("negamax:remote_prefills_total") == count + num_remote


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PAIR]:
    folder = tmp_path_factory.mktemp("pair")
    extra = {"lease_seconds": 8.0}
    with serving_pair(
        folder, kv_load_failure_policy="recompute", kv_connector_extra_config=extra
    ) as found:
        yield found
        assert eventually(lambda: found[0].gauge("negamax:kv_leases") == 0, seconds=20)


def test_texts_logprobs_and_usage_are_those_of_one_server(pair: PAIR) -> None:
    blocks = pair[1].gauge("negamax:pulled_kv_blocks_total")
    for length in (17, 300, 700):
        body = {
            "prompt": tokens(length, length),
            "max_tokens": 20,
            "temperature": 0.9,
            "seed": 3,
            "logprobs": 3,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        check_same(pair, COMPLETIONS, body)
    assert pair[1].gauge("negamax:pulled_kv_blocks_total") == blocks + 1 + 18 + 43
    body = {"prompt": tokens(700, 720), "max_tokens": 5, "temperature": 0}
    again = run_apart(pair, COMPLETIONS, body)
    # The server already has the first 43 blocks; usage counts tokens cached by the other server.
    assert pair[1].gauge("negamax:pulled_kv_blocks_total") == blocks + 1 + 18 + 43 + 1
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 688


def test_choices_stops_penalties_and_grammars(pair: PAIR) -> None:
    chat = {"messages": QUESTION, "max_tokens": 60, "temperature": 0.8, "seed": 5}
    check_same(pair, CHAT, {**chat, "n": 3, "logprobs": True, "top_logprobs": 2}, num_remote=3)
    check_same(pair, CHAT, {**chat, "stop": ["e", "a"], "frequency_penalty": 1.0})
    schema = {"type": "object", "properties": {"apples": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    check_same(pair, CHAT, {**chat, "response_format": form})
    tools = {"tools": [WEATHER], "tool_choice": "required", "messages": WEATHER_QUESTION}
    answer = run_apart(pair, CHAT, {**chat, **tools, "max_tokens": 200, "temperature": 0})
    call = answer["choices"][0]["message"]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}


def test_a_short_prompt_and_prompt_logprobs_are_computed_by_the_decoding_server(pair: PAIR) -> None:
    for fields in ({"prompt": tokens(1, 9)}, {"prompt": tokens(2, 90), "prompt_logprobs": 1}):
        body = {"max_tokens": 6, "temperature": 0, **fields}
        assert run_apart(pair, COMPLETIONS, body)["choices"]
    assert pair[1].gauge("negamax:failed_remote_prefills_total") == 0


def test_a_stream_and_an_abandoned_one(pair: PAIR) -> None:
    body = {"prompt": tokens(7, 200), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    expected = run_alone(pair[0], COMPLETIONS, body)["choices"][0]["text"]
    params = prefill(pair[0], COMPLETIONS, body)
    streamed = {**body, "stream": True, "kv_transfer_params": params}
    with pair[1].http() as http, http.stream("POST", COMPLETIONS, json=streamed) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == expected
    params = prefill(pair[0], COMPLETIONS, {**body, "prompt": tokens(8, 400)})
    with pair[1].http() as http, pytest.raises(httpx.TimeoutException):
        late = {"prompt": tokens(8, 400), "max_tokens": 3000, "kv_transfer_params": params}
        http.post(COMPLETIONS, json=late | {"ignore_eos": True}, timeout=0.05)
    assert eventually(lambda: pair[0].gauge("negamax:kv_leases") == 0, seconds=40)
    check_same(pair, COMPLETIONS, body)


def test_params_that_no_server_returned_fail_or_are_recomputed(pair: PAIR) -> None:
    body = {"prompt": tokens(11, 100), "max_tokens": 6, "temperature": 0}
    expected = run_alone(pair[0], COMPLETIONS, body)["choices"]
    params = prefill(pair[0], COMPLETIONS, body)
    failed = pair[1].gauge("negamax:failed_remote_prefills_total")
    changes: tuple[dict[str, Any], ...] = (
        {"remote_engine_id": "another"},
        {"remote_request_id": "another"},
        {"remote_port": free_port()},
    )
    for change in changes:
        answer = pair[1].post(COMPLETIONS, body, kv_transfer_params={**params, **change})
        assert answer["choices"] == expected
    other = body | {"prompt": tokens(12, 100)}
    assert pair[1].post(COMPLETIONS, other, kv_transfer_params=params)["choices"] != expected
    assert pair[1].gauge("negamax:failed_remote_prefills_total") == failed + len(changes) + 1
    for wrong in (
        {"remote_host": None},
        {"remote_host": "192.0.2.1"},
        {"remote_host": "10.0.0.1"},  # remote_host is another machine, kv_ip is loopback.
        {"remote_port": 70000},
        {"do_remote_decode": True},
        {"remote_port": "x"},
        {"remote_engine_id": "x" * 129},
    ):
        refused = pair[1].send(COMPLETIONS, body, kv_transfer_params={**params, **wrong})
        assert refused.status_code == 400
    # One server only prefills, and the other one only decodes.
    refused = pair[0].send(COMPLETIONS, body, kv_transfer_params=params)
    assert "prefills only" in refused.text
    refused = pair[1].send(COMPLETIONS, body, kv_transfer_params=ASK_PREFILL)
    assert "decodes only" in refused.text


def test_rooms_of_sglangs_router(pair: PAIR) -> None:
    """Send the same body to both servers at once, as SGLang's router does."""
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": int(find_kv_port(pair[0]))}
    with ThreadPoolExecutor() as threads:
        for number, path in enumerate(("/generate", COMPLETIONS, CHAT, "/generate")):
            body: dict[str, Any] = {"temperature": 0, "max_tokens": 15}
            if path == "/generate":
                sampling = {"temperature": 0, "max_new_tokens": 15}
                body = {"input_ids": tokens(number, 150), "sampling_params": sampling}
            elif path == CHAT:
                body |= {"messages": QUESTION}
            else:
                body |= {"prompt": tokens(number, 150), "n": 2}
            expected = run_alone(pair[0], path, body)
            both = body | room | {"bootstrap_room": 7_000_000_000 + number}
            first, second = threads.map(Server.post, pair, [path] * 2, [both] * 2)
            if path == "/generate":
                assert second["text"] == expected["text"]
                assert first["meta_info"]["completion_tokens"] == 1
            else:
                assert second["choices"] == expected["choices"]
        prompts = [tokens(30 + number, 100 + number) for number in range(3)]
        sampling = {"temperature": 0, "max_new_tokens": 9}
        for rooms in ([5, 9, 70], 100):
            batch: dict[str, Any] = {"input_ids": prompts, "sampling_params": sampling}
            expected = run_alone(pair[0], "/generate", batch)
            both = batch | room | {"bootstrap_room": rooms, "cache_salt": str(rooms)}
            first, second = threads.map(Server.post, pair, ["/generate"] * 2, [both] * 2)
            assert [one["text"] for one in second] == [one["text"] for one in expected]
    assert pair[1].gauge("negamax:failed_remote_prefills_total") <= 5
    wrong = pair[1].send("/generate", both, bootstrap_room=[1, 2])
    assert wrong.status_code == 400 and "2 values for 3 prompts" in wrong.text


def test_several_prompts_of_one_body_are_computed_twice(pair: PAIR) -> None:
    count = pair[0].gauge("negamax:kv_leases")
    body = {"prompt": [tokens(40, 60), tokens(41, 60)], "max_tokens": 4, "temperature": 0}
    answer = pair[0].post(COMPLETIONS, body, kv_transfer_params=ASK_PREFILL)
    assert "kv_transfer_params" not in answer and len(answer["choices"]) == 2
    assert pair[0].gauge("negamax:kv_leases") == count


@needs_nixl
def test_a_pair_with_nixl(tmp_path: Path) -> None:
    nixl = {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"transport": "shm"}}
    with serving_pair(tmp_path, **nixl) as pair:
        for length in (17, 700):
            body = {"prompt": tokens(length, length), "max_tokens": 20, "ignore_eos": True}
            check_same(pair, COMPLETIONS, {**body, "temperature": 0.9, "seed": 3, "logprobs": 3})
        assert pair[1].gauge("negamax:pulled_kv_blocks_total") == 1 + 43
        for server in pair:
            assert re.search("NIXL reads memory of this machine by (cma|posix|sysv)/", server.log)


def test_index_keys_and_drafts_move_too(tmp_path: Path) -> None:
    """Send prompts of MiniMax-M3 far above the 16 selected blocks, with EAGLE3 drafts."""
    draft = '--speculative-config={"method":"eagle3","model":"nano-m3-draft"}'
    with serving_pair(tmp_path, draft, "--max-model-len=3072", model="nano-m3") as pair:
        for seed, length in enumerate((600, 2500)):
            body = {
                "prompt": tokens(seed, length),
                "max_tokens": 24,
                "temperature": 0,
                "return_token_ids": True,
                "ignore_eos": True,
            }
            check_same(pair, COMPLETIONS, body)
            form = {"structured_outputs": {"regex": "[a-f]{3}( [0-9]{4}){3}"}, "ignore_eos": False}
            check_same(pair, COMPLETIONS, body | form | {"prompt": tokens(seed + 9, length)})
        accepted = [server.gauge("vllm:spec_decode_num_accepted_tokens_total") for server in pair]
        assert min(accepted) > 0


@pytest.mark.parametrize(
    ("model", "large", "small"), [("nano", 2, 1), ("nano", 4, 2), ("nano-m3", 4, 2)]
)
def test_unequal_tensor_parallel_sizes_in_both_directions(
    model: str, large: int, small: int, tmp_path: Path
) -> None:
    length = 2500 if model == "nano-m3" else 500  # nano-m3 selects 4 blocks of 128
    with serving_pair(
        tmp_path,
        "--dtype=float32",
        "--max-model-len=3072",
        first=(f"--tensor-parallel-size={large}",),
        second=(f"--tensor-parallel-size={small}",),
        roles=("kv_both", "kv_both"),
        model=model,
    ) as pair:
        for source, target in (pair, pair[::-1]):
            body = {"prompt": tokens(3, length), "max_tokens": 8, "temperature": 0}
            body["cache_salt"] = source.url
            apart, alone = (
                run_apart((source, target), COMPLETIONS, body),
                run_alone(target, COMPLETIONS, body),
            )
            assert apart["choices"] == alone["choices"]
            size = 128 if model == "nano-m3" else 16
            assert target.gauge("negamax:pulled_kv_blocks_total") == (length - 1) // size


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_dead_prefilling_engine(policy: str, tmp_path: Path) -> None:
    extra = {"lease_seconds": 5.0, "timeout_seconds": 20.0}
    with serving_pair(
        tmp_path, kv_load_failure_policy=policy, kv_connector_extra_config=extra
    ) as pair:
        body = {"prompt": tokens(5, 300), "max_tokens": 6, "temperature": 0}
        expected = run_alone(pair[0], COMPLETIONS, body)["choices"]
        params = prefill(pair[0], COMPLETIONS, body)
        os.kill(pair[0].engine_pid(), signal.SIGKILL)
        answer = pair[1].send(COMPLETIONS, body, kv_transfer_params=params)
        if policy == "fail":
            assert answer.status_code == 503 and "did not arrive" in answer.text
        else:
            assert answer.json()["choices"] == expected
        assert eventually(lambda: pair[0].gauge("negamax:engine_restarts_total") == 1)
        # Another engine uses the port.
        assert eventually(lambda: pair[0].get("/readyz").status_code == 200)
        answer = pair[1].send(COMPLETIONS, body, kv_transfer_params=params)
        assert (answer.status_code == 503) == (policy == "fail")
        assert "was replaced by another engine" in pair[1].log
        check_same(pair, COMPLETIONS, body | {"prompt": tokens(6, 300)})
        prefill(pair[0], COMPLETIONS, body | {"prompt": tokens(9, 300)})  # No server reads it.
        assert eventually(lambda: pair[0].gauge("negamax:expired_kv_leases_total") == 1, seconds=20)
        assert pair[0].gauge("negamax:kv_leases") == 0


def test_a_prefilling_engine_that_stops_and_a_decoding_engine_that_dies(tmp_path: Path) -> None:
    extra = {"lease_seconds": 5.0}
    with serving_pair(
        tmp_path, kv_load_failure_policy="recompute", kv_connector_extra_config=extra
    ) as pair:
        body = {"prompt": tokens(5, 300), "max_tokens": 6, "temperature": 0}
        expected = run_alone(pair[0], COMPLETIONS, body)["choices"]
        params = prefill(pair[0], COMPLETIONS, body)
        pid = pair[0].engine_pid()
        os.kill(pid, signal.SIGSTOP)  # The connections of the stopped engine stay open.
        try:
            answer = pair[1].post(COMPLETIONS, body, kv_transfer_params=params)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert answer["choices"] == expected and "did not arrive" in pair[1].log
        params = prefill(pair[0], COMPLETIONS, body | {"prompt": tokens(6, 300)})
        with pair[1].http() as http, ThreadPoolExecutor(1) as threads:
            late = {"prompt": tokens(6, 300), "max_tokens": 3000, "kv_transfer_params": params}
            running = threads.submit(http.post, COMPLETIONS, json=late | {"ignore_eos": True})
            assert eventually(lambda: pair[1].gauge("negamax:remote_prefills_total") == 1)
            os.kill(pair[1].engine_pid(), signal.SIGKILL)
            assert running.result().status_code == 503
        assert eventually(lambda: pair[0].gauge("negamax:kv_leases") == 0, seconds=20)
        assert eventually(lambda: pair[1].gauge("negamax:engine_restarts_total") == 1)
        assert eventually(lambda: pair[1].get("/readyz").status_code == 200)
        check_same(pair, COMPLETIONS, body | {"prompt": tokens(7, 300)})


def test_engines_with_other_blocks_refuse_each_other(tmp_path: Path) -> None:
    with serving_pair(tmp_path, second=("--block-size=32",)) as pair:
        body = {"prompt": tokens(5, 300), "max_tokens": 6, "temperature": 0}
        params = prefill(pair[0], COMPLETIONS, body)
        answer = pair[1].send(COMPLETIONS, body, kv_transfer_params=params)
        assert answer.status_code == 503 and "differ in version, model" in answer.text
