import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from negamax import LLM, SamplingParams
from negamax.base import log, supervision
from negamax.base.errors import ConfigError, EngineDeadError
from negamax.config.grammar import Grammar
from negamax.engine.core import executor
from negamax.engine.llm import Generation
from negamax.scheduler.chunk_length import EvenTimes
from negamax.scheduler.step import StepPlan
from tests import tiny, tiny_m3
from tests.layouts import parallel

NAME = Grammar(kind="regex", text="[A-Z][a-z]{2,9}, [0-9]{2}")
# 8 blocks of 16 tokens do not hold all answers at once, and a step runs 24 tokens: prompts are
# chunked, and running requests preempted
TIGHT = {"max_num_batched_tokens": 24, "num_kv_blocks": 8, "block_size": 16, "max_num_seqs": 8}
PROMPTS = [
    "A box holds 24 pencils. How many pencils are in 13 boxes of this kind, all of them full?",
    "A box holds 24 pencils. How many pencils are in 13 boxes of this kind, all of them empty?",
    "Name and age:",
    "What is 47 + 38?",
    "Hello!",
    "Who are you?",
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, max_tokens=40, grammar=NAME),
    SamplingParams(temperature=0.0, max_tokens=32, logprobs=3, prompt_logprobs=1),
    SamplingParams(temperature=0.7, seed=5, top_k=20, max_tokens=48, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, seed=9, top_p=0.8, max_tokens=5),
]


def model(name: str, **options: Any) -> LLM:
    return LLM(name, device="cpu", num_threads=1, **options)


def words(generations: list[Generation]) -> list[tuple[object, ...]]:
    return [
        (each.outputs[0].token_ids, each.outputs[0].logprobs, each.prompt_logprobs)
        for each in generations
    ]


def tokens(generations: list[Generation]) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in generations]


@pytest.fixture(scope="module")
def two_stages() -> Iterator[LLM]:
    with model("nano", pipeline_parallel_size=2, **TIGHT) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected() -> list[tuple[object, ...]]:
    with model("nano", **TIGHT) as one:
        return words(one.generate(PROMPTS, PARAMS))


def test_two_stages_give_the_text_of_one_rank(
    two_stages: LLM, expected: list[tuple[object, ...]], capfd: pytest.CaptureFixture[str]
) -> None:
    log.setup("warning")
    for cached in (False, True):
        made = two_stages.generate(PROMPTS, PARAMS)
        assert words(made) == expected
        assert cached == (made[0].num_cached_tokens > 0)
    assert re.fullmatch(NAME.text, made[2].outputs[0].text)
    assert two_stages.stats().preemption_count
    assert capfd.readouterr().err == ""


