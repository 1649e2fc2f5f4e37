import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import graph_support
import numpy as np
import pytest
import zmq
from grammar_support import (
    PERSON,
    SPACES,
    TAGGED,
    TOKENIZER,
    choice,
    ebnf,
    is_person,
    kill,
    outputs,
    reasoning,
    regex,
    require_call,
    schema,
    seeded,
    tool,
)
from msgspec.structs import replace

from negamax import LLM, SamplingParams
from negamax.config.grammar import Grammar
from negamax.engine.grammar import manager, process, wire
from negamax.engine.grammar.manager import GrammarManager, RequestGrammar
from negamax.models.registry import CALL_STYLES
from negamax.scheduler.group import GroupScheduler
from negamax.scheduler.request import GenerateRequest
from negamax.scheduler.step import GrammarRow
from negamax.text.grammar.reasoning_gate import ReasoningGate
from negamax.text.grammar.structural_tag import structural_tag
from tests import drafts, tiny
from tests.dist.engines import save_m2
from tests.drafts import ACCEPTED, KINDS, RANDOM, REJECTED, Key
from tests.loop_driver import admitted, drive, free_all, generate_tokens, read_tokens

SEEDS = range(6)
SIZES: dict[str, Any] = {"num_threads": 1, "max_model_len": 512}
DAYS = {"type": "integer", "maximum": 14, "minimum": 1}
WEATHER = tool("get_weather", city={"type": "string", "maxLength": 20}, days=DAYS)
CLOCK = tool("clock")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("nano", **SIZES) as engine:
        yield engine


GRAMMARS: dict[str, tuple[Grammar, Callable[[str], Any]]] = {
    "json_schema": (schema(PERSON), is_person),
    "regex": (regex(r"[A-Z][a-z]{1,8}, \d{3}"), re.compile(r"[A-Z][a-z]{1,8}, \d{3}").fullmatch),
    "choice": (choice("red", "green", "blue"), {"red", "green", "blue"}.__contains__),
    "ebnf": (
        ebnf('root ::= sum{1,3}\nsum ::= [0-9] "+" [0-9] ";"'),
        re.compile(r"(\d\+\d;){1,3}").fullmatch,
    ),
    "structural_tag": (
        Grammar(kind="structural_tag", text=json.dumps({"format": TAGGED})),
        lambda text: text.startswith("<p>") and text.endswith("</p>") and is_person(text[3:-4]),
    ),
}


@pytest.mark.parametrize("kind", GRAMMARS)
def test_every_output_follows_its_grammar(llm: LLM, kind: str) -> None:
    grammar, is_good = GRAMMARS[kind]
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


