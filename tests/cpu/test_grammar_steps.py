from collections.abc import Iterator
from typing import Any

import pytest
from grammar_support import PERSON, is_person, outputs, reasoning, run_out, schema, seeded

from negamax import LLM, SamplingParams
from negamax.engine.grammar import manager as constraints
from negamax.engine.grammar.manager import GrammarManager


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("nano", num_threads=1, max_model_len=1024) as engine:
        yield engine


def test_greedy_texts_next_to_constrained_ones_are_bit_identical(llm: LLM) -> None:
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


def test_late_masks_cost_constrained_requests_steps_but_no_tokens(
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


def test_preempted_outputs_continue(llm: LLM) -> None:
    prompts = [f"Person number {n}:" for n in range(10)]
    params = [seeded(seed, grammar=schema(PERSON)) for seed in range(10)]
    expected = [completion.token_ids for completion in outputs(llm, prompts, params)]
    with LLM("nano", num_threads=1, max_model_len=256, num_kv_blocks=17, block_size=16) as small:
        assert [completion.token_ids for completion in outputs(small, prompts, params)] == expected
        assert small.stats().preemption_count > 0
        run_out(small)


def test_steps_without_overlap_give_the_same_texts(llm: LLM) -> None:
    params = [seeded(seed, grammar=schema(PERSON), max_tokens=60) for seed in range(4)]
    expected = [completion.token_ids for completion in outputs(llm, ["A person:"] * 4, params)]
    with LLM("nano", num_threads=1, max_model_len=256, enable_overlap=False) as plain:
        assert [
            completion.token_ids for completion in outputs(plain, ["A person:"] * 4, params)
        ] == expected


def test_without_grammars_no_process_starts(llm: LLM) -> None:
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