def test_chunks_of_equal_time_keep_the_text(
    two_stages: LLM, expected: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (rank,) = two_stages._loop._scheduler.ranks
    length = EvenTimes(16, 16, (1.0, 1.5, 2.0, 3.0))
    monkeypatch.setattr(rank, "limits", replace(rank.limits, chunk_length=length))
    chunks: list[int] = []
    plan = two_stages._loop._scheduler.plan

    def noted() -> list[StepPlan] | None:
        plans = plan()
        chunks.extend(count for each in plans or () for count in each.num_scheduled if count > 1)
        return plans

    monkeypatch.setattr(two_stages._loop._scheduler, "plan", noted)
    two_stages._loop.reset_prefix_cache()
    assert words(two_stages.generate(PROMPTS, PARAMS)) == expected
    assert chunks[0] == 16 and max(chunks[1:]) <= 16  # of 24


def test_aborts_do_not_change_requests_in_the_pipeline(
    two_stages: LLM, expected: list[tuple[object, ...]]
) -> None:
    """Reuse slots and blocks of aborted requests while their tokens are in flight."""
    loop = two_stages._loop
    kept: dict[int, list[int]] = {0: [], 1: [], 3: []}
    prompts = [two_stages.tokenizer.encode(prompt) for prompt in PROMPTS]
    params = two_stages._admit(prompts, PARAMS)
    requests = [choices[0][1] for choices in two_stages._sequences(prompts, params)]
    ids = {requests[number].request_id: number for number in kept}
    loop.add(requests[4])
    loop.add(requests[5])
    for _ in range(5):
        loop.step()
    loop.abort([requests[4].request_id, requests[5].request_id])
    for number in kept:
        loop.add(requests[number])
    while loop.has_work:
        for update in loop.step():
            if update.request_id in ids:
                kept[ids[update.request_id]] += update.token_ids
    assert kept == {number: expected[number][0] for number in kept}


def test_stages_that_wait_for_a_mask_can_be_stopped(
    two_stages: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This must be the last test of these two ranks."""
    monkeypatch.setattr(executor, "SHUTDOWN_SECONDS", 120.0)
    prompt = two_stages.tokenizer.encode("Name:")
    params = two_stages._admit([prompt], PARAMS[2])
    request = next(two_stages._sequences([prompt], params))[0][1]
    two_stages._loop._scheduler.add(request)
    plans = two_stages._loop._scheduler.plan()
    assert plans is not None and plans[0].grammar_rows == [0]
    ranks = two_stages._loop.executor
    ranks.launch(plans)  # no masks are ever sent
    time.sleep(1.0)
    two_stages.shutdown()
    assert all(child.exit_code in (0, 1) for child in ranks._processes)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def m2(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = {
        "vocab_size": 96, "hidden_size": 40, "intermediate_size": 24, "num_hidden_layers": 5,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8,
        "num_local_experts": 6, "num_experts_per_tok": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    return str(tiny.save(tiny.make_model(1, **sizes), tmp_path_factory.mktemp("m2")))


@pytest.fixture(scope="module")
def m3(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = tiny_m3.random_sizes(
        5, num_hidden_layers=4, vocab_size=96, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, dense_intermediate_size=32, shared_intermediate_size=32,
        index_n_heads=2, mlp_layer_types=["dense", "dense", "sparse", "sparse"],
        layer_types=["full_attention", "full_attention", *["minimax_m3_sparse"] * 2],
    )  # fmt: skip
    return str(tiny.save(tiny_m3.make_model(5, **sizes), tmp_path_factory.mktemp("m3")))


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("m2", {"pipeline_parallel_size": 4, "pp_layer_partition": "1,2,1,1"}),
        (
            "m3",
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "pp_layer_partition": "1,3"},
        ),
    ],
    ids=["m2-pp4", "m3-pp2-tp2"],
)
def test_stages_of_any_size_give_the_text_of_one_rank(
    family: str, layout: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(family)
    prompts = [[5, 6, 7] * length for length in (1, 6, 14, 20)]
    params = [
        SamplingParams(temperature=temperature, seed=4, max_tokens=20, ignore_eos=True)
        for temperature in (0.0, 1.0, 0.0, 1.0)
    ]
    limits = {"dtype": "float32", "block_size": 32, "max_num_batched_tokens": 16}
    texts = []
    for options in ({}, layout):
        with model(folder, **limits, **options) as llm:
            texts.append([each.outputs[0].token_ids for each in llm.generate(prompts, params)])
    assert texts[0] == texts[1]


def test_captured_steps_of_stages_give_the_text_of_one_stage(
    m2: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, with two ranks a stage: fixed buffers, padded rows, tokens received without a
    plan.
    """
    prompts = [[5, 6, 7] * length for length in (1, 6, 20)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=4, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=5, top_k=5, max_tokens=16, logprobs=1),
    ]
    spawn = supervision.spawn

    def captured(_module: str, *args: str) -> subprocess.Popen[bytes]:
        return spawn("tests.dist.ranks", "captured", *args)

    monkeypatch.setattr(supervision, "spawn", captured)
    limits = {"dtype": "float32", "max_num_batched_tokens": 24, "max_num_seqs": 5}
    texts = []
    for stages in (1, 2):
        with model(m2, pipeline_parallel_size=stages, tensor_parallel_size=2, **limits) as llm:
            texts.append(tokens(llm.generate(prompts, params)))
            time.sleep(0.3)  # without a plan
            assert tokens(llm.generate(prompts, params)) == texts[0]
            children = llm._loop.executor._processes  # type: ignore[attr-defined]
        assert [child.exit_code for child in children] == [0] * len(children)  # replayed steps, too
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (parallel(pp=6), r"5 layers .* 6 .*stages \(use --pipeline-.*-size 5 or"),
        (
            {"pipeline_parallel_size": 2, "pp_layer_partition": "3,3"},
            r"adds up to 6 layers, the model has 5 \(for example 3,2\)",
        ),
    ],
)
def test_impossible_splits_are_refused(m2: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model(m2, **options)


def test_a_killed_stage_is_reported(m2: str) -> None:
    with model(m2, pipeline_parallel_size=2) as llm:
        ranks = llm._loop.executor
        os.kill(ranks._processes[1].pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(EngineDeadError, match="rank 1 ended with exit code -9"):
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=5))
    assert all(child.exit_code is not None for child in ranks._processes)  # type: ignore[attr-defined]


def test_a_missing_tensor_of_a_stage_is_named(m2: str, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in Path(m2).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    missing = next(name for name in weights if ".layers.4." in name)
    save_file({name: t for name, t in weights.items() if name != missing},
              folder / "model.safetensors")  # fmt: skip
    with pytest.raises(ConfigError, match=re.escape(missing)):
        model(str(folder), pipeline_parallel_size=2)
