import dataclasses
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from grammar_support import PERSON, reasoning, regex, says, schema, seeded

from negamax import LLM, SamplingParams
from negamax.base.errors import EngineError, InvalidRequestError, ResourceError
from negamax.config.grammar import Grammar
from negamax.engine.grammar import manager as constraints
from tests.loop_driver import admitted, drive, free_all, generate_tokens, read_tokens

MANY = {f"p{i}": {"type": "integer"} for i in range(300)}
RUNAWAY = {"type": "object", "properties": MANY, "minProperties": 100}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("nano", num_threads=1, max_model_len=512) as engine:
        yield engine


def test_refuses_invalid_grammars(llm: LLM) -> None:
    for grammar in (
        regex("(?=a)b"),
        Grammar(kind="ebnf", text="root ::= root"),
        schema({"type": "object", "properties": {"a": {"not": {}}}}),
        Grammar(kind="structural_tag", text='{"format": {"type": "no such"}}'),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            llm.generate("x", SamplingParams(grammar=grammar))
        assert caught.value.http_status == 400 and len(str(caught.value)) > 20
    assert says(llm, "yes")
    free_all(llm)


def test_dead_end_of_a_grammar_ends_its_request_alone(llm: LLM) -> None:
    vocabulary = range(llm._loop._grammars._setup.vocab_size)
    none = {"type": "exclude_token", "exclude_tokens": list(vocabulary)}
    steps = [{"type": "const_string", "value": "ab"}, none]
    text = json.dumps({"format": {"type": "sequence", "elements": steps}})
    find_dead_end = Grammar(kind="structural_tag", text=text)
    params = [seeded(1, grammar=find_dead_end), seeded(1, max_tokens=20, ignore_eos=True)]
    requests = admitted(llm, ["Say", "Once upon a time"], params)
    updates = drive(llm, requests)
    (bad, good) = (updates[request.request_id] for request in requests)
    assert bad[-1].finish_reason == "error" and bad[-1].is_refusal
    assert "no further token" in (bad[-1].error or "")
    assert good[-1].finish_reason == "length"
    free_all(llm)


def test_lost_step_leaves_no_grammars(llm: LLM) -> None:
    requests = admitted(llm, ["letters:"] * 2, [seeded(1, grammar=regex("[a-z]{40}"))] * 2)
    for request in requests:
        llm._loop.add(request)
    flight = llm._loop._in_flight
    while not flight or (latest := flight[-1]) is None or len(latest.plans[0].slots) < 2:
        llm._loop.step()

    def raising() -> Any:
        raise RuntimeError("lost")

    flight[-1] = dataclasses.replace(latest, results=raising)
    ended = [update for _ in range(2) for update in llm._loop.step() if update.finish_reason]
    assert [update.finish_reason for update in ended] == ["error", "error"]
    free_all(llm)


def test_aborts_in_every_state_leave_no_grammars(llm: LLM) -> None:
    prompt = llm.render([{"role": "user", "content": "What is 17 + 25?"}])
    for steps in (0, 1, 3, 12, 30):
        rules = {"reasoning": reasoning(), "thinking_token_budget": 8}
        params = seeded(1, grammar=schema({**PERSON, "title": str(steps)}), **rules)
        requests = admitted(llm, [prompt] * 3, [params] * 3)
        drive(llm, requests, num_steps=steps)
        llm._loop.abort([request.request_id for request in requests])
        free_all(llm)


def test_a_failed_row_is_repeated_alone_with_all_masks_intact(llm: LLM) -> None:
    params = [
        seeded(0, grammar=schema(PERSON), max_tokens=60),
        seeded(1, max_tokens=60, logit_bias={1: 1.0}, ignore_eos=True),
        seeded(2, grammar=regex("[a-f]{30}")),
    ]
    prompts = ["A person:", "Once", "letters:"]
    expected = generate_tokens(llm, prompts, params)
    requests = admitted(llm, prompts, params)
    worker = llm._loop.executor._worker  # type: ignore[attr-defined]
    run = worker._steps.run

    def failing(plan: Any, masks: Any) -> Any:
        outcome = run(plan, masks)
        if len(plan.slots) > 1:
            raise RuntimeError("as a batch it fails")
        return outcome

    worker._steps.run = failing
    try:
        updates = drive(llm, requests)
    finally:
        worker._steps.run = run
    assert [read_tokens(updates[request.request_id]) for request in requests] == expected


def test_a_request_whose_grammar_process_dies_ends_before_its_prompt_is_read(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = llm._loop._scheduler
    few = dataclasses.replace(scheduler.limits, max_num_batched_tokens=16)
    monkeypatch.setattr(scheduler, "limits", few)
    assert says(llm, "no")
    (request,) = admitted(llm, ["word " * 300], [seeded(1, grammar=regex("[a-z]{300}"))])
    llm._loop.add(request)
    while not llm.stats().num_running:
        llm._loop.step()
    client = llm._loop._grammars._client
    assert client is not None
    client._process.kill()
    client._process.wait()
    updates = [update for _ in range(2) for update in llm._loop.step()]
    assert [(update.finish_reason, update.is_lost) for update in updates] == [("error", True)]
    free_all(llm)


def test_refuses_an_endless_compilation_without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "COMPILE_SECONDS", 3.0)
    with LLM("nano", num_threads=1, max_model_len=512) as engine:
        assert says(engine, "a")
        first = engine._loop._grammars._client
        params = [
            seeded(1, grammar=regex("[a-z]{60}"), ignore_eos=True),
            seeded(1, grammar=schema(RUNAWAY)),
            seeded(1, max_tokens=400, ignore_eos=True),
        ]
        requests = admitted(engine, ["letters:", "x", "Once upon a time"], params)
        started = time.monotonic()
        updates = drive(engine, requests)
        followed, runaway, free = (updates[request.request_id] for request in requests)
        assert runaway[-1].is_refusal and not runaway[-1].token_ids
        assert "3 s" in (runaway[-1].error or "")
        assert followed[-1].finish_reason == "stop" and free[-1].finish_reason == "length"
        with pytest.raises(InvalidRequestError, match="3 s"):
            engine.generate("x", seeded(1, grammar=schema(RUNAWAY)))
        assert first is not None and not first.is_alive  # its compiler would have continued
        assert engine._loop._grammars._client is None  # the slow grammar is remembered
        assert time.monotonic() - started < 100.0
        assert says(engine, "b")
        free_all(engine)


def test_engine_errors_are_no_refusals(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> Any:
        raise ResourceError("no room")

    monkeypatch.setattr(llm._loop._grammars, "start", start)
    with pytest.raises(EngineError, match="no room"):
        llm.generate("Say", seeded(1, grammar=regex("a")))
    free_all(llm)
