import json
from collections.abc import Iterator
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
    kill,
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
from negamax.engine.grammar.manager import RequestGrammar
from negamax.models.registry import CALL_STYLES
from negamax.scheduler.group import GroupScheduler
from negamax.scheduler.request import GenerateRequest
from negamax.scheduler.step import GrammarRow
from negamax.text.grammar.reasoning_gate import ReasoningGate
from negamax.text.grammar.structural_tag import structural_tag
from tests import drafts, tiny
from tests.dist.engines import save_m2
from tests.drafts import ACCEPTED, KINDS, RANDOM, REJECTED, Key
from tests.loop_driver import admitted, drive, free_all, read_tokens

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
SIZES: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_model_len": 128, "block_size": 8}
# Prompts are chunked at these sizes, and some sequences preempt other sequences.
CROWDED = {"max_num_batched_tokens": 41, "max_num_seqs": 9, "num_kv_blocks": 24}


def answers(llm: LLM, chosen: slice = slice(None)) -> list[Any]:
    return [
        (one.token_ids, one.finish_reason, one.stop_reason, one.logprobs)
        for generation in llm.generate(PROMPTS[chosen], PARAMS[chosen])
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
    with LLM(model, **SIZES) as llm:
        return answers(llm)


def map_outputs(chosen: slice, outputs: list[list[int]]) -> dict[Key, list[int]]:
    columns = zip(PARAMS[chosen], PROMPTS[chosen], outputs, strict=True)
    return {(params.seed or 0, tuple(tokens)): output for params, tokens, output in columns}


@pytest.fixture(scope="module")
def proposer(expected: list[Any]) -> Changing:
    return Changing(map_outputs(slice(None), [one[0] for one in expected]))


@pytest.fixture(scope="module")
def llm(model: str, proposer: Changing) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        drafts.install(patch.setattr, proposer)
        # With this limit every draft token has its mask, even on a busy machine.
        patch.setattr(manager, "DRAFT_SECONDS", 60.0)
        engine = LLM(model, **SIZES, **CROWDED)
    with engine:
        yield engine


def verified(llm: LLM) -> tuple[int, int]:
    stats = llm.stats()
    return stats.num_draft_tokens, stats.num_accepted_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_keep_constrained_texts(
    llm: LLM, proposer: Changing, expected: list[Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GRACE_SECONDS", "ALONE_SECONDS"):  # A late mask would void accepted draft tokens.
        monkeypatch.setattr(manager, name, 9.0)
    proposer.be(kind)
    before = verified(llm)
    assert answers(llm) == expected
    free_all(llm)
    assert llm.stats().preemption_count > 0
    tokens, accepted = (now - then for now, then in zip(verified(llm), before, strict=True))
    assert tokens > 300
    rate = accepted / tokens
    assert rate == 0.0 if kind == REJECTED else rate > (0.7 if kind == ACCEPTED else 0.15)


def test_late_masks_void_the_drafts_of_their_rows(
    llm: LLM, proposer: Changing, expected: list[Any], monkeypatch: pytest.MonkeyPatch
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
    before = verified(llm)
    for kind in (RANDOM, ACCEPTED):
        proposer.be(kind)
        assert answers(llm) == expected
    assert sum(late) > 30 and verified(llm)[1] > before[1] + 100
    free_all(llm)
    assert voided and voided <= uncounted  # Void draft tokens do not count as drafts.


def test_steps_that_do_not_overlap_and_choices_of_one_prompt(
    llm: LLM, proposer: Changing, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer.be(ACCEPTED)
    monkeypatch.setattr(llm._loop, "_overlap", False)
    assert answers(llm) == expected
    several = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=40, grammar=LETTERS)

    def choices() -> list[list[int]]:
        return [one.token_ids for one in llm.generate([PROMPTS[0]], several)[0].outputs]

    alone = choices()  # The tokens of the step before are not known yet.
    keys = [(3 + index, tuple(PROMPTS[0])) for index in range(3)]
    proposer.be(ACCEPTED, dict(zip(keys, alone, strict=True)))
    before = verified(llm)
    assert choices() == alone and verified(llm)[1] > before[1] + 20
    free_all(llm)


def test_dead_process_ends_its_requests(llm: LLM, proposer: Changing, expected: list[Any]) -> None:
    proposer.be(RANDOM)
    answers(llm)  # The answers start the grammar process.
    requests = admitted(llm, PROMPTS, PARAMS)
    updates = drive(llm, requests, num_steps=1)
    first = requests[0].request_id
    while len(read_tokens(updates[first])) <= 4 or llm._loop._grammars._client is None:
        for name, more in drive(llm, (), num_steps=1).items():
            updates[name] += more
    kill(llm._loop._grammars._client)
    for name, more in drive(llm, ()).items():
        updates[name] += more
    ends = [updates[request.request_id][-1] for request in requests]
    assert sum(end.is_lost for end in ends) >= 3
    for request, end, (tokens, reason, *_) in zip(requests, ends, expected, strict=True):
        found = read_tokens(updates[request.request_id])
        assert found == tokens[: len(found)]
        assert end.is_lost if end.finish_reason == "error" else end.finish_reason == reason
        assert request.sampling.grammar is not None or not end.is_lost
    free_all(llm)
    assert answers(llm) == expected


@pytest.mark.full
def test_no_launch_waits_for_drafts_of_constrained_rows(
    model: str, proposer: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check runs like on a GPU, with and without captured steps, where some masks are late."""
    reads = graph_support.watch_reads(monkeypatch)
    sizes = SIZES | {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 64}
    chosen = slice(15, None, -3)
    expected: list[list[int]] = []
    for pool in (None, None, graph_support.RepeatedSteps()):
        graph_support.install(monkeypatch, graph_support.runtime(pool, is_asynchronous=True))
        monkeypatch.setattr(manager, "GRACE_SECONDS", 9.0)
        reads.clear()
        with LLM(model, **sizes) as llm:
            found = [one[0] for one in answers(llm, chosen)]
            if not expected:
                expected = found
                proposer.be(RANDOM, map_outputs(chosen, found))
                drafts.install(monkeypatch.setattr, proposer)
                assert reads == []
                continue
            assert found == expected
            monkeypatch.setattr(manager, "GRACE_SECONDS", -1.0)
            assert [one[0] for one in answers(llm, chosen)] == expected
            assert [one[0] for one in answers(llm, slice(14, 16))][1] == expected[0]
            free_all(llm)
            assert verified(llm)[1] > 50
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
        server._draft_seconds = seconds
        server._advance(wire.AdvanceGrammars([]))
        return server._next_mask(output, [*parts], following)

    ahead = answer(text[:1], [*text[1:3], text[3] + 1, text[4]])
    to_the_end = answer([], text[1:])
    assert answer([], text[1:], seconds=-1.0).after_drafts == []
    masks = [answer([token], []).mask for token in text[1:-1]]
    assert ahead.after_drafts == masks[:2] and to_the_end.after_drafts == masks
    assert answer([eos], []).mask is None


def test_masks_of_earlier_positions_are_not_used_after_due_tokens(llm: LLM) -> None:
    """Check that due tokens, which need no mask, do not use an older mask that arrives late."""
    request = GenerateRequest(request_id="a", prompt_token_ids=(5,), sampling=PARAMS[8])
    rule = RequestGrammar(request, 0, client=llm._loop._grammars.start())
    rule.gate = ReasoningGate(OPTIONAL, budget=0, calls_end_it=False, token_bytes=None)
    rule.masks = [np.full(520, 255, dtype=np.uint8)] * 4
    rule.drafts = list(OPTIONAL.closing_ids)
    row = GrammarRow(0, "a", num_outputs=0, num_drafts=3)
    assert len(rule.drafts) == 3
    for rule.num_asked in (0, 1):
        masks = llm._loop._grammars._masks(rule, row)
        assert len(masks) == 4 - rule.num_asked
        for mask, due in zip(masks, OPTIONAL.closing_ids, strict=False):
            assert mask is not None and mask.nonzero()[0].tolist() == [due // 8]
