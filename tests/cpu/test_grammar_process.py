import os
import resource
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from negamax import LLM, SamplingParams
from negamax.base import supervision
from negamax.config.grammar import Grammar
from negamax.scheduler.step import SequenceUpdate

YES = SamplingParams(grammar=Grammar(kind="choice", text='["yes"]'), max_tokens=20)
LETTERS = SamplingParams(
    grammar=Grammar(kind="regex", text="[a-z ]{200}"), max_tokens=300, temperature=1.0, seed=1
)
SLOW = SamplingParams(
    grammar=Grammar(kind="regex", text="((([a-z ]*)*)*)*z{5000}"),
    max_tokens=300,
    temperature=1.0,
    seed=1,
)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM("nano", num_threads=1, max_model_len=1024) as engine:
        yield engine


def says_yes(llm: LLM) -> bool:
    return llm.generate("Yes or no?", YES)[0].outputs[0].text == "yes"


def drive(llm: LLM, params: Sequence[SamplingParams], *, seconds: float) -> list[SequenceUpdate]:
    tokens = [llm.tokenizer.encode("letters:")] * len(params)
    requests = [group[0][1] for group in llm._sequences(tokens, llm._admit(tokens, list(params)))]
    last: dict[str, Any] = {}
    for request in requests:
        llm._loop.add(request)
    deadline = time.monotonic() + seconds
    while llm._loop.has_work and time.monotonic() < deadline:
        last |= {update.request_id: update for update in llm._loop.step()}
    assert not llm._loop.has_work
    return [last[request.request_id] for request in requests]


def test_a_process_stopped_while_it_opens_a_grammar_is_replaced(llm: LLM) -> None:
    assert says_yes(llm)
    client = llm._loop._grammars._client
    assert client is not None
    os.kill(client._process.pid, signal.SIGSTOP)
    started = time.monotonic()
    (update,) = drive(llm, [LETTERS], seconds=200.0)
    assert update.finish_reason == "stop"
    assert llm._loop._grammars._client is not client and not client.is_alive
    assert time.monotonic() - started < 150.0


def test_a_process_is_given_up_only_after_it_is_stopped_for_some_time(llm: LLM) -> None:
    client = llm._loop._grammars.start()
    since = client._heard = time.monotonic() - 2.0
    os.kill(client._process.pid, signal.SIGSTOP)
    while not client._process.is_stopped:
        time.sleep(0.01)
    started = time.monotonic()
    assert not client.is_silent(since)
    while not client.is_silent(since):
        time.sleep(0.05)
    assert time.monotonic() - started > 1.0


def test_a_process_without_files_fails_its_requests_and_not_the_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn = supervision.spawn

    def without_files(module: str, *args: str, **options: Any) -> Any:
        child = spawn(module, *args, **options)
        resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (3, 3))
        return child

    monkeypatch.setattr(supervision, "spawn", without_files)
    refused, free = drive(llm, [YES, SamplingParams(max_tokens=20, ignore_eos=True)], seconds=200.0)
    assert refused.finish_reason == "error" and "grammar process" in (refused.error or "")
    assert free.finish_reason == "length"
    monkeypatch.undo()
    assert says_yes(llm)


def test_an_engine_without_files_refuses_grammars_alone(llm: LLM) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        refused, free = drive(
            llm, [YES, SamplingParams(max_tokens=20, ignore_eos=True)], seconds=200.0
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert refused.finish_reason == "error" and "cannot be started" in (refused.error or "")
    assert free.finish_reason == "length"
    assert says_yes(llm)


def test_an_output_with_a_slow_mask_ends_and_others_go_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurried = msgspec.structs.replace(llm._loop._grammars._setup, mask_seconds=0.2)
    monkeypatch.setattr(llm._loop._grammars, "_setup", hurried)
    for attempt in range(10):  # on a stalled machine every mask takes too long
        # a new grammar each time: slow ones are not retried
        text = f"[a-z ]{{{200 + attempt}}}"
        simple = msgspec.structs.replace(LETTERS, grammar=Grammar(kind="regex", text=text))
        slow, letters = drive(llm, [SLOW, simple], seconds=200.0)
        assert slow.finish_reason == "error" and "0.2 s for one token" in (slow.error or "")
        if letters.finish_reason == "stop":
            break
    assert letters.finish_reason == "stop"
    client = llm._loop._grammars._client
    assert client is not None and client.is_alive
