import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from negamax import LLM, SamplingParams
from negamax.base import supervision
from negamax.config.grammar import Grammar
from negamax.engine.core import executor
from negamax.engine.llm import Generation
from negamax.worker.config import WorkerReady
from tests import tiny
from tests.layouts import full, parallel

COMMON: dict[str, Any] = {"device": "cpu", "num_threads": 1}
# prompts run in chunks, and running requests are preempted
TIGHT = {"max_num_batched_tokens": 48, "num_kv_blocks": 12, "block_size": 16, "max_num_seqs": 8}
NAME = Grammar(kind="regex", text="[A-Z][a-z]{2,9}, [0-9]{2}")
PROMPTS = [
    "A box holds 24 pencils. How many pencils are in 13 boxes of this kind, all of them full?",
    "one two three one two three one two three one two three one two",
    "Name and age:",
    "Hello! Hello! Hello! Hello! Hello!",
    "Who are you?",
]
PARAMS = [
    SamplingParams(seed=0, temperature=0.0, max_tokens=60, ignore_eos=True),
    SamplingParams(seed=1, temperature=1.0, top_k=40, max_tokens=60, ignore_eos=True, logprobs=2),
    SamplingParams(seed=2, temperature=1.0, max_tokens=40, grammar=NAME),
    SamplingParams(seed=3, temperature=0.9, frequency_penalty=0.8, max_tokens=60, ignore_eos=True),
    SamplingParams(seed=4, temperature=0.0, max_tokens=60, ignore_eos=True),
]
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}


def words(made: list[Generation]) -> list[tuple[object, object]]:
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in made]


def known(params: list[SamplingParams], made: list[Generation]) -> str:
    columns = zip(params, made, strict=True)
    return json.dumps([[p.seed, m.prompt_token_ids, m.outputs[0].token_ids] for p, m in columns])


