import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from negamax import LLM, SamplingParams
from negamax.base import supervision
from negamax.bench.group import Group
from negamax.config.grammar import Grammar
from negamax.engine.core.source import locate
from negamax.engine.llm import Generation
from negamax.models.memory import expected_distinct_experts
from negamax.options.engine import EngineOptions
from negamax.parallel.layout import ParallelLayout
from negamax.worker.config import DECODE_SECONDS, DISTINCT_EXPERTS, OBSERVE_ROUTING
from tests import tiny, tiny_m3
from tests.layouts import parallel

COMMON: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1}
# prompts run in chunks, and a rank's blocks do not suffice for all its answers at once
TIGHT = {"max_num_batched_tokens": 24, "num_kv_blocks": 10, "block_size": 16, "max_num_seqs": 8}
NAME = Grammar(kind="regex", text="[A-Z][a-z]{2,9}, [0-9]{2}")
PROMPTS = [
    "A box holds 24 pencils. How many pencils are in 13 boxes of this kind, all of them full?",
    "A box holds 24 pencils. How many pencils are in 13 boxes of this kind, all of them empty?",
    "Name and age:",
    "What is 47 + 38?",
    "Hello!",
    "Who are you?",
    "A box holds 24 pencils.",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, max_tokens=40, grammar=NAME),
    SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=3, prompt_logprobs=1),
    SamplingParams(temperature=0.7, seed=5, top_k=20, max_tokens=60, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, seed=9, top_p=0.8, max_tokens=5),
    GREEDY,
]


def tokens(made: list[Generation]) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in made]


def logprobs(made: list[Generation]) -> list[float]:
    return [
        entry.logprob
        for each in made
        for entry in [*(each.outputs[0].logprobs or []), *(each.prompt_logprobs or [])]
    ]