SCHEMA = schema({**PERSON, "properties": dict(list(PERSON["properties"].items())[:3])})
TOOL = tool("get_weather", city={"type": "string", "maxLength": 12})
LETTERS = regex("[a-z ]{30,60}")
OPEN, SPELLED = reasoning(), reasoning(by_id=False)
OPTIONAL = replace(reasoning("optional"), closing_ids=OPEN.closing_ids)
FIELDS: list[dict[str, Any]] = [
    {"grammar": SCHEMA},
    {"grammar": SCHEMA, "temperature": 0.0, "logprobs": 2},
    {"grammar": LETTERS, "logit_bias": {}, "frequency_penalty": 0.4},
    {"grammar": regex(r"[A-Z][a-z]{1,8}, exactly so and no other, \d{3}")},
    {"grammar": Grammar(kind="structural_tag", text=json.dumps({"format": TAGGED}))},
    {"grammar": require_call([TOOL]), "reasoning": OPEN, "thinking_token_budget": 9},
    {"grammar": SCHEMA, "reasoning": OPEN, "thinking_token_budget": 14, "temperature": 0.0},
    {"grammar": SCHEMA, "reasoning": SPELLED, "thinking_token_budget": 5},
    {"grammar": regex("(no ){9}"), "reasoning": OPTIONAL, "thinking_token_budget": 4,
     "logit_bias": SPACES | {TOKENIZER.token_id("<think>") or 0: 100.0}},
    {"reasoning": OPEN, "thinking_token_budget": 7, "ignore_eos": True},
    {"grammar": LETTERS, "min_tokens": 12, "logit_bias": {TOKENIZER.eos_token_id or 0: 100.0}},
    {"grammar": choice("yes, it is so", "no"), "ignore_eos": True},
    {"grammar": LETTERS, "stop_token_ids": tuple(range(300, 550)), "min_tokens": 3},
    {"grammar": SCHEMA, "max_tokens": 7},
    {"temperature": 0.0, "ignore_eos": True, "logit_bias": {}},  # This request has no grammar.
    # The first grammar allows the text that the model prefers; the others do not.
    {"grammar": regex(r"(.|\n){1,90}"), "temperature": 0.0, "logit_bias": {}},
    {"grammar": regex("(no ){25}"), "temperature": 0.0},
]  # fmt: skip
PARAMS = [seeded(seed, **{"max_tokens": 60} | fields) for seed, fields in enumerate(FIELDS)]
PROMPTS = [[5, 6, 7 + seed % 3] * 3 + [20 + seed] for seed in range(len(PARAMS))]
DRAFT_SIZES: dict[str, Any] = {"device": "cpu", **SIZES, "max_model_len": 128, "block_size": 8}
# Prompts are chunked at these sizes, and some sequences preempt other sequences.
CROWDED = {"max_num_batched_tokens": 41, "max_num_seqs": 9, "num_kv_blocks": 24}


def answers(drafting_llm: LLM, chosen: slice = slice(None)) -> list[Any]:
    return [
        (one.token_ids, one.finish_reason, one.stop_reason, one.logprobs)
        for generation in drafting_llm.generate(PROMPTS[chosen], PARAMS[chosen])
        for one in generation.outputs
    ]


class Changing(drafts.ScriptedProposer):
    """Propose by the current kind, even after tokens that were sampled without a mask."""

    is_checked = False

    def __init__(self, known: dict[Key, list[int]]) -> None:
        super().__init__(RANDOM, known)
        self._known = known

    def be(self, kind: str, outputs: dict[Key, list[int]] | None = None) -> None:
        self._kind, self._outputs = kind, outputs or self._known


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_m2(tmp_path_factory.mktemp("m2"))


@pytest.fixture(scope="module")
def expected(model: str) -> list[Any]:
    with LLM(model, **DRAFT_SIZES) as drafting_llm:
        return answers(drafting_llm)


def map_outputs(chosen: slice, outputs: list[list[int]]) -> dict[Key, list[int]]:
    columns = zip(PARAMS[chosen], PROMPTS[chosen], outputs, strict=True)
    return {(params.seed or 0, tuple(tokens)): output for params, tokens, output in columns}


@pytest.fixture(scope="module")
def proposer(expected: list[Any]) -> Changing:
    return Changing(map_outputs(slice(None), [one[0] for one in expected]))


@pytest.fixture(scope="module")
def drafting_llm(model: str, proposer: Changing) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        drafts.install(patch.setattr, proposer)
        # With this limit every draft token has its mask, even on a busy machine.
        patch.setattr(manager, "DRAFT_SECONDS", 60.0)
        engine = LLM(model, **DRAFT_SIZES, **CROWDED)
    with engine:
        yield engine


