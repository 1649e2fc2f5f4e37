import dataclasses
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from grammar_support import PERSON, admitted, drive, outputs, reasoning, run_out, schema, seeded

from negamax import LLM, SamplingParams
from negamax.base.errors import EngineError, InvalidRequestError, ResourceError
from negamax.config.grammar import Grammar
from negamax.engine.grammar import manager as constraints
from negamax.scheduler.step import SequenceUpdate

RUNAWAY = {
    "type": "object",
    "properties": {f"p{i}": {"type": "integer"} for i in range(300)},
    "minProperties": 100,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("nano", num_threads=1, max_model_len=1024) as engine:
        yield engine


def test_invalid_grammars_are_refused_and_others_run(llm: LLM) -> None:
    for grammar in (
        Grammar(kind="regex", text="(?=a)b"),
        Grammar(kind="ebnf", text="root ::= root"),
        schema({"type": "object", "properties": {"a": {"not": {}}}}),
        Grammar(kind="structural_tag", text='{"format": {"type": "no such"}}'),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            llm.generate("x", SamplingParams(grammar=grammar))
        assert caught.value.http_status == 400 and len(str(caught.value)) > 20
    assert (
        outputs(llm, ["Yes or no?"], [seeded(1, grammar=Grammar(kind="choice", text='["yes"]'))])[
            0
        ].text
        == "yes"
    )
    run_out(llm)


def test_a_dead_end_in_a_grammar_ends_its_request_alone(llm: LLM) -> None:
    vocabulary = range(llm._loop._grammars._setup.vocab_size)
    none = {"type": "exclude_token", "exclude_tokens": list(vocabulary)}
    steps = [{"type": "const_string", "value": "ab"}, none]
    text = json.dumps({"format": {"type": "sequence", "elements": steps}})
    find_dead_end = Grammar(kind="structural_tag", text=text)
    requests = admitted(
        llm,
        ["Say", "Once upon a time"],
        [seeded(1, grammar=find_dead_end), seeded(1, max_tokens=20, ignore_eos=True)],
    )
    updates = drive(llm, requests)
    (bad, good) = (updates[request.request_id] for request in requests)
    assert (
        bad[-1].finish_reason == "error"
        and "no further token" in (bad[-1].error or "")
        and bad[-1].is_refusal
    )
    assert good[-1].finish_reason == "length"
    run_out(llm)


def test_a_lost_step_leaves_no_rules_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = admitted(
        llm, ["letters:"] * 2, [seeded(1, grammar=Grammar(kind="regex", text="[a-z]{40}"))] * 2
    )
    for request in requests:
        llm._loop.add(request)
    flight = llm._loop._in_flight
    while not flight or (latest := flight[-1]) is None or len(latest.plans[0].slots) < 2:
        llm._loop.step()
    lost = latest.handle

    def raising() -> Any:
        monkeypatch.undo()
        raise RuntimeError("lost")

    monkeypatch.setattr(lost, "results", raising)
    ended = [update for _ in range(2) for update in llm._loop.step() if update.finish_reason]
    assert [update.finish_reason for update in ended] == ["error", "error"]
    run_out(llm)


def test_aborts_in_every_state_leave_nothing_behind(llm: LLM) -> None:
    prompt = llm.render([{"role": "user", "content": "What is 17 + 25?"}])
    for steps in (0, 1, 3, 12, 30):
        params = [
            seeded(
                1,
                grammar=schema({**PERSON, "title": str(steps)}),
                reasoning=reasoning(llm),
                thinking_token_budget=8,
            )
        ] * 3
        requests = admitted(llm, [prompt] * 3, params)
        for request in requests:
            llm._loop.add(request)
        for _ in range(steps):
            llm._loop.step()
        llm._loop.abort([request.request_id for request in requests])
        run_out(llm)


def test_a_failed_row_is_repeated_alone_with_all_masks_intact(llm: LLM) -> None:
    params = [
        seeded(0, grammar=schema(PERSON), max_tokens=60),
        seeded(1, max_tokens=60, logit_bias={1: 1.0}, ignore_eos=True),
        seeded(2, grammar=Grammar(kind="regex", text="[a-f]{30}")),
    ]
    prompts = ["A person:", "Once", "letters:"]
    expected = [completion.token_ids for completion in outputs(llm, prompts, params)]
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
    assert [
        [token for update in updates[r.request_id] for token in update.token_ids] for r in requests
    ] == expected


def test_a_dead_grammar_process_ends_only_its_requests(llm: LLM) -> None:
    requests = admitted(
        llm,
        ["letters:", "Once upon a time"],
        [
            seeded(1, grammar=Grammar(kind="regex", text="[a-z]{300}")),
            seeded(1, max_tokens=60, ignore_eos=True),
        ],
    )
    for request in requests:
        llm._loop.add(request)
    updates: dict[str, list[SequenceUpdate]] = {request.request_id: [] for request in requests}
    killed = False
    while llm._loop.has_work:
        for update in llm._loop.step():
            updates[update.request_id].append(update)
        if not killed and len(updates[requests[0].request_id]) > 3:
            client = llm._loop._grammars._client
            assert client is not None
            client._process.kill()
            killed = True
    assert updates[requests[0].request_id][-1].finish_reason == "error"
    assert updates[requests[1].request_id][-1].finish_reason == "length"
    assert (
        outputs(llm, ["Yes or no?"], [seeded(1, grammar=Grammar(kind="choice", text='["no"]'))])[
            0
        ].text
        == "no"
    )
    run_out(llm)


def test_a_request_whose_grammar_process_dies_ends_before_its_prompt_is_read(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = llm._loop._scheduler
    few = dataclasses.replace(scheduler.limits, max_num_batched_tokens=16)
    monkeypatch.setattr(scheduler, "limits", few)
    outputs(llm, ["Yes or no?"], [seeded(1, grammar=Grammar(kind="choice", text='["no"]'))])
    (request,) = admitted(
        llm, ["word " * 300], [seeded(1, grammar=Grammar(kind="regex", text="[a-z]{300}"))]
    )
    llm._loop.add(request)
    while not llm.stats().num_running:
        llm._loop.step()
    client = llm._loop._grammars._client
    assert client is not None
    client._process.kill()
    client._process.wait()
    updates = [update for _ in range(2) for update in llm._loop.step()]
    assert [(update.finish_reason, update.is_lost) for update in updates] == [("error", True)]
    run_out(llm)


def test_an_endless_compilation_is_refused_and_delays_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constraints, "COMPILE_SECONDS", 3.0)
    with LLM("nano", num_threads=1, max_model_len=1024) as engine:
        assert (
            outputs(engine, ["?"], [seeded(1, grammar=Grammar(kind="choice", text='["a"]'))])[
                0
            ].text
            == "a"
        )
        first = engine._loop._grammars._client
        requests = admitted(
            engine,
            ["letters:", "x", "Once upon a time"],
            [
                seeded(1, grammar=Grammar(kind="regex", text="[a-z]{60}"), ignore_eos=True),
                seeded(1, grammar=schema(RUNAWAY)),
                seeded(1, max_tokens=400, ignore_eos=True),
            ],
        )
        started = time.monotonic()
        updates = drive(engine, requests)
        followed, runaway, free = (updates[request.request_id] for request in requests)
        assert (
            runaway[-1].is_refusal
            and "3 s" in (runaway[-1].error or "")
            and not runaway[-1].token_ids
        )
        assert followed[-1].finish_reason == "stop" and free[-1].finish_reason == "length"
        with pytest.raises(InvalidRequestError, match="3 s"):
            engine.generate("x", seeded(1, grammar=schema(RUNAWAY)))
        assert first is not None and not first.is_alive  # its compiler would have continued
        assert engine._loop._grammars._client is None  # the slow grammar is remembered
        assert time.monotonic() - started < 100.0
        assert (
            outputs(engine, ["?"], [seeded(1, grammar=Grammar(kind="choice", text='["b"]'))])[
                0
            ].text
            == "b"
        )
        run_out(engine)


def test_engine_errors_are_not_blamed_on_requests(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> Any:
        raise ResourceError("no room")

    monkeypatch.setattr(llm._loop._grammars, "start", start)
    with pytest.raises(EngineError, match="no room"):
        llm.generate("Say", seeded(1, grammar=Grammar(kind="regex", text="a")))
    run_out(llm)
