import os
import resource
import signal
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from grammar_support import choice, kill, regex, says, seeded

from negamax import LLM, SamplingParams
from negamax.base import supervision
from negamax.engine.grammar.client import GrammarClient, GrammarHost
from negamax.scheduler.step import SequenceUpdate
from tests.loop_driver import admitted, drive

YES = SamplingParams(grammar=choice("yes"), max_tokens=20)
FREE = SamplingParams(max_tokens=20, ignore_eos=True)
LETTERS = seeded(1, grammar=regex("[a-z ]{200}"), max_tokens=300)
SLOW = seeded(1, grammar=regex("((([a-z ]*)*)*)*z{5000}"), max_tokens=300)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM("nano", num_threads=1, max_model_len=512) as engine:
        yield engine


def end(llm: LLM, *params: SamplingParams) -> list[SequenceUpdate]:
    updates = drive(llm, admitted(llm, ["letters:"] * len(params), params))
    return [each[-1] for each in updates.values()]


def stop(client: GrammarClient) -> None:
    while client.pid is None:
        time.sleep(0.01)
    kill(client, signal.SIGSTOP)
    while not client.is_stopped:
        time.sleep(0.01)


def test_process_that_stops_while_it_opens_a_grammar_is_replaced(llm: LLM) -> None:
    assert says(llm, "yes")
    client = llm._loop._grammars._client
    assert client is not None
    stop(client)
    (update,) = end(llm, LETTERS)
    assert update.finish_reason == "stop"
    assert llm._loop._grammars._client is not client and not client.is_alive


def test_stopped_process_is_replaced_after_some_time(llm: LLM) -> None:
    client = llm._loop._grammars.start()
    since = client._heard = time.monotonic() - 2.0
    stop(client)
    started = time.monotonic()
    assert not client.is_silent(since)
    while not client.is_silent(since):
        time.sleep(0.05)
    assert time.monotonic() - started > 1.0


def test_process_forked_too_late_ends_silently(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    assert says(llm, "yes")
    first = llm._loop._grammars._client
    assert first is not None
    host = first._host
    os.kill(host.process.pid, signal.SIGSTOP)
    GrammarClient(host).kill()
    os.kill(host.process.pid, signal.SIGCONT)
    after = GrammarClient(host)
    while after.pid is None:  # The new process forks after the late process.
        time.sleep(0.01)
    after.kill()
    assert says(llm, "yes")
    assert "Traceback" not in capfd.readouterr().err


def test_process_without_files_fails_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    spawn = supervision.spawn

    def without_files(module: str, *args: str, **options: Any) -> Any:
        child = spawn(module, *args, **options)
        resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (3, 3))
        return child

    monkeypatch.setattr(supervision, "spawn", without_files)
    refused, free = end(llm, YES, FREE)
    assert refused.finish_reason == "error" and "grammar process" in (refused.error or "")
    assert free.finish_reason == "length"
    monkeypatch.undo()
    monkeypatch.setattr(GrammarHost, "is_alive", True)  # Hide the end of the host from the engine.
    assert says(llm, "yes")


def test_engine_without_files_refuses_grammars_alone(llm: LLM) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        refused, free = end(llm, YES, FREE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert refused.finish_reason == "error" and "cannot be started" in (refused.error or "")
    assert free.finish_reason == "length"
    assert says(llm, "yes")


def test_output_with_a_slow_mask_ends_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    hurried = msgspec.structs.replace(llm._loop._grammars._setup, mask_seconds=0.2)
    monkeypatch.setattr(llm._loop._grammars, "_setup", hurried)
    for attempt in range(10):  # On a stalled machine every mask is late, so try again.
        # Each attempt needs a new grammar, since slow ones are refused.
        simple = msgspec.structs.replace(LETTERS, grammar=regex(f"[a-z ]{{{200 + attempt}}}"))
        slow, letters = end(llm, SLOW, simple)
        assert slow.finish_reason == "error" and "0.2 s for one token" in (slow.error or "")
        if letters.finish_reason == "stop":
            break
    assert letters.finish_reason == "stop"
    client = llm._loop._grammars._client
    assert client is not None and client.is_alive
