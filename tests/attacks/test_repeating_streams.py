import json
import time

import httpx

from negamax.api.dialects.generate.growing_json import BYTES_PER_SECOND
from tests.attacks.concurrent_client import unnoticed
from tests.e2e.api_support import CHAT, HELLO
from tests.e2e.conftest import Server

LARGEST = {"n": 3, "max_new_tokens": 4, "sampling_seed": 2**63 - 1}
NUM_TOKENS = 600


def test_a_long_stream_with_logprobs_costs_no_more_than_its_time(server: Server) -> None:
    """Stream /generate, where each event repeats the answer so far."""
    sampling = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    body = {"text": "Once", "stream": True, "return_logprob": True, "top_logprobs_num": 20}
    body["sampling_params"] = sampling

    def stream() -> tuple[int, str, float]:
        size, last, started = 0, "", time.monotonic()
        with server.http() as http, http.stream("POST", "/generate", json=body) as answer:
            for line in answer.iter_lines():
                size += len(line)
                last = line if line.startswith("data: {") else last
        return size, last, time.monotonic() - started

    size, last, seconds = unnoticed(server, stream, gap=0.5)
    told = json.loads(last.removeprefix("data: "))
    assert len(told["output_ids"]) == told["meta_info"]["completion_tokens"] == NUM_TOKENS
    assert len(told["meta_info"]["output_token_logprobs"]) == NUM_TOKENS
    assert len(told["meta_info"]["output_top_logprobs"][-1]) == 20
    # Without pacing, the size would be 300 times that of the last event.
    assert size < BYTES_PER_SECOND * seconds + 2 * len(last), seconds


def test_choices_after_the_largest_seed_get_answers(server: Server, http: httpx.Client) -> None:
    engine = server.engine_pid()
    body = {"messages": HELLO, "max_tokens": 4, "seed": 2**63 - 1, "n": 2}

    def ask() -> list[httpx.Response]:
        generate = {"text": "Hello", "sampling_params": LARGEST}
        return [http.post(CHAT, json=body), http.post("/generate", json=generate)]

    assert [answer.status_code for answer in unnoticed(server, ask, gap=1.0)] == [200, 200]
    assert server.engine_pid() == engine
