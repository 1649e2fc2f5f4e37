import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from grammar_support import (
    PERSON,
    SPACES,
    TAGGED,
    TOKENIZER,
    choice,
    is_person,
    outputs,
    reasoning,
    regex,
    require_call,
    schema,
    seeded,
    tool,
)

from negamax import LLM, SamplingParams
from negamax.config.grammar import Grammar
from negamax.engine.grammar import manager
from negamax.engine.grammar.manager import GrammarManager, RequestGrammar
from tests.loop_driver import free_all, generate_tokens

SEEDS = range(6)
SIZES: dict[str, Any] = {"num_threads": 1, "max_model_len": 512}
DAYS = {"type": "integer", "maximum": 14, "minimum": 1}
WEATHER = tool("get_weather", city={"type": "string", "maxLength": 20}, days=DAYS)
CLOCK = tool("clock")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("nano", **SIZES) as engine:
        yield engine


KINDS: dict[str, tuple[Grammar, Callable[[str], Any]]] = {
    "json_schema": (schema(PERSON), is_person),
    "regex": (regex(r"[A-Z][a-z]{1,8}, \d{3}"), re.compile(r"[A-Z][a-z]{1,8}, \d{3}").fullmatch),
    "choice": (choice("red", "green", "blue"), {"red", "green", "blue"}.__contains__),
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
def test_every_output_follows_its_grammar(llm: LLM, kind: str) -> None:
    grammar, is_good = KINDS[kind]
    prompts = [f"Say something about number {seed}:" for seed in SEEDS]
    for completion in outputs(llm, prompts, [seeded(seed, grammar=grammar) for seed in SEEDS]):
        assert completion.finish_reason == "stop"
        assert is_good(completion.text), completion.text
    free_all(llm)


def test_finished_json_objects_parse(llm: LLM) -> None:
    ends = ("}", "]", '"')
    bias = {i: 6.0 for i in range(4096) if TOKENIZER.token_text(i).lstrip().startswith(ends)}
    fields = {"max_tokens": 120, "logit_bias": SPACES | bias}
    params = [seeded(seed, grammar=Grammar(kind="json_object"), **fields) for seed in SEEDS]
    done = outputs(llm, ["An object:"] * len(SEEDS), params)
    ended = [completion for completion in done if completion.finish_reason == "stop"]
    assert len(ended) >= 2
    assert all(isinstance(json.loads(completion.text), dict) for completion in ended)
    assert all(completion.text.startswith("{") for completion in done)


def test_streams_and_each_choice_follow_the_grammar(llm: LLM) -> None:
    params = seeded(3, grammar=schema(PERSON))
    text = "".join(output.text for output in llm.stream("A person:", params))
    assert text == outputs(llm, ["A person:"], [params])[0].text and is_person(text)
    (generation,) = llm.generate("A person:", seeded(1, grammar=schema(PERSON), n=4, logprobs=2))
    texts = [completion.text for completion in generation.outputs]
    assert len(set(texts)) > 1 and all(is_person(text) for text in texts)
    for completion in generation.outputs:
        assert [entry.token_id for entry in completion.logprobs or []] == completion.token_ids


@pytest.mark.parametrize("by_id", [True, False])
def test_reasoning_comes_before_the_grammar(llm: LLM, by_id: bool) -> None:
    """The model or its budget ends the reasoning. Without `by_id` the closer has several tokens."""
    prompt = llm.render([{"role": "user", "content": "What is 17 + 25? Answer as JSON."}])
    rules = reasoning(by_id=by_id)
    fields = {"grammar": schema(PERSON), "reasoning": rules, "thinking_token_budget": 40}
    params = [seeded(seed, **fields) for seed in SEEDS]
    closings = []
    for completion in outputs(llm, [prompt] * len(SEEDS), params):
        _, closer, content = completion.text.partition(rules.closer.text)
        assert closer and completion.finish_reason == "stop"
        assert is_person(content)
        closings.append(completion.token_ids.index(llm.tokenizer.encode(rules.closer.text)[0]))
    assert max(closings) <= 41
    if by_id:
        assert min(closings) < 40  # Some answers closed their reasoning before the budget ended.


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_budget_ends_the_reasoning_after_its_number_of_tokens(llm: LLM, budget: int) -> None:
    """Check that tokens within the budget equal those of an unlimited run without a grammar."""
    text = "A box holds 24 pencils. How many pencils are in 13 boxes?"
    prompt, rules = llm.render([{"role": "user", "content": text}]), reasoning()
    limited = {"reasoning": rules, "thinking_token_budget": budget}
    params = [SamplingParams(temperature=0.0, max_tokens=60, **more) for more in ({}, limited)]
    free, bound = outputs(llm, [prompt] * 2, params)
    closing = list(rules.closing_ids)
    assert closing[1] not in free.token_ids[:10]  # The model would have reasoned longer.
    assert bound.token_ids[: budget + len(closing)] == free.token_ids[:budget] + closing
    assert len(bound.token_ids) > budget + len(closing)
    free_all(llm)


def test_optional_reasoning_may_be_left_out_and_is_closed_by_its_budget(llm: LLM) -> None:
    fields, opener = {"grammar": schema(PERSON), "reasoning": reasoning("optional")}, "<think>"
    biases = [{llm.tokenizer.token_id(opener) or 0: bias} for bias in (-100.0, 100.0)]
    params = [
        seeded(seed, **fields, thinking_token_budget=seed % 3, logit_bias=biases[seed % 2])
        for seed in range(8)
    ]
    texts = [completion.text for completion in outputs(llm, ["A person:"] * 8, params)]
    assert {text.startswith("<think>") for text in texts} == {True, False}
    assert all(is_person(text.rpartition("</think>")[2]) for text in texts)


@pytest.mark.parametrize("name", [None, "clock", "get_weather"])
def test_forced_calls_name_declared_tools_with_valid_arguments(llm: LLM, name: str | None) -> None:
    tools = [WEATHER, CLOCK]
    grammar = require_call(tools, name)
    prompt = llm.render([{"role": "user", "content": "What is the weather in Rome?"}], tools=tools)
    fields = {"grammar": grammar, "reasoning": reasoning(), "thinking_token_budget": 30}
    params = [seeded(seed, **fields) for seed in SEEDS]
    called = set()
    for completion in outputs(llm, [prompt] * len(SEEDS), params):
        parsed = llm.parse(prompt, completion, tools=tools)
        assert parsed.tool_calls and not parsed.content
        assert completion.finish_reason in ("stop", "length")
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


def test_grammar_outranks_other_parameters(llm: LLM) -> None:
    """Check that bias, penalties, ignored ends and spare tokens do not break the format."""
    eos = llm.tokenizer.eos_token_id or 0
    grammar = choice("yes", "no")
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
    params = [seeded(1, grammar=grammar, **field) for field in fields]
    for completion in outputs(llm, ["Yes or no?"] * len(fields), params):
        assert (completion.text, completion.finish_reason) in (("yes", "stop"), ("no", "stop"))
    free_all(llm)


def test_end_waits_for_min_tokens_and_truncated_output_ends_with_length(llm: LLM) -> None:
    grammar = regex("[a-z]{1,100}")
    eager = {TOKENIZER.eos_token_id or 0: 100.0}
    params = seeded(2, grammar=grammar, min_tokens=15, logit_bias=eager)
    (completion,) = outputs(llm, ["letters:"], [params])
    # The last token is the end token.
    assert len(completion.token_ids) == 16 and completion.finish_reason == "stop"
    assert re.fullmatch("[a-z]{1,100}", completion.text)
    (completion,) = outputs(llm, ["A person:"], [seeded(1, grammar=schema(PERSON), max_tokens=4)])
    assert completion.finish_reason == "length" and completion.text.startswith("{")


def test_constrained_requests_leave_the_text_of_concurrent_ones(llm: LLM) -> None:
    chats = [[{"role": "user", "content": f"What is {n} + {n + 9}?"}] for n in range(12, 15)]
    questions = [llm.render(chat) for chat in chats]
    free = [SamplingParams(temperature=0.0, max_tokens=40, logprobs=1)] * 3
    alone = outputs(llm, questions, free)
    held = [seeded(seed, grammar=schema(PERSON)) for seed in range(4)]
    mixed = outputs(llm, [*questions, *["A person:"] * 4], [*free, *held])
    together, apart = ([(m.token_ids, m.logprobs) for m in made] for made in (mixed[:3], alone))
    assert together == apart
    assert all(is_person(completion.text) for completion in mixed[3:])


def test_late_masks_cost_steps_but_no_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ["A person:"] * 2 + ["Once upon a time"] * 2
    params = [seeded(seed, grammar=schema(PERSON)) for seed in range(2)]
    params += [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)] * 2
    expected = generate_tokens(llm, prompts, params)
    monkeypatch.setattr(manager, "GRACE_SECONDS", -1.0)
    late, rng, is_awaited = [], random.Random(0), RequestGrammar.is_awaited.fget
    assert is_awaited is not None
    slower = property(lambda rule: is_awaited(rule) or rng.random() < 0.5)
    monkeypatch.setattr(RequestGrammar, "is_awaited", slower)
    bitmask_of = GrammarManager.bitmask

    def counted(self: GrammarManager, *args: Any, **options: Any) -> Any:
        bitmask, ended = bitmask_of(self, *args, **options)
        late.extend(bitmask.postponed)
        return bitmask, ended

    monkeypatch.setattr(GrammarManager, "bitmask", counted)
    assert generate_tokens(llm, prompts, params) == expected
    assert len(late) > 20
    free_all(llm)


SMALL = {"num_kv_blocks": 10, "block_size": 16}  # few blocks, so that requests are preempted


@pytest.mark.parametrize(
    "options", [SMALL, pytest.param({"enable_overlap": False}, marks=pytest.mark.full)], ids=str
)
def test_constrained_texts_do_not_depend_on_steps(llm: LLM, options: dict[str, Any]) -> None:
    prompts = [f"Person number {n}:" for n in range(6)]
    params = [seeded(seed, grammar=schema(PERSON), max_tokens=60) for seed in range(6)]
    expected = generate_tokens(llm, prompts, params)
    with LLM("nano", **SIZES | {"max_model_len": 256}, **options) as other:
        assert generate_tokens(other, prompts, params) == expected
        assert bool(other.stats().preemption_count) == ("num_kv_blocks" in options)
        free_all(other)


def test_no_process_starts_without_grammars() -> None:
    with LLM("nano", **SIZES) as engine:
        limited = {"reasoning": reasoning(), "thinking_token_budget": 2}
        params = [seeded(1, max_tokens=5), seeded(2, max_tokens=5, **limited)]
        outputs(engine, ["Hello"] * 2, params)
        assert engine._loop._grammars._client is None
