import itertools
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from negamax.engine.shape import hash_shape
from tests.e2e.api_support import (
    COMPLETIONS,
    GENERATE,
    MESSAGES_DIALECT,
    RESPONSES_DIALECT,
    Dialect,
    error_of,
    post,
    stream,
)
from tests.e2e.conftest import MODEL, STUB, Server, eventually, serving
from tests.tables import read_table

PROMPT = "Tom has 47 apples and buys 38 more. How many apples"
GREEDY = {"temperature": 0, "max_new_tokens": 12}
DEFAULTS: dict[str, Any] = {"text": PROMPT, "sampling_params": GREEDY}


def generated(http: httpx.Client, **fields: Any) -> Any:
    return post(http, GENERATE, **{**DEFAULTS, **fields})


def events_of(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    return stream(http, GENERATE, **{**DEFAULTS, **fields})


def test_text_and_its_token_ids_give_the_same_answer(http: httpx.Client) -> None:
    by_text = generated(http, rid="mine")
    ids = post(http, "/tokenize", prompt=PROMPT)["tokens"]
    by_ids = generated(http, text=None, input_ids=ids)
    assert by_text["text"] == by_ids["text"] and by_text["output_ids"] == by_ids["output_ids"]
    meta = by_text["meta_info"]
    assert meta["id"] == "mine" and meta["finish_reason"] == {"type": "length", "length": 12}
    assert meta["prompt_tokens"] == len(ids)
    assert meta["completion_tokens"] == len(by_text["output_ids"]) == 12
    assert meta["e2e_latency"] > 0 and "output_token_logprobs" not in meta
    completion = post(http, COMPLETIONS, prompt=PROMPT, max_tokens=12, temperature=0)
    assert completion["choices"][0]["text"] == by_text["text"]


def test_stream_is_cumulative_and_ends_with_the_whole_answer(http: httpx.Client) -> None:
    whole = generated(http)
    events = events_of(http)
    texts = [event["text"] for event in events]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == whole["text"] and events[-1]["output_ids"] == whole["output_ids"]
    reasons = [event["meta_info"]["finish_reason"] for event in events]
    assert reasons[-1] == whole["meta_info"]["finish_reason"] and not any(reasons[:-1])
    assert "index" not in events[0]
    seldom = events_of(http, sampling_params={**GREEDY, "stream_interval": 100})
    assert seldom[-1]["text"] == whole["text"] and len(seldom) <= 2


def test_batch_and_choices_give_lists(http: httpx.Client) -> None:
    second = {"temperature": 0, "max_new_tokens": 3, "n": 2}
    body = {"text": [PROMPT, "One two"], "sampling_params": [GREEDY, second]}
    batch = generated(http, **body, rid=["a", "b"])
    assert [answer["meta_info"]["id"] for answer in batch] == ["a", "b", "b"]
    assert [answer["meta_info"]["completion_tokens"] for answer in batch] == [12, 3, 3]
    assert batch[0]["text"] == generated(http)["text"]
    last = {event["index"]: event["text"] for event in events_of(http, **body)}
    assert [last[index] for index in range(3)] == [answer["text"] for answer in batch]


def test_stop_reasons_name_the_match_and_forms_are_followed(http: httpx.Client) -> None:
    text = generated(http)["text"]
    word = text[len(text) // 2 :][:4]
    stopped = generated(http, sampling_params={**GREEDY, "stop": word})
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}
    assert word not in stopped["text"]
    kept = generated(http, sampling_params={**GREEDY, "stop": [word], "no_stop_trim": True})
    assert kept["text"].endswith(word)
    token_id = generated(http)["output_ids"][3]
    by_id = generated(http, sampling_params={**GREEDY, "stop_token_ids": [token_id]})
    assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": token_id}
    only_read = generated(http, sampling_params={"max_new_tokens": 0})
    assert only_read["text"] == "" and only_read["output_ids"] == []
    answer = generated(http, sampling_params={**GREEDY, "regex": "(yes|no)"})
    assert answer["text"] in ("yes", "no")
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"


def test_logprobs_of_prompt_and_answer(http: httpx.Client) -> None:
    options = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    answer = generated(http, **options, logprob_start_len=0)
    meta = answer["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    given, made = meta["input_token_logprobs"], meta["output_token_logprobs"]
    assert len(given) == len(meta["input_top_logprobs"]) == meta["prompt_tokens"]
    assert given[0][0] is None and meta["input_top_logprobs"][0] is None
    assert "".join(entry[2] for entry in given) == PROMPT
    assert all(entry[0] <= 0 for entry in (*given[1:], *made))
    assert [top[0] for top in meta["output_top_logprobs"]] == made
    later = generated(http, **options, logprob_start_len=4)["meta_info"]["input_token_logprobs"]
    assert later == given[4:]
    assert generated(http, return_logprob=True)["meta_info"]["input_token_logprobs"] == []


def test_requests_are_aborted_by_id_or_all(http: httpx.Client, server: Server) -> None:
    endless = {"max_new_tokens": 3900, "ignore_eos": True}
    answers: dict[str, Any] = {}

    def ask(rid: str) -> None:
        with server.http() as other:
            answers[rid] = generated(other, rid=rid, sampling_params=endless)

    threads = [threading.Thread(target=ask, args=(rid,)) for rid in ("one", "two")]
    for thread in threads:
        thread.start()
    assert eventually(lambda: server.gauge("vllm:num_requests_running") == 2)
    # The prefix of an id does not match.
    assert post(http, "/abort_request", rid="on") == {"num_aborted": 0}
    assert post(http, "/abort_request", rid="one") == {"num_aborted": 1}
    threads[0].join(120)
    assert answers["one"]["meta_info"]["finish_reason"]["type"] == "abort" and "two" not in answers
    error_of(http.post("/flush_cache"), 400)  # One request is still running.
    os.kill(server.engine_pid(), signal.SIGSTOP)
    try:
        for count in (1, 0):  # The request is aborted once, however long that takes.
            assert post(http, "/abort_request", abort_all=True) == {"num_aborted": count}
    finally:
        os.kill(server.engine_pid(), signal.SIGCONT)
    threads[1].join(120)
    assert answers["two"]["meta_info"]["finish_reason"]["type"] == "abort"
    error_of(http.post("/abort_request", json={}), 400)


@pytest.mark.parametrize(
    "dialect", [MESSAGES_DIALECT, RESPONSES_DIALECT], ids=["messages", "responses"]
)
def test_aborted_answers_end_in_error(http: httpx.Client, server: Server, dialect: Dialect) -> None:
    """The APIs have no finish reason for an aborted answer."""
    events: list[dict[str, Any]] = []
    body = dialect.body(limit=3900, ignore_eos=True, stream=True)
    with http.stream("POST", dialect.path, json=body) as response, server.http() as other:
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == 4:
                    started = events[0].get("message") or events[0]["response"]
                    assert post(other, "/abort_request", rid=started["id"]) == {"num_aborted": 1}
    assert events[-1]["type"] in ("error", "response.failed")
    assert "aborted" in json.dumps(events[-1])


def test_flushed_cache_holds_no_prefix(http: httpx.Client, server: Server) -> None:
    assert eventually(lambda: server.gauge("vllm:num_requests_running") == 0)
    prompt = "A prompt of its own, long enough to fill a block or two of the cache, to be found."
    again = [generated(http, text=prompt)["meta_info"]["cached_tokens"] for _ in range(2)]
    assert again[1] > 0
    assert eventually(lambda: http.post("/flush_cache").status_code == 200)
    assert generated(http, text=prompt)["meta_info"]["cached_tokens"] == 0


def test_model_and_server_describe_themselves(http: httpx.Client) -> None:
    for prefix in ("", "get_"):
        assert http.get(f"/{prefix}model_info").json()["model_path"] == MODEL
        info = http.get(f"/{prefix}server_info").json()
        assert info["context_length"] == 4096 and info["max_total_num_tokens"] > 0
        assert not any("key" in name for name in info)
        shape = info["serving_shape"]
        assert shape == hash_shape(shape) and len(shape["hash"]) == 12
        assert shape["parsers"] == {"tool_call": "auto", "reasoning": "auto"}
        if "kernels" in shape:  # The shape has kernels only if the engine has a model.
            assert shape["weights"] and "moe.route" in shape["kernels"]


def test_server_info_says_how_the_model_is_split(tmp_path: Path) -> None:
    options = ("--tensor-parallel-size", "4", "--expert-parallel-size", "2")
    with serving(*options, program=STUB, log_file=tmp_path / "log") as server:
        info = httpx.get(f"{server.url}/server_info", timeout=120).json()
    assert (info["tp_size"], info["ep_size"]) == (4, 2)


@pytest.mark.parametrize(
    ("fields", "param"), read_table("api_generate.bad_body_names_its_field"), ids=str
)
def test_bad_body_names_its_field(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    error = error_of(http.post(GENERATE, json=fields), 400)
    assert error["param"].split(".")[0].startswith(param.split(".")[0])
