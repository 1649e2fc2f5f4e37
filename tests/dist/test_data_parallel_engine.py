from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nano.suites import retrieval, tool_calls
from negamax import LLM, SamplingParams
from negamax.config.grammar import Grammar
from negamax.engine.llm import Generation
from tests import tiny, tiny_draft

NAME = Grammar(kind="regex", text="[A-Z][a-z]{2,9}, [0-9]{2}")
COMMON: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1}
PLAIN = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
# a long prompt beside short ones; more requests than ranks, not a multiple of them
PROMPTS = [
    list(range(40, 400)), *(list(range(30 + start, 60 + start % 3)) for start in range(4)),
    [77], list(range(40, 400, 3)),
]  # fmt: skip
PARAMS = [
    PLAIN,
    SamplingParams(temperature=0.0, max_tokens=30, grammar=NAME),
    SamplingParams(temperature=1.0, seed=1, max_tokens=30, grammar=NAME, logprobs=2),
    SamplingParams(temperature=1.0, seed=2, top_k=40, max_tokens=24, logprobs=1),
    SamplingParams(temperature=0.9, seed=3, frequency_penalty=0.8, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, prompt_logprobs=0),
]


def nano(**options: Any) -> LLM:
    return LLM("nano", **COMMON, max_model_len=512, max_num_batched_tokens=96, **options)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[LLM]:
    with nano(data_parallel_size=2) as llm:
        yield llm


Answer = tuple[list[int], list[float]]


def said(made: list[Generation]) -> list[Answer]:
    return [
        (
            each.outputs[0].token_ids,
            [
                entry.logprob
                for entry in [*(each.outputs[0].logprobs or []), *(each.prompt_logprobs or [])]
            ],
        )
        for each in made
    ]


def assert_same(found: list[Answer], expected: list[Answer]) -> None:
    for (tokens, logprobs), (own, own_logprobs) in zip(found, expected, strict=True):
        assert tokens == own
        assert logprobs == pytest.approx(own_logprobs, abs=1e-3)


@pytest.fixture(scope="module")
def of_one_rank() -> list[Answer]:
    with nano() as llm:
        return said(llm.generate(PROMPTS, PARAMS))


def test_two_ranks_say_what_one_says(two_ranks: LLM, of_one_rank: list[Answer]) -> None:
    assert_same(said(two_ranks.generate(PROMPTS, PARAMS)), of_one_rank)
    assert [len(logprobs) for _, logprobs in of_one_rank] != [0] * len(PROMPTS)
    ranks = two_ranks._loop._scheduler.ranks
    assert min(rank.generated_tokens for rank in ranks) > 0
    # alone, beside an idle rank; its prefix is still cached
    (alone,) = two_ranks.generate(PROMPTS[:1], PLAIN)
    assert_same(said([alone]), of_one_rank[:1])
    assert alone.num_cached_tokens > 300


def test_who_is_aborted_harms_nobody_on_either_rank(
    two_ranks: LLM, of_one_rank: list[Answer]
) -> None:
    loop, found = two_ranks._loop, dict[str, list[int]]()
    admitted = two_ranks._admit(PROMPTS, PARAMS)
    requests = [choices[0][1] for choices in two_ranks._sequences(PROMPTS, admitted)]
    for request in requests:
        loop.add(request)
    aborted = {requests[at].request_id for at in (0, 3, 6)}
    reasons = {}
    for number in range(500):
        if number == 4:
            loop.abort(list(aborted))
        for update in loop.step() if loop.has_work else []:
            found.setdefault(update.request_id, []).extend(update.token_ids)
            reasons[update.request_id] = update.finish_reason
    assert not loop.has_work
    for request, (tokens, *_) in zip(requests, of_one_rank, strict=True):
        if request.request_id in aborted:
            assert reasons[request.request_id] == "abort"
        else:
            assert found[request.request_id] == tokens


