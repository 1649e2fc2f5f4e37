"""Helpers for tests of several nodes: an engine, requests, seconds until a fault is noticed."""

import threading
import time
from typing import Any

import pytest

from negamax import LLM, SamplingParams
from negamax.base.errors import EngineDeadError
from tests.dist.machines import Machines, OneMachine

PROMPTS = ["What is 47 + 38?", "Hello!", "Who are you?", "A box holds 24 pencils. How many"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=24, logprobs=2),
    SamplingParams(temperature=0.7, seed=5, max_tokens=24),
]
LONG = SamplingParams(temperature=0.0, max_tokens=3000, ignore_eos=True)
# in bfloat16 the order of sums over ranks would decide near ties
COMMON: dict[str, Any] = {"device": "cpu", "num_threads": 1, "dtype": "float32"}
FLOAT32 = ("--dtype", "float32")
NOTICED_SECONDS = 3.0


def tokens(llm: LLM) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, PARAMS)]


def on_nodes(network: Machines | OneMachine, count: int, **sizes: int) -> LLM:
    return LLM("nano", **COMMON, **meeting_at(network, count), **sizes)


def meeting_at(network: Machines | OneMachine, count: int) -> dict[str, Any]:
    interface = None if isinstance(network, Machines) else "lo"
    options = {"master_addr": network.address(0), "master_port": network.port}
    return {"nnodes": count, "interface": interface, **options}


def seconds_until_noticed(llm: LLM, fault: Any, words: str) -> float:
    """Return the seconds from `fault`, during a request, to the error that ends the request."""
    hit: list[float] = []

    def strike() -> None:
        hit.append(time.monotonic())
        fault()

    timer = threading.Timer(0.3, strike)
    timer.start()
    with pytest.raises(EngineDeadError, match=words):
        llm.generate(PROMPTS[0], LONG)
    timer.join()
    return time.monotonic() - hit[0]
