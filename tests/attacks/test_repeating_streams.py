"""Streams of /generate, whose every event repeats the answer so far."""

import json
import time

from negamax.api.dialects.generate.growing_json import BYTES_PER_SECOND
from tests.attacks.concurrent_client import unnoticed
from tests.e2e.conftest import Server

NUM_TOKENS = 600


def test_a_long_stream_with_logprobs_costs_no_more_than_its_time(server: Server) -> None:
    body = {
        "text": "Once",
        "stream": True,
        "return_logprob": True,
        "top_logprobs_num": 20,
        "sampling_params": {"max_new_tokens": NUM_TOKENS, "ignore_eos": True},
    }

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
    # otherwise 300 times the last event
    assert size < BYTES_PER_SECOND * seconds + 2 * len(last), seconds
