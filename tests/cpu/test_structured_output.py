"""Structured output through the whole engine, on the embedded model at temperature 1: what is
promised holds whatever the model would have liked to write, and the requests beside it do not
notice."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import negamax
from negamax import LLM, SamplingParams
from negamax.base.errors import EngineError, InvalidRequestError, ResourceError
from negamax.config.grammar import Grammar, Marker, Reasoning
from negamax.engine.grammar import manager as constraints
from negamax.engine.grammar.manager import GrammarManager
from negamax.engine.llm import Completion
from negamax.scheduler.step import SequenceUpdate
from negamax.text.formats.minimax_m2 import MINIMAX_M2, M2Calls
from negamax.text.grammar.tool_calls import tool_grammar
from negamax.text.tokenizer import Tokenizer

SEEDS = range(20)
PERSON = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["good", "bad"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["mood", "age", "name"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "days": {"type": "integer", "maximum": 14, "minimum": 1},
            },
            "required": ["city", "days"],
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}},
}
TOKENIZER = Tokenizer.from_folder(Path(negamax.__file__).parent / "assets" / "nano")
SPACES = {i: -8.0 for i in range(4096) if TOKENIZER.token_text(i).isspace()}
RUNAWAY = {
    "type": "object",
    "properties": {f"p{i}": {"type": "integer"} for i in range(300)},
    "minProperties": 100,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("nano", num_threads=1, max_model_len=1024) as engine:
        yield engine


def schema(value: Any) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(value))


def reasoning(llm: LLM, state: str = "open", *, by_id: bool = True) -> Reasoning:
    closing = (
        "</mm:think>" if not by_id else "</think>" if state == "optional" else "\n</think>\n\n"
    )

    def tag(text: str) -> Marker:
        return Marker(text, llm.tokenizer.token_id(text) if by_id else None)

    return Reasoning(
        state="open" if state == "open" else "optional",
        opener=tag("<think>"),
        closer=tag("</think>" if by_id else "</mm:think>"),
        call_opener=tag("<minimax:tool_call>"),
        closing_ids=tuple(llm.tokenizer.encode(closing)),
        max_newlines=3,
    )


def seeded(seed: int, **fields: Any) -> SamplingParams:
    """At temperature 1, and against the embedded model's habit of filling what it does not know
    with white space.
    """
    return SamplingParams(
        **{"temperature": 1.0, "seed": seed, "max_tokens": 400, "logit_bias": SPACES, **fields}
    )


def outputs(llm: LLM, prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[Completion]:
    return [generation.outputs[0] for generation in llm.generate(list(prompts), list(params))]


def run_out(llm: LLM) -> None:
    """Let everything end, and see that nothing is left of it."""
    while llm._loop.has_work:
        llm._loop.step()
    stats = llm._loop.stats()
    assert (
        stats.num_running == stats.num_waiting == 0
        and stats.num_free_kv_blocks == stats.num_kv_blocks
    )
    assert not llm._loop._grammars._rules and not llm._loop._grammars._by_key


def is_person(text: str) -> bool:
    value = json.loads(text)
    assert list(value)[:3] == ["mood", "age", "name"] and set(value) <= set(PERSON["properties"])  # type: ignore[call-overload]
    assert value["mood"] in ("good", "bad") and 0 <= value["age"] <= 130 and len(value["name"]) <= 8
    return set(value.get("tags", ())) <= {"a", "b"}


TAGGED = {
    "type": "tag",
    "begin": "<p>",
    "content": {"type": "json_schema", "json_schema": PERSON},
    "end": "</p>",
}
KINDS: dict[str, tuple[Grammar, Callable[[str], Any]]] = {
    "json_schema": (schema(PERSON), is_person),
    "regex": (
        Grammar(kind="regex", text=r"[A-Z][a-z]{1,8}, \d{3}"),
        re.compile(r"[A-Z][a-z]{1,8}, \d{3}").fullmatch,
    ),
    "choice": (
        Grammar(kind="choice", text='["red", "green", "blue"]'),
        {"red", "green", "blue"}.__contains__,
    ),
    "ebnf": (
        Grammar(kind="ebnf", text='root ::= sum{1,3}\nsum ::= [0-9] "+" [0-9] ";"'),
        re.compile(r"(\d\+\d;){1,3}").fullmatch,
    ),
    "structural_tag": (
        Grammar(kind="structural_tag", text=json.dumps({"format": TAGGED})),
        lambda text: text.startswith("<p>") and text.endswith("</p>") and is_person(text[3:-4]),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_output_has_its_form_whatever_the_seed(llm: LLM, kind: str) -> None:
    grammar, is_good = KINDS[kind]
    prompts = [f"Say something about number {seed}:" for seed in SEEDS]
    for completion in outputs(llm, prompts, [seeded(seed, grammar=grammar) for seed in SEEDS]):
        assert completion.finish_reason == "stop"
        assert is_good(completion.text), completion.text
    run_out(llm)


def test_an_object_of_any_kind_parses_where_it_ends_and_has_begun_right_where_it_does_not(
    llm: LLM,
) -> None:
    closers = {
        i: 6.0 for i in range(4096) if TOKENIZER.token_text(i).lstrip().startswith(("}", "]", '"'))
    }
    params = [
        seeded(
            seed, grammar=Grammar(kind="json_object"), max_tokens=120, logit_bias=SPACES | closers
        )
        for seed in SEEDS
    ]
    done = outputs(llm, ["An object:"] * 20, params)
    ended = [completion for completion in done if completion.finish_reason == "stop"]
    assert len(ended) >= 5
    assert all(isinstance(json.loads(completion.text), dict) for completion in ended)
    assert all(completion.text.startswith("{") for completion in done)


def test_a_stream_has_the_text_of_the_whole(llm: LLM) -> None:
    params = seeded(3, grammar=schema(PERSON))
    streamed = list(llm.stream("A person:", params))
    assert (
        "".join(output.text for output in streamed) == outputs(llm, ["A person:"], [params])[0].text
    )
    assert is_person("".join(output.text for output in streamed))


@pytest.mark.parametrize("by_id", [True, False])
def test_thinking_comes_first_and_then_the_form(llm: LLM, by_id: bool) -> None:
    """Closed by the model, or by its budget; with `by_id` False the closer is text in any tokens,
    as in M3.
    """
    prompt = llm.render([{"role": "user", "content": "What is 17 + 25? Answer as JSON."}])
    rules = reasoning(llm, by_id=by_id)
    params = [
        seeded(seed, grammar=schema(PERSON), reasoning=rules, thinking_token_budget=40)
        for seed in SEEDS
    ]
    closings = []
    for completion in outputs(llm, [prompt] * 20, params):
        _, closer, content = completion.text.partition(rules.closer.text)
        assert closer and completion.finish_reason == "stop"
        assert is_person(content)
        closings.append(completion.token_ids.index(llm.tokenizer.encode(rules.closer.text)[0]))
    assert max(closings) <= 41
    if by_id:
        assert min(closings) < 40  # some ended by themselves


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_budget_ends_the_reasoning_after_exactly_so_many_tokens(llm: LLM, budget: int) -> None:
    """Without any grammar: the tokens before are those of a run without a budget, the answer goes
    on freely behind.
    """
    prompt = llm.render(
        [{"role": "user", "content": "A box holds 24 pencils. How many pencils are in 13 boxes?"}]
    )
    rules = reasoning(llm)
    free, bound = outputs(
        llm,
        [prompt] * 2,
        [
            SamplingParams(temperature=0.0, max_tokens=60),
            SamplingParams(
                temperature=0.0, max_tokens=60, reasoning=rules, thinking_token_budget=budget
            ),
        ],
    )
    closing = list(rules.closing_ids)
    assert closing[1] not in free.token_ids[:10]  # it would have thought longer
    assert bound.token_ids[: budget + len(closing)] == free.token_ids[:budget] + closing
    assert len(bound.token_ids) > budget + len(closing)
    run_out(llm)


def test_an_optional_reasoning_may_be_left_out_and_is_closed_by_its_budget(llm: LLM) -> None:
    params = [
        seeded(
            seed,
            grammar=schema(PERSON),
            reasoning=reasoning(llm, "optional"),
            thinking_token_budget=seed % 3,
            logit_bias=bias,
        )
        for seed in range(8)
        for bias in ({llm.tokenizer.token_id("<think>") or 0: 100.0 if seed % 2 else -100.0},)
    ]
    texts = [completion.text for completion in outputs(llm, ["A person:"] * 8, params)]
    assert {text.startswith("<think>") for text in texts} == {True, False}
    assert all(is_person(text.rpartition("</think>")[2]) for text in texts)


@pytest.mark.parametrize(
    ("choice", "name"), [("required", None), ("function", "clock"), ("function", "get_weather")]
)
def test_forced_calls_name_declared_tools_with_valid_arguments(
    llm: LLM, choice: str, name: str | None
) -> None:
    tools = [WEATHER, CLOCK]
    grammar = tool_grammar(
        tools, M2Calls(MINIMAX_M2.tag_ids(llm.tokenizer)), choice=choice, name=name
    )
    prompt = llm.render([{"role": "user", "content": "What is the weather in Rome?"}], tools=tools)
    params = [
        seeded(seed, grammar=grammar, reasoning=reasoning(llm), thinking_token_budget=30)
        for seed in SEEDS
    ]
    called = set()
    for completion in outputs(llm, [prompt] * 20, params):
        parsed = llm.parse(prompt, completion, tools=tools)
        assert (
            parsed.tool_calls
            and not parsed.content
            and completion.finish_reason in ("stop", "length")
        )
        for call in parsed.tool_calls if completion.finish_reason == "stop" else ():
            called.add(call.name)
            arguments = json.loads(call.arguments)
            if call.name == "clock":
                assert arguments == {}
            else:
                assert set(arguments) == {"city", "days"}
                assert isinstance(arguments["city"], str) and 1 <= arguments["days"] <= 14
        if name is not None:
            assert [call.name for call in parsed.tool_calls] == [name]
    assert called <= {"get_weather", "clock"} and (name is None or called == {name})


def test_greedy_texts_beside_constrained_ones_change_by_no_bit(llm: LLM) -> None:
    questions = [
        llm.render([{"role": "user", "content": f"What is {n} + {n + 9}?"}]) for n in range(12, 18)
    ]
    free = [SamplingParams(temperature=0.0, max_tokens=80, logprobs=1) for _ in questions]
    alone = outputs(llm, questions, free)
    held = [seeded(seed, grammar=schema(PERSON)) for seed in range(6)]
    mixed = outputs(llm, [*questions, *["A person:"] * 6], [*free, *held])
    assert [completion.token_ids for completion in mixed[:6]] == [
        completion.token_ids for completion in alone
    ]
    assert [completion.logprobs for completion in mixed[:6]] == [
        completion.logprobs for completion in alone
    ]
    assert all(is_person(completion.text) for completion in mixed[6:])


def test_masks_that_come_too_late_cost_the_constrained_requests_steps_and_nobody_a_token(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ["A person:"] * 3 + ["Once upon a time"] * 2
    params = [seeded(seed, grammar=schema(PERSON)) for seed in range(3)]
    params += [SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)] * 2
    expected = [completion.token_ids for completion in outputs(llm, prompts, params)]
    monkeypatch.setattr(constraints, "GRACE_SECONDS", -1.0)
    late = []
    bitmask_of = GrammarManager.bitmask

    def counted(self: GrammarManager, *args: Any, **options: Any) -> Any:
        bitmask, ended = bitmask_of(self, *args, **options)
        late.extend(bitmask.postponed)
        return bitmask, ended

    monkeypatch.setattr(GrammarManager, "bitmask", counted)
    assert [completion.token_ids for completion in outputs(llm, prompts, params)] == expected
    assert len(late) > 20
    run_out(llm)


def test_choices_of_one_prompt_follow_the_grammar_each_for_itself(llm: LLM) -> None:
    (generation,) = llm.generate("A person:", seeded(1, grammar=schema(PERSON), n=4, logprobs=2))
    texts = [completion.text for completion in generation.outputs]
    assert len(set(texts)) > 1 and all(is_person(text) for text in texts)
    for completion in generation.outputs:
        assert [entry.token_id for entry in completion.logprobs or []] == completion.token_ids


def test_the_grammar_outranks_what_would_break_the_form(llm: LLM) -> None:
    """Bias, penalties, an end that is ignored, more tokens than the form has: none of them spoils
    it, and it still ends.
    """
    eos = llm.tokenizer.eos_token_id or 0
    grammar = Grammar(kind="choice", text='["yes", "no"]')
    fields: list[dict[str, Any]] = [
        {"logit_bias": {eos: -100.0}},
        {"logit_bias": {llm.tokenizer.encode("maybe")[0]: 100.0}},
        {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 2.0},
        {"ignore_eos": True},
        {"min_tokens": 50},
        {"min_p": 0.9, "top_k": 1},
        {"temperature": 0.0},
        {"stop_token_ids": (llm.tokenizer.encode("zebra")[0],), "min_tokens": 3},
    ]
    for completion in outputs(
        llm, ["Yes or no?"] * len(fields), [seeded(1, grammar=grammar, **field) for field in fields]
    ):
        assert (completion.text, completion.finish_reason) in (("yes", "stop"), ("no", "stop"))
    run_out(llm)


def test_an_end_is_held_back_until_min_tokens_where_the_form_can_go_on(llm: LLM) -> None:
    grammar = Grammar(kind="regex", text="[a-z]{1,100}")
    eager = {TOKENIZER.eos_token_id or 0: 100.0}
    (completion,) = outputs(
        llm, ["letters:"], [seeded(2, grammar=grammar, min_tokens=15, logit_bias=eager)]
    )
    # the end itself is the last
    assert len(completion.token_ids) == 16 and completion.finish_reason == "stop"
    assert re.fullmatch("[a-z]{1,100}", completion.text)


def test_a_form_cut_by_max_tokens_ends_with_length(llm: LLM) -> None:
    (completion,) = outputs(llm, ["A person:"], [seeded(1, grammar=schema(PERSON), max_tokens=4)])
    assert completion.finish_reason == "length" and completion.text.startswith("{")


def test_bad_grammars_are_refused_as_the_requests_own_error_and_the_others_run(llm: LLM) -> None:
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


def test_a_form_that_leads_nowhere_ends_its_request_alone(llm: LLM) -> None:
    """The grammar begins well and then allows no token at all, which only the vocabulary shows."""
    vocabulary = range(llm._loop._grammars._setup.vocab_size)
    none = {"type": "exclude_token", "exclude_tokens": list(vocabulary)}
    steps = [{"type": "const_string", "value": "ab"}, none]
    text = json.dumps({"format": {"type": "sequence", "elements": steps}})
    dead_end = Grammar(kind="structural_tag", text=text)
    requests = admitted(
        llm,
        ["Say", "Once upon a time"],
        [seeded(1, grammar=dead_end), seeded(1, max_tokens=20, ignore_eos=True)],
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
    """While it compiles, while it thinks, while the form is written."""
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


def test_preempted_outputs_go_on_where_they_were(llm: LLM) -> None:
    prompts = [f"Person number {n}:" for n in range(10)]
    params = [seeded(seed, grammar=schema(PERSON)) for seed in range(10)]
    expected = [completion.token_ids for completion in outputs(llm, prompts, params)]
    with LLM("nano", num_threads=1, max_model_len=256, num_kv_blocks=17, block_size=16) as small:
        assert [completion.token_ids for completion in outputs(small, prompts, params)] == expected
        assert small._loop.stats().preemption_count > 0
        run_out(small)


def test_steps_without_overlap_give_the_same_texts(llm: LLM) -> None:
    params = [seeded(seed, grammar=schema(PERSON), max_tokens=60) for seed in range(4)]
    expected = [completion.token_ids for completion in outputs(llm, ["A person:"] * 4, params)]
    with LLM("nano", num_threads=1, max_model_len=256, enable_overlap=False) as plain:
        assert [
            completion.token_ids for completion in outputs(plain, ["A person:"] * 4, params)
        ] == expected


def test_a_row_that_fails_is_run_apart_with_the_masks_of_the_others_intact(llm: LLM) -> None:
    """The step is repeated row by row; each row gets its own mask again."""
    params = [
        seeded(0, grammar=schema(PERSON), max_tokens=60),
        seeded(1, max_tokens=60, logit_bias={1: 1.0}, ignore_eos=True),
        seeded(2, grammar=Grammar(kind="regex", text="[a-f]{30}")),
    ]
    prompts = ["A person:", "Once", "letters:"]
    expected = [completion.token_ids for completion in outputs(llm, prompts, params)]
    requests = admitted(llm, prompts, params)
    worker = llm._loop._executor._worker  # type: ignore[attr-defined]
    run = worker._run

    def failing(plan: Any, masks: Any) -> Any:
        outcome = run(plan, masks)
        if len(plan.slots) > 1:
            raise RuntimeError("as a batch it fails")
        return outcome

    worker._run = failing
    try:
        updates = drive(llm, requests)
    finally:
        worker._run = run
    assert [
        [token for update in updates[r.request_id] for token in update.token_ids] for r in requests
    ] == expected


def test_a_grammar_process_that_dies_takes_only_its_own_requests_along(llm: LLM) -> None:
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
    while not llm._loop.stats().num_running:
        llm._loop.step()
    client = llm._loop._grammars._client
    assert client is not None
    client._process.kill()
    client._process.wait()
    updates = [update for _ in range(2) for update in llm._loop.step()]
    assert [(update.finish_reason, update.is_lost) for update in updates] == [("error", True)]
    run_out(llm)


def test_a_grammar_that_compiles_for_ever_is_refused_in_time_and_stalls_nobody(
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
        assert first is not None and not first.is_alive  # its compiler would have gone on
        assert engine._loop._grammars._client is None  # what was too slow is known
        assert time.monotonic() - started < 100.0
        assert (
            outputs(engine, ["?"], [seeded(1, grammar=Grammar(kind="choice", text='["b"]'))])[
                0
            ].text
            == "b"
        )
        run_out(engine)


def test_servers_that_never_see_a_grammar_start_no_process(llm: LLM) -> None:
    with LLM("nano", num_threads=1, max_model_len=256) as engine:
        rules = reasoning(engine)
        outputs(
            engine,
            ["Hello"] * 2,
            [
                seeded(1, max_tokens=5),
                seeded(2, max_tokens=5, reasoning=rules, thinking_token_budget=2),
            ],
        )
        assert engine._loop._grammars._client is None


def admitted(llm: LLM, prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[Any]:
    tokens = [llm.tokenizer.encode(prompt) for prompt in prompts]
    return [group[0][1] for group in llm._sequences(tokens, llm._admit(tokens, list(params)))]


def drive(llm: LLM, requests: Sequence[Any]) -> dict[str, list[SequenceUpdate]]:
    """Run the requests to their ends; what each of them got."""
    updates: dict[str, list[SequenceUpdate]] = {request.request_id: [] for request in requests}
    for request in requests:
        llm._loop.add(request)
    while llm._loop.has_work:
        for update in llm._loop.step():
            updates[update.request_id].append(update)
    return updates


def test_errors_of_the_engine_are_not_the_requests(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> Any:
        raise ResourceError("no room")

    monkeypatch.setattr(llm._loop._grammars, "start", start)
    with pytest.raises(EngineError, match="no room"):
        llm.generate("Say", seeded(1, grammar=Grammar(kind="regex", text="a")))
    run_out(llm)
