import dataclasses
import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from grammar_support import PERSON, ebnf, kill, reasoning, regex, says, schema, seeded

from negamax import LLM, SamplingParams
from negamax.base import env
from negamax.base.errors import EngineError, InvalidRequestError, ResourceError, UnavailableError
from negamax.config.grammar import Grammar
from negamax.engine.grammar import manager as constraints
from negamax.scheduler.step import SequenceUpdate
from tests.loop_driver import admitted, drive, free_all, generate_tokens, read_tokens

# The compiler, or each mask, takes minutes for these grammars.
COUNTED = 'root ::= (("a"|"b"|[c-z]*){1,300} "q"){1,300}'
LISTED = "root ::= " + "[a-z]* " * 50_000
CHAINED = "root ::= r0\n" + "\n".join(f'r{n} ::= "a" r{n + 1}' for n in range(20_000))
CHAINED += '\nr20000 ::= "b"'


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("nano", num_threads=1, max_model_len=512) as engine:
        yield engine


def test_invalid_grammars_and_engine_errors(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for grammar in (
        regex("(?=a)b"),
        ebnf("root ::= root"),
        schema({"type": "object", "properties": {"a": {"not": {}}}}),
        Grammar(kind="structural_tag", text='{"format": {"type": "no such"}}'),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            llm.generate("x", SamplingParams(grammar=grammar))
        assert caught.value.http_status == 400 and len(str(caught.value)) > 20
    assert says(llm, "yes")
    free_all(llm)

    def start() -> Any:
        raise ResourceError("no room")

    monkeypatch.setattr(llm._loop._grammars, "start", start)
    with pytest.raises(EngineError, match="no room"):
        llm.generate("Say", seeded(1, grammar=regex("a")))
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
        seeded(0, grammar=schema(PERSON), max_tokens=15),
        seeded(1, max_tokens=15, logit_bias={1: 1.0}, ignore_eos=True),
        seeded(2, grammar=regex("[a-f]{12}")),
    ]
    prompts = ["A person:", "Once", "letters:"]
    expected = generate_tokens(llm, prompts, params)
    requests = admitted(llm, prompts, params)
    worker = llm._loop.executor._worker  # type: ignore[attr-defined]
    run = worker._steps.run

    def failing(plan: Any, masks: Any) -> Any:
        outcome = run(plan, masks)
        if len(plan.slots) > 1:
            raise RuntimeError("the batch fails as a whole")
        return outcome

    worker._steps.run = failing
    try:
        updates = drive(llm, requests)
    finally:
        worker._steps.run = run
    assert [read_tokens(updates[request.request_id]) for request in requests] == expected


def test_a_dead_grammar_process_ends_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
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
    kill(client)
    while client.is_alive:
        time.sleep(0.001)
    updates = [update for _ in range(2) for update in llm._loop.step()]
    assert [(update.finish_reason, update.is_lost) for update in updates] == [("error", True)]
    free_all(llm)


def run_beside(engine: LLM, grammars: list[Grammar]) -> tuple[list[SequenceUpdate], bool]:
    """Run `grammars` beside other requests, whose grammar process must survive.

    Return the last update of each request, and whether the other requests ended first.
    """
    assert says(engine, "a")
    first = engine._loop._grammars._client
    assert first is not None
    others = [seeded(1, grammar=regex("[a-z]{60}"), ignore_eos=True), seeded(1, max_tokens=60)]
    params = [*others, *(seeded(1, grammar=grammar) for grammar in grammars)]
    requests = admitted(engine, ["letters:"] * len(params), params)
    order: list[str] = []
    last: dict[str, SequenceUpdate] = {}
    drive(engine, requests, num_steps=0)
    while engine._loop.has_work:
        for update in engine._loop.step():
            last[update.request_id] = update
            order += [update.request_id] if update.finish_reason else []
    names = [request.request_id for request in requests]
    assert last[names[0]].finish_reason == "stop"
    assert engine._loop._grammars._client is first and first.is_alive
    assert not engine._loop._grammars._workers
    free_all(engine)
    return [last[name] for name in names[2:]], set(order[:2]) == set(names[:2])


def test_slow_grammars_end_alone_and_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "COMPILE_SECONDS", 2.0)
    monkeypatch.setattr(constraints, "MASK_SECONDS", 2.0)
    with LLM("nano", num_threads=1, max_model_len=512) as engine:
        slow = [ebnf(text) for text in (COUNTED, LISTED, CHAINED)]
        for is_known in (False, True):
            updates, ends_later = run_beside(engine, slow * 3)
            assert all(end.is_refusal and "2 s" in (end.error or "") for end in updates)
            assert not (is_known and ends_later)  # Known grammars are refused at once.


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_grammar_that_ends_its_worker_is_not_tried_again(llm: LLM, number: int) -> None:
    grammar = ebnf(COUNTED.replace("300", str(300 + number)))
    (request,) = admitted(llm, ["x"], [seeded(1, grammar=grammar)])
    assert says(llm, "a")
    updates = drive(llm, [request], num_steps=1)[request.request_id]
    manager = llm._loop._grammars
    while not any((used := worker).is_ready for worker in manager._workers):
        llm._loop.step()
    kill(used, number)
    updates += drive(llm, ())[request.request_id]
    assert updates[-1].is_refusal and "ended" in (updates[-1].error or "")
    started = time.monotonic()
    with pytest.raises(InvalidRequestError, match="ended"):
        llm.generate("x", seeded(1, grammar=grammar))
    assert not manager._workers and time.monotonic() - started < 1.0
    free_all(llm)


def test_tenants_take_turns_for_workers(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "usable_cores", lambda: 1)  # two workers
    texts = [*(COUNTED.replace("300", str(number)) for number in (200, 201, 200)), 'root ::= "a"']
    first = admitted(llm, ["x"] * 4, [seeded(1, grammar=ebnf(text)) for text in texts])
    requests = [msgspec.structs.replace(one, tenant="ab"[one is first[3]]) for one in first]
    updates = drive(llm, requests, num_steps=0)
    while not updates[requests[3].request_id]:
        for update in llm._loop.step():
            updates[update.request_id].append(update)
    manager = llm._loop._grammars
    assert [rule.request.request_id for rule in manager._risky] == [requests[1].request_id]
    assert len({rule.client for rule in manager._rules.values()} - {None}) == 2
    llm._loop.abort([request.request_id for request in requests])
    free_all(llm)


def test_grammar_without_worker_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "usable_cores", lambda: 1)
    idle = ebnf("root ::= " + "[a-x]* " * 11)  # The worker of `idle` stays alive.
    llm.generate("x", seeded(1, grammar=idle, max_tokens=2))
    (held,) = admitted(llm, ["x"], [seeded(1, grammar=ebnf("root ::= " + "[a-z]* " * 11))])
    drive(llm, [held], num_steps=0)
    while not llm.stats().num_running:
        llm._loop.step()
    monkeypatch.setattr(constraints, "WAIT_SECONDS", 0.0)
    with pytest.raises(UnavailableError, match="in use for 0 s; retry later") as caught:
        llm.generate("x", seeded(1, grammar=ebnf("root ::= " + "[a-y]* " * 11)))
    assert caught.value.code == "no_grammar_process" and caught.value.retry_after
    assert held.request_id in llm._loop._grammars
    llm._loop.abort([held.request_id])
    assert says(llm, "yes")
    free_all(llm)