def verified(drafting_llm: LLM) -> tuple[int, int]:
    stats = drafting_llm.stats()
    return stats.num_draft_tokens, stats.num_accepted_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_keep_constrained_texts(
    drafting_llm: LLM,
    proposer: Changing,
    expected: list[Any],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("GRACE_SECONDS", "ALONE_SECONDS"):  # A late mask would void accepted draft tokens.
        monkeypatch.setattr(manager, name, 9.0)
    proposer.be(kind)
    before = verified(drafting_llm)
    assert answers(drafting_llm) == expected
    free_all(drafting_llm)
    assert drafting_llm.stats().preemption_count > 0
    after = verified(drafting_llm)
    tokens, accepted = after[0] - before[0], after[1] - before[1]
    assert tokens > 300
    rate = accepted / tokens
    assert rate == 0.0 if kind == REJECTED else rate > (0.7 if kind == ACCEPTED else 0.15)


def test_late_masks_void_the_drafts_of_their_rows(
    drafting_llm: LLM, proposer: Changing, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[int] = []
    voided: set[tuple[int, int]] = set()  # pairs of step and row
    uncounted: set[tuple[int, int]] = set()
    bitmask_of, commit = manager.GrammarManager.bitmask, GroupScheduler.commit

    def counted(self: Any, step_id: int, rows: Any, *, may_wait: bool) -> Any:
        # Every third step waits for its masks.
        monkeypatch.setattr(manager, "GRACE_SECONDS", 9.0 if step_id % 3 == 0 else -1.0)
        found = bitmask_of(self, step_id, rows, may_wait=may_wait)
        postponed = [row for row in rows if row.row in found[0].postponed]
        late.extend(row.num_drafts for row in postponed)
        voided.update((step_id, row.row) for row in postponed if row.num_drafts)
        return found

    def noted(self: GroupScheduler, plans: Any, results: Any, **options: Any) -> Any:
        for one in results:
            rows = one.num_draft_tokens.items()
            uncounted.update((one.step_id, row) for row, num in rows if not num)
        return commit(self, plans, results, **options)

    monkeypatch.setattr(manager.GrammarManager, "bitmask", counted)
    monkeypatch.setattr(GroupScheduler, "commit", noted)
    monkeypatch.setattr(manager, "ALONE_SECONDS", -1.0)
    before = verified(drafting_llm)
    for kind in (RANDOM, ACCEPTED):
        proposer.be(kind)
        assert answers(drafting_llm) == expected
    assert sum(late) > 30 and verified(drafting_llm)[1] > before[1] + 100
    free_all(drafting_llm)
    assert voided and voided <= uncounted  # Void draft tokens do not count as drafts.


def test_steps_that_do_not_overlap_and_choices_of_one_prompt(
    drafting_llm: LLM, proposer: Changing, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer.be(ACCEPTED)
    monkeypatch.setattr(drafting_llm._loop, "_overlap", False)
    assert answers(drafting_llm) == expected
    several = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=40, grammar=LETTERS)

    def choices() -> list[list[int]]:
        return [one.token_ids for one in drafting_llm.generate([PROMPTS[0]], several)[0].outputs]

    alone = choices()  # The tokens of the step before are not known yet.
    keys = [(3 + index, tuple(PROMPTS[0])) for index in range(3)]
    proposer.be(ACCEPTED, dict(zip(keys, alone, strict=True)))
    before = verified(drafting_llm)
    assert choices() == alone and verified(drafting_llm)[1] > before[1] + 20
    free_all(drafting_llm)


def test_dead_process_ends_its_requests(
    drafting_llm: LLM, proposer: Changing, expected: list[Any]
) -> None:
    proposer.be(RANDOM)
    answers(drafting_llm)  # The answers start the grammar process.
    requests = admitted(drafting_llm, PROMPTS, PARAMS)
    updates = drive(drafting_llm, requests, num_steps=1)
    first = requests[0].request_id
    while len(read_tokens(updates[first])) <= 4 or drafting_llm._loop._grammars._client is None:
        for name, more in drive(drafting_llm, (), num_steps=1).items():
            updates[name] += more
    kill(drafting_llm._loop._grammars._client)
    for name, more in drive(drafting_llm, ()).items():
        updates[name] += more
    ends = [updates[request.request_id][-1] for request in requests]
    assert sum(end.is_lost for end in ends) >= 3
    for request, end, (tokens, reason, *_) in zip(requests, ends, expected, strict=True):
        found = read_tokens(updates[request.request_id])
        assert found == tokens[: len(found)]
        assert end.is_lost if end.finish_reason == "error" else end.finish_reason == reason
        assert request.sampling.grammar is not None or not end.is_lost
    free_all(drafting_llm)
    assert answers(drafting_llm) == expected


@pytest.mark.full
def test_no_launch_waits_for_drafts_of_constrained_rows(
    model: str, proposer: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check runs like on a GPU, with and without captured steps, where some masks are late."""
    reads = graph_support.watch_reads(monkeypatch)
    sizes = DRAFT_SIZES | {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 64}
    chosen = slice(15, None, -3)
    expected: list[list[int]] = []
    for pool in (None, None, graph_support.RepeatedSteps()):
        graph_support.install(monkeypatch, graph_support.runtime(pool, is_asynchronous=True))
        monkeypatch.setattr(manager, "GRACE_SECONDS", 9.0)
        reads.clear()
        with LLM(model, **sizes) as drafting_llm:
            found = [one[0] for one in answers(drafting_llm, chosen)]
            if not expected:
                expected = found
                proposer.be(RANDOM, map_outputs(chosen, found))
                drafts.install(monkeypatch.setattr, proposer)
                assert reads == []
                continue
            assert found == expected
            monkeypatch.setattr(manager, "GRACE_SECONDS", -1.0)
            assert [one[0] for one in answers(drafting_llm, chosen)] == expected
            assert [one[0] for one in answers(drafting_llm, slice(14, 16))][1] == expected[0]
            free_all(drafting_llm)
            assert verified(drafting_llm)[1] > 50
        # A step reads only the accepted count of two steps ago, which the host already has.
        assert len(reads) > 20 and {launch - made_by for launch, made_by in reads} == {2}


def test_masks_after_drafts_equal_those_of_committed_tokens() -> None:
    """Check that masks cover the draft tokens that the grammar allows, up to its end, in time."""
    eos = TOKENIZER.eos_token_id or 0
    text = [*TOKENIZER.encode("yes, it is so"), eos]
    with zmq.Context() as context, context.socket(zmq.PAIR) as near:
        near.bind("inproc://grammars")
        far = context.socket(zmq.PAIR)
        far.connect("inproc://grammars")
        setup = wire.Setup(str(tiny.NANO), 4160, (eos,), 1, 30.0, 30.0, 60.0)
        server = process.GrammarServer(far, setup, process.load_compiler(setup))
        far.close()
    assert server._compiler is not None
    compiled = server._compiler.compile(structural_tag(FIELDS[11]["grammar"], None, CALL_STYLES))
    output = process._FollowedOutput(0, compiled)

    def answer(parts: list[int], following: list[int], *, seconds: float = 60.0) -> wire.NextMask:
        server._setup = replace(setup, draft_seconds=seconds)
        server._advance(wire.AdvanceGrammars([]))
        return server._next_mask(output, [*parts], following)

    ahead = answer(text[:1], [*text[1:3], text[3] + 1, text[4]])
    to_the_end = answer([], text[1:])
    assert answer([], text[1:], seconds=-1.0).after_drafts == []
    masks = [answer([token], []).mask for token in text[1:-1]]
    assert ahead.after_drafts == masks[:2] and to_the_end.after_drafts == masks
    assert answer([eos], []).mask is None


def test_masks_of_earlier_positions_are_not_used_after_due_tokens(drafting_llm: LLM) -> None:
    """Check that due tokens, which need no mask, do not use an older mask that arrives late."""
    request = GenerateRequest(request_id="a", prompt_token_ids=(5,), sampling=PARAMS[8])
    rule = RequestGrammar(request, 0, client=drafting_llm._loop._grammars.start())
    rule.gate = ReasoningGate(OPTIONAL, budget=0, calls_end_it=False, token_bytes=None)
    rule.masks = [np.full(520, 255, dtype=np.uint8)] * 4
    rule.drafts = list(OPTIONAL.closing_ids)
    row = GrammarRow(0, "a", num_outputs=0, num_drafts=3)
    assert len(rule.drafts) == 3
    for rule.num_asked in (0, 1):
        masks = drafting_llm._loop._grammars._masks(rule, row)
        assert len(masks) == 4 - rule.num_asked
        for mask, due in zip(masks, OPTIONAL.closing_ids, strict=False):
            assert mask is not None and mask.nonzero()[0].tolist() == [due // 8]