@pytest.fixture(scope="module")
def expected() -> list[Generation]:
    with LLM("nano", **COMMON, max_num_batched_tokens=24) as llm:
        return llm.generate(PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def ranks() -> Iterator[LLM]:
    layout = parallel(dp=2, pp=2, ep=True)
    with LLM("nano", **COMMON, **TIGHT, **layout) as llm:
        yield llm


def test_texts_equal_those_of_one_rank(ranks: LLM, expected: list[Generation]) -> None:
    for cached in (False, True):
        made = ranks.generate(PROMPTS, PARAMS)
        assert tokens(made) == tokens(expected)
        assert logprobs(made) == pytest.approx(logprobs(expected), abs=1e-3)
        assert cached == any(each.num_cached_tokens for each in made)
    scheduler = ranks._loop._scheduler
    assert min(rank.generated_tokens for rank in scheduler.ranks) > 100
    assert ranks.stats().preemption_count
    # alone, beside a rank that is idle on both stages
    assert tokens(ranks.generate(PROMPTS[:1], GREEDY)) == tokens(expected)[:1]


def test_aborts_do_not_change_other_requests(ranks: LLM, expected: list[Generation]) -> None:
    """Reuse slots and blocks while tokens of their previous owners are between stages."""
    loop = ranks._loop
    prompts = [ranks.tokenizer.encode(prompt) for prompt in PROMPTS]
    params = ranks._admit(prompts, PARAMS)
    requests = [choices[0][1] for choices in ranks._sequences(prompts, params)]
    first, kept = requests[4:], {request.request_id: [] for request in requests[:4]}
    for request in first:
        loop.add(request)
    for _ in range(5):
        loop.step()
    loop.abort([request.request_id for request in first])
    for request in requests[:4]:
        loop.add(request)
    while loop.has_work:
        for update in loop.step():
            if update.request_id in kept:
                kept[update.request_id] += update.token_ids
    assert list(kept.values()) == tokens(expected)[:4]


def test_benchmarks_read_selected_experts_of_every_rank(ranks: LLM) -> None:
    loop = ranks._loop
    spec = locate(EngineOptions("nano")).spec
    loop.run_debug_command(OBSERVE_ROUTING, 1)
    ranks.generate(["Hello!"], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    loop.run_debug_command(DISTINCT_EXPERTS, 1)  # of prompt and answer together
    ranks.generate([[5]], SamplingParams(max_tokens=1, ignore_eos=True))
    answers = loop.run_debug_command(DISTINCT_EXPERTS, 1)
    loop.run_debug_command(OBSERVE_ROUTING, 0)
    chosen = [[len(experts) for experts in answer.experts or ()] for answer in answers]
    per_token = expected_distinct_experts(spec, 1)
    assert sum(map(len, chosen)) == 2 * spec.num_layers and len(chosen) == 4
    assert sorted(sum(of_rank) for of_rank in chosen)[:2] == [0, 0]
    group = Group(ParallelLayout(pp=2, dp=2, ep=2))
    assert group.distinct_experts(answers) == per_token
    assert group.stage_milliseconds(loop.run_debug_command(DECODE_SECONDS, 1)) == []  # no GPU


@pytest.fixture(scope="module")
def m3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = tiny_m3.random_sizes(
        5, num_hidden_layers=3, vocab_size=96, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, dense_intermediate_size=32, shared_intermediate_size=32,
        num_local_experts=8, index_n_heads=2, mlp_layer_types=["dense", "sparse", "sparse"],
        layer_types=["full_attention", *["minimax_m3_sparse"] * 2],
    )  # fmt: skip
    return tiny.save(tiny_m3.make_model(5, **sizes), tmp_path_factory.mktemp("m3"))


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        parallel(dp=2, pp=2, ep=True),
        {"data_parallel_size": 2, "pipeline_parallel_size": 2, "tensor_parallel_size": 2,
         "expert_parallel_size": 2, "pp_layer_partition": "1,2"},
    ],
    ids=["whole-experts", "tp2-ep2"],
)  # fmt: skip
def test_experts_lie_on_the_ranks_of_a_stage(m3: Path, layout: dict[str, Any]) -> None:
    prompts = [[5, 6, 7] * length for length in (1, 6, 14, 20, 3)]
    params = [
        SamplingParams(temperature=temperature, seed=4, max_tokens=20, ignore_eos=True)
        for temperature in (0.0, 1.0, 0.0, 1.0, 0.0)
    ]
    limits = {"block_size": 32, "max_num_batched_tokens": 16}
    texts = []
    for options in ({}, layout):
        with LLM(str(m3), **COMMON, **limits, **options) as llm:
            texts.append(tokens(llm.generate(prompts, params)))
    assert texts[0] == texts[1]


@pytest.mark.full
def test_captured_steps_of_data_ranks_on_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank without rows replays the others' step on each stage and exchanges nothing."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8,
             "num_local_experts": 4, "num_experts_per_tok": 2,
             "max_position_embeddings": 256}  # fmt: skip
    folder = str(tiny.save(tiny.make_model(5, **sizes), tmp_path))
    prompts = [[5, 6, 7] * length for length in (1, 6, 20)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=4, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=5, top_k=5, max_tokens=16, logprobs=1),
    ]
    limits = {**COMMON, "max_num_batched_tokens": 24, "max_num_seqs": 5}
    spawn = supervision.spawn

    def captured(_module: str, *args: str) -> subprocess.Popen[bytes]:
        return spawn("tests.dist.ranks", "captured", *args)

    monkeypatch.setattr(supervision, "spawn", captured)
    texts = []
    for stages in (1, 2):
        layout = parallel(dp=2, pp=stages)
        with LLM(folder, **limits, **layout) as llm:
            texts.append(tokens(llm.generate(prompts, params)))
            time.sleep(0.3)  # without a plan
            assert tokens(llm.generate(prompts[1:2], params[1])) == texts[0][1:2]
            children = llm._loop.executor._processes  # type: ignore[attr-defined]
        assert [child.exit_code for child in children] == [0] * len(children)  # replayed steps, too
    assert texts[0] == texts[1]