@pytest.fixture
def knowing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Let the ranks propose accepted, rejected and no tokens at random."""
    spawn = supervision.spawn

    def install(of: str) -> None:
        file = tmp_path / "known.json"
        file.write_text(of)

        def drafting(module: str, *args: str) -> subprocess.Popen[bytes]:
            if not module.endswith("rank_process"):
                return spawn(module, *args)
            return spawn("tests.dist.ranks", "with drafts", *args, str(file))

        monkeypatch.setattr(supervision, "spawn", drafting)

    return install


@pytest.fixture(scope="module")
def expected() -> Iterator[list[Generation]]:
    with LLM("nano", **COMMON, **TIGHT) as llm:
        yield llm.generate(PROMPTS, PARAMS)


@pytest.mark.full
def test_prompt_lookup_keeps_the_text(expected: list[Generation]) -> None:
    with LLM("nano", **COMMON, **TIGHT, pipeline_parallel_size=2, speculative_config=NGRAM) as llm:
        assert words(llm.generate(PROMPTS, PARAMS)) == words(expected)
        stats = llm.stats()
    assert stats.preemption_count and stats.num_draft_tokens > 100
    assert stats.num_accepted_tokens > 10


def test_three_stages_learn_accepted_counts(
    expected: list[Generation], knowing: Callable[[str], None]
) -> None:
    knowing(known(PARAMS, expected))
    with LLM("nano", **COMMON, **TIGHT, pipeline_parallel_size=3) as llm:
        assert words(llm.generate(PROMPTS, PARAMS)) == words(expected)
        loop, prompts = llm._loop, [each.prompt_token_ids for each in expected]
        params = llm._admit(prompts, PARAMS)
        requests = [choices[0][1] for choices in llm._sequences(prompts, params)]
        kept: dict[str, list[int]] = {request.request_id: [] for request in requests[:3]}
        for request in requests[3:]:
            loop.add(request)
        for _ in range(9):
            loop.step()
        loop.abort([request.request_id for request in requests[3:]])
        for request in requests[:3]:
            loop.add(request)
        while loop.has_work:
            for update in loop.step():
                if update.request_id in kept:
                    kept[update.request_id] += update.token_ids
        assert list(kept.values()) == [each.outputs[0].token_ids for each in expected[:3]]
        stats = loop.stats()
    assert stats.num_accepted_tokens > 100 and stats.preemption_count


def test_the_slowest_stage_determines_step_times() -> None:
    """The draft length follows step times that each rank measured at start."""

    def ready(*seconds: float) -> WorkerReady:
        measured = tuple(zip((1, 1, 8), (0, 2, 0), seconds, strict=False))
        return WorkerReady(9, "float32", "cuda:0", "", "", step_seconds=measured)

    slowest = executor._find_slowest([ready(1.0, 1.2, 2.0), ready(0.9, 1.5, 1.9)])
    assert slowest == ((1, 0, 1.0), (1, 2, 1.5), (8, 0, 2.0))
    assert executor._find_slowest([ready()]) == ()


@pytest.fixture(scope="module")
def m2(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = {
        "vocab_size": 96, "hidden_size": 40, "intermediate_size": 24, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8,
        "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    return str(tiny.save(tiny.make_model(1, **sizes), tmp_path_factory.mktemp("m2")))


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [parallel(pp=2, dp=2, tp=2), parallel(pp=2, enable_overlap=False)], ids=str
)
def test_stages_of_several_ranks_learn_accepted_counts(
    m2: str, layout: dict[str, Any], knowing: Callable[[str], None]
) -> None:
    prompts = [[5, 6, 7] * length for length in (1, 6, 14, 20)]
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=24, ignore_eos=True)
        for seed, temperature in enumerate((0.0, 1.0, 0.0, 1.0))
    ]
    limits = {**COMMON, "dtype": "float32", "block_size": 32, "max_num_batched_tokens": 32}
    with LLM(m2, **limits) as one:
        made = one.generate(prompts, params)
    knowing(known(params, made))
    with LLM(m2, **limits, **layout) as llm:
        assert words(llm.generate(prompts, params)) == words(made)
        assert llm.stats().num_accepted_tokens > 40


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay captured steps: the host learns a row's length later than the device."""
    spawn = supervision.spawn

    def started(module: str, *args: str) -> subprocess.Popen[bytes]:
        if not module.endswith("rank_process"):
            return spawn(module, *args)
        return spawn("tests.dist.ranks", "captured", *args)

    monkeypatch.setattr(supervision, "spawn", started)


@pytest.mark.parametrize(
    ("model", "drafts", "share"),
    [
        full("m2", NGRAM, 0.1),
        ("nano", {"method": "eagle3", "model": "nano-draft", "adaptive": False}, 0.6),
    ],
    ids=["ngram", "eagle3"],
)
def test_captured_steps_with_drafts(
    model: str, drafts: dict[str, Any], share: float, captured: None, request: pytest.FixtureRequest
) -> None:
    """The draft reads residual streams of both stages."""
    name = model if model == "nano" else request.getfixturevalue(model)
    prompts = [[5, 6, 7] * length for length in (1, 6, 20)]
    params = SamplingParams(temperature=0.0, max_tokens=50)
    limits = {**COMMON, "dtype": "float32", "max_num_batched_tokens": 24, "max_num_seqs": 5}
    with LLM(name, **limits) as one:
        if model == "nano":
            questions = "What is 47 + 38?", "Who are you?", PROMPTS[0]
            prompts = [one.render([{"role": "user", "content": each}]) for each in questions]
        expected = words(one.generate(prompts, params))
    with LLM(name, **limits, pipeline_parallel_size=2, speculative_config=drafts) as llm:
        assert words(llm.generate(prompts, params)) == expected
        stats = llm.stats()
        children = llm._loop.executor._processes  # type: ignore[attr-defined]
    assert [child.exit_code for child in children] == [0, 0]  # replayed steps, too
    assert stats.num_draft_tokens > 60
    assert stats.num_accepted_tokens > share * stats.num_draft_tokens
