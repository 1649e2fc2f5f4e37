"""Help tests of several nodes: run engines and requests, and time how fast a fault is noticed."""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from negamax import LLM, SamplingParams
from negamax.base.errors import EngineDeadError
from negamax.options.nodes import KEY_VARIABLE
from tests.dist.engines import COMMON
from tests.dist.machines import Machines, OneMachine

PROMPTS = ["What is 47 + 38?", "Hello!", "A box holds 24 pencils. How many"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=5, max_tokens=12, logprobs=2),
]
LONG = SamplingParams(temperature=0.0, max_tokens=3000, ignore_eos=True)
FLOAT32 = ("--dtype", "float32")
NOTICED_SECONDS = 3.0


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM("nano", **COMMON) as one:
        return tokens(one)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "of the tests")


def tokens(llm: LLM) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, PARAMS)]


def on_nodes(network: Machines | OneMachine, count: int, **sizes: int) -> LLM:
    return LLM("nano", **COMMON, **meeting_at(network, count), **sizes)


def meeting_at(network: Machines | OneMachine, count: int) -> dict[str, Any]:
    interface = None if isinstance(network, Machines) else "lo"
    options = {"master_addr": network.address(0), "master_port": network.port}
    return {"nnodes": count, "interface": interface, **options}


def wait_until(holds: Callable[[], object], *, seconds: float = 20.0) -> float:
    began = time.monotonic()
    while not holds():
        if time.monotonic() > began + seconds:
            raise TimeoutError
        time.sleep(0.02)
    return time.monotonic() - began


def seconds_until_noticed(llm: LLM, fault: Any, words: str) -> float:
    request = partial(llm.generate, PROMPTS[0], LONG)
    return seconds_until_error(request, fault, EngineDeadError, words)


def seconds_until_error(
    request: Callable[[], object], fault: Any, error: type[Exception], words: str | None = None
) -> float:
    """Return the seconds from `fault`, during `request`, until `error` ends the request."""
    hit: list[float] = []

    def strike() -> None:
        hit.append(time.monotonic())
        fault()

    timer = threading.Timer(0.3, strike)
    timer.start()
    with pytest.raises(error, match=words):
        request()
    timer.join()
    return time.monotonic() - hit[0]