@pytest.fixture(scope="module")
def tiny_m2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 5,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8,
             "num_local_experts": 8, "num_experts_per_tok": 2,
             "max_position_embeddings": 128}  # fmt: skip
    return tiny.save(tiny.make_model(5, **sizes), tmp_path_factory.mktemp("m2"))


def tokens_of(
    folder: Path, prompts: list[list[int]], params: SamplingParams, **options: Any
) -> tuple[list[list[int]], Any, int]:
    with LLM(str(folder), **COMMON, **{"block_size": 4} | options) as llm:
        made = [*llm.generate(prompts[:-1], params), *llm.generate(prompts[-1:], params)]
        return [each.outputs[0].token_ids for each in made], llm.stats(), (
            made[-1].num_cached_tokens
        )  # fmt: skip


SHARED = [[*range(3, 40), 40 + at] for at in range(9)]
LONGER = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize(
    "ranks",
    [
        {"data_parallel_size": 4, "enable_expert_parallel": True},
        pytest.param(
            {"data_parallel_size": 2, "tensor_parallel_size": 2, "expert_parallel_size": 2},
            marks=pytest.mark.full,
        ),
    ],
)
def test_preemption_and_prefixes_leave_the_text_as_it_is(
    tiny_m2: Path, ranks: dict[str, Any]
) -> None:
    options = {"max_num_batched_tokens": 32, "max_num_seqs": 8}
    expected, _, _ = tokens_of(tiny_m2, SHARED, LONGER, **options)
    small = {"num_kv_blocks": 34 if ranks["data_parallel_size"] == 2 else 24}
    found, stats, cached = tokens_of(tiny_m2, SHARED, LONGER, **options, **small, **ranks)
    assert found == expected
    assert stats.preemption_count > 0 and cached >= 32
    assert stats.num_kv_blocks == small["num_kv_blocks"] * ranks["data_parallel_size"]


@pytest.mark.parametrize("method", ["eagle3", pytest.param("ngram", marks=pytest.mark.full)])
def test_draft_tokens_leave_the_text_as_it_is(method: str, tiny_m2: Path, tmp_path: Path) -> None:
    config: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3}
    if method == "eagle3":
        _, _, draft = tiny_draft.make(
            "biases, two layers", tmp_path / "draft", ids=[1, 2, 3], vocab_size=96, hidden_size=32
        )
        config = {"method": "eagle3", "model": draft, "adaptive": False}
    prompts = [[5, 6, 7, 8, 9] * 6, [5, 6, 7, 8, 9] * 3, [11, 12, 13] * 4]
    expected, _, _ = tokens_of(tiny_m2, prompts, LONGER)
    found, stats, _ = tokens_of(
        tiny_m2, prompts, LONGER, data_parallel_size=2, speculative_config=config
    )
    assert found == expected
    assert stats.num_draft_tokens > 20


@pytest.mark.parametrize(
    "ranks",
    [
        {"data_parallel_size": 2},  # the shared expert is among the others
        pytest.param(
            {"data_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True},
            marks=pytest.mark.full,
        ),
    ],
)
def test_nano_m3_says_the_same_with_data_parallel_ranks(
    ranks: dict[str, Any], nano_m3: tuple[list[list[int]], list[list[int]]]
) -> None:
    prompts, expected = nano_m3
    assert answers(prompts, **ranks) == expected


@pytest.fixture(scope="module")
def nano_m3() -> tuple[list[list[int]], list[list[int]]]:
    (long,) = retrieval.problems("2k", 1, 5)
    with LLM("nano-m3", **COMMON, script="agents") as llm:
        prompts = [llm.render(list(long.messages), tools=list(long.tools) or None)]
        prompts += [
            llm.render(list(each.messages), tools=list(each.tools))
            for each in tool_calls.problems(2, 5)
        ]
    return prompts, answers(prompts)


def answers(prompts: list[list[int]], **ranks: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    with LLM("nano-m3", **COMMON, max_num_batched_tokens=512, **ranks) as llm:
        return [each.outputs[0].token_ids for each in llm.generate(prompts, params)]
