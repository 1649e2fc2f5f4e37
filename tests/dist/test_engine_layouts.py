"""Each layout of ranks gives the text of one rank, even after aborts and with small caches."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nano.suites import retrieval, tool_calls
from negamax import LLM, SamplingParams
from negamax.engine.llm import Generation
from negamax.scheduler.chunk_length import EvenTimes
from negamax.scheduler.prefix_cache import BlockHashes
from negamax.scheduler.scheduler import Scheduler
from negamax.scheduler.step import StepPlan
from tests.dist.engines import (
    COMMON,
    PARAMS,
    PROMPTS,
    SHARED,
    SHORT,
    assert_same,
    replace_ranks,
    save_m2,
    save_m3,
)
from tests.e2e.conftest import eventually
from tests.layouts import full, parallel
from tests.loop_driver import admitted, drive, free_all, generate_tokens, read_tokens, token_ids
from tests.ports import free_port
from tests.unit.event_support import shorten, view_of_replay

# With these limits prompts run in chunks.
LIMITS = {"block_size": 4, "max_num_batched_tokens": 48, "max_num_seqs": 8, "max_model_len": 96}
OFTEN = {"step_interval": 10, "window_size": 10}
LAYOUTS = [
    parallel(dp=2, ep=True),
    parallel(pp=3, pp_layer_partition="1,2,1"),
    parallel(pcp=2, tp=2, ep=2),
]
CONFIGS = [{"num_redundant_experts": count, **OFTEN} for count in (2, 4)]
EPLB = [{"enable_eplb": True, "eplb_config": config} for config in CONFIGS]
MORE_LAYOUTS = [
    parallel(dp=2), parallel(dp=4, ep=True), parallel(pp=2), parallel(tp=2), parallel(tp=4, ep=2),
    parallel(pcp=2), parallel(pcp=2, dp=2), parallel(pcp=2, dp=2, ep=2),
    parallel(pcp=2, dp=2, ep=True, **EPLB[1]), parallel(pcp=2, dp=2, pp=2), parallel(pcp=2, pp=2),
    parallel(pcp=4, ep=True), parallel(pcp=2, ep=True, **EPLB[0]), parallel(dp=2, tp=2, ep=2),
    parallel(dp=2, pp=2, ep=True),
    parallel(dp=2, pp=2, tp=2, ep=2, pp_layer_partition="1,3"),
    parallel(pp=2, enable_overlap=False),
]  # fmt: skip


@pytest.fixture(scope="module")
def m2(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_m2(tmp_path_factory.mktemp("m2"))


@pytest.fixture(scope="module")
def m3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_m3(tmp_path_factory.mktemp("m3"))


@pytest.fixture(scope="module")
def one_rank(m2: str) -> Iterator[LLM]:
    with LLM(m2, **COMMON, **LIMITS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(one_rank: LLM) -> list[Generation]:
    return one_rank.generate(PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def expected_shared(one_rank: LLM) -> list[list[int]]:
    return generate_tokens(one_rank, SHARED, SHORT)


@pytest.fixture(scope="module", params=[*LAYOUTS, *map(full, MORE_LAYOUTS)], ids=str)
def ranks(m2: str, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(m2, **COMMON, **LIMITS, **request.param, num_kv_blocks=24) as llm:
        yield llm


def test_text_equals_that_of_one_rank(ranks: LLM, expected: list[Generation]) -> None:
    assert_same(ranks.generate(PROMPTS, PARAMS), expected)
    assert min(rank.generated_tokens for rank in ranks._loop._scheduler.ranks) > 0
    # Another data-parallel rank has one token, or none.
    assert_same(ranks.generate(PROMPTS[5:], PARAMS[5:]), expected[5:])
    assert_same(ranks.generate(PROMPTS[5:6], PARAMS[5:6]), expected[5:6])


def test_preemption_and_prefixes_keep_text(ranks: LLM, expected_shared: list[list[int]]) -> None:
    schedulers = ranks._loop._scheduler.ranks
    prompts = SHARED[: 4 * max(2, len(schedulers))]  # A cache does not hold four of these prompts.
    before = ranks.stats().preemption_count
    made = ranks.generate(prompts, SHORT)
    assert token_ids(made) == expected_shared[: len(prompts)]
    assert made[-1].num_cached_tokens >= 32
    assert ranks.stats().preemption_count > before
    assert ranks.stats().num_kv_blocks == 24 * len(schedulers)


def test_aborts_do_not_change_other_requests(ranks: LLM, expected: list[Generation]) -> None:
    """Reuse the slots and blocks of aborted requests while their tokens are in flight."""
    ranks._loop.reset_prefix_cache()
    requests = admitted(ranks, PROMPTS, PARAMS)
    first = drive(ranks, requests, num_steps=5)
    aborted = [requests[at].request_id for at in (0, 3, 6)]
    ranks._loop.abort(aborted)
    again = admitted(ranks, PROMPTS[3:], PARAMS[3:])
    updates = drive(ranks, again)
    for request, one in zip([*requests, *again], [*expected, *expected[3:]], strict=True):
        own = [*first.get(request.request_id, []), *updates.get(request.request_id, [])]
        if request.request_id in aborted:
            assert own[-1].finish_reason == "abort"
        else:
            assert read_tokens(own) == one.outputs[0].token_ids


@pytest.mark.parametrize(
    "layout",
    [
        parallel(pcp=2),
        full(parallel(pcp=2, dp=2)),
        full(parallel(pp=2, tp=2, pp_layer_partition="1,2")),
        full(parallel(pcp=2, dp=2, ep=True, index_cache_dtype="fp8")),
        full(parallel(dp=2, pp=2, ep=True)),
        full(parallel(dp=2, pp=2, tp=2, ep=2, pp_layer_partition="1,2")),
    ],
    ids=str,
)
def test_m3_text_equals_that_of_one_rank(m3: str, layout: dict[str, Any]) -> None:
    prompts = [[5 + at, 6, 7] * length for at, length in enumerate((20, 10, 10, 20, 20, 10))]
    prompts.append([*prompts[0], 9])
    params = [
        SamplingParams(temperature=at % 2, seed=4, max_tokens=12, ignore_eos=True)
        for at in range(len(prompts))
    ]
    limits = {"block_size": 32, "max_num_batched_tokens": 48, "max_model_len": 96}
    index = {"index_cache_dtype": layout.get("index_cache_dtype", "auto")}
    with LLM(m3, **COMMON, **limits, **index) as llm:
        expected = generate_tokens(llm, prompts, params)
    blocks = 7 if "data_parallel_size" in layout else 10
    with LLM(m3, **COMMON, **limits, num_kv_blocks=blocks, **layout) as llm:
        assert token_ids(llm.generate(prompts, params)) == expected
        assert llm.stats().preemption_count > 0
        assert llm.generate(prompts[-1:], params[-1:])[0].num_cached_tokens >= 32


def tells_content(rank: Scheduler, replay_port: int) -> bool:
    """Return whether the KV events of a rank describe what its cache holds."""
    view = view_of_replay(f"tcp://127.0.0.1:{replay_port}")
    pools = {"GPU": rank._pool, "CPU": rank.host.blocks}
    return view.cached == {name: set(map(shorten, pools[name]._block_of)) for name in pools}


KEEPING = [
    parallel(tp=2),
    full(parallel(dp=2, tp=2, ep=True)),
    full(parallel(pp=2, tp=2, pp_layer_partition="1,2")),
    full(parallel(pcp=2, dp=2)),
]


@pytest.mark.parametrize("layout", [*KEEPING, full(parallel(dp=2, pp=2, ep=True))], ids=str)
def test_blocks_in_main_memory_keep_the_text(m3: str, layout: dict[str, Any]) -> None:
    prompts = [[5 + at, 6, 7, 20 + at] * 17 for at in range(12)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    limits: dict[str, Any] = {"block_size": 32, "max_num_batched_tokens": 48, "max_model_len": 96}
    with LLM(m3, **COMMON, **limits) as llm:
        expected = generate_tokens(llm, prompts, params)
    port = free_port()
    addresses = {"endpoint": port, "replay_endpoint": port + 9}
    events = {name: f"tcp://127.0.0.1:{number}" for name, number in addresses.items()}
    limits |= {"kv_offloading_size": 0.01, "kv_events_config": events | {"publisher": "zmq"}}
    with LLM(m3, **COMMON, **limits, num_kv_blocks=7, **layout) as llm:
        for _ in range(2):
            assert generate_tokens(llm, prompts, params) == expected
        free_all(llm)
        ranks = llm._loop._scheduler.ranks
        assert all(rank.host.num_loaded > 0 for rank in ranks)
        assert llm.stats().num_host_hits == 32 * llm.stats().num_host_loads > 32 * 10
        assert llm.stats().num_used_host_blocks >= 24
        assert eventually(lambda: all(map(tells_content, ranks, range(port + 9, port + 11))))


@pytest.mark.parametrize("layout", KEEPING, ids=str)
def test_blocks_in_files_outlive_the_ranks(m3: str, layout: dict[str, Any], tmp_path: Path) -> None:
    """Check that all ranks compute a block again if one rank has lost it."""
    prompts = [[5 + at, 6, 7, 20 + at] * 17 for at in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    options = {"block_size": 32, "max_model_len": 96, "kv_offloading_size": 0.01, **layout}
    options |= {"kv_offloading_path": str(tmp_path), "kv_offloading_path_size": 0.1}
    with LLM(m3, **COMMON, **options) as llm:
        expected = generate_tokens(llm, prompts, params)
    folders = list(tmp_path.iterdir())
    assert len(folders) == len(llm._loop.executor._dp_ranks) // layout.get("data_parallel_size", 1)
    (folders[-1] / BlockHashes(prompts[0], block_size=32, salt="")[1].hex()).unlink()
    with LLM(m3, **COMMON, **options) as llm:
        again = llm.generate(prompts, params)
        assert token_ids(again) == expected
        assert [one.num_cached_tokens for one in again] == [32] + [64] * 5
        stats = llm.stats()
        assert stats.num_file_reads == 11 and stats.num_file_errors == 0
        free_all(llm)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [parallel(dp=2), parallel(dp=2, tp=2, ep=True), parallel(pcp=2, tp=2, ep=True)],
    ids=str,
)  # fmt: skip
def test_embedded_m3_gives_the_same_text(layout: dict[str, Any]) -> None:
    """Check a shared expert among the others, long prompts and FP8 index keys."""
    chats = [*retrieval.problems("2k", 1, 5), *tool_calls.problems(2, 5)]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    texts = []
    for ranks in ({}, layout):
        options = {"max_num_batched_tokens": 600, "index_cache_dtype": "fp8", **ranks}
        with LLM("nano-m3", **COMMON, **options) as llm:
            rendered = [llm.render(list(c.messages), tools=list(c.tools) or None) for c in chats]
            prompts = [llm.tokenizer.encode(text) for text in rendered]
            first = generate_tokens(llm, prompts, params)
            again = llm.generate([[*prompts[0], prompts[0][-1]]], params)
            assert again[0].num_cached_tokens > 1000
            texts.append([*first, *token_ids(again)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("layout", [parallel(pcp=2), full(parallel(pcp=2, dp=2))], ids=str)
def test_each_context_rank_computes_half_of_a_prompt(
    m2: str, layout: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COUNTED_TOKENS", str(tmp_path))
    replace_ranks(monkeypatch, "counting")
    with LLM(m2, **COMMON, **LIMITS, **layout) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1)
        llm.generate([PROMPTS[0], PROMPTS[0][1:], PROMPTS[0][2:]], params)
        ranks = llm._loop._scheduler.ranks
        computed = [rank.prompt_tokens - rank.cached_prompt_tokens for rank in ranks]
    for rank in range(2 * len(computed)):
        steps = map(int, (tmp_path / str(rank)).read_text().split())
        # Both ranks run generated tokens, and pieces that are too short to split.
        own = sum(tokens for tokens in steps if tokens > 3)
        assert 0.4 * computed[rank // 2] < own < 0.6 * computed[rank // 2]


@pytest.mark.full
def test_chunks_of_equal_time_keep_the_text(
    m2: str, expected: list[Generation], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(m2, **COMMON, **LIMITS, pipeline_parallel_size=2) as llm:
        scheduler = llm._loop._scheduler
        (rank,) = scheduler.ranks
        length = EvenTimes(16, 16, (1.0, 1.5, 2.0, 3.0))
        monkeypatch.setattr(rank, "limits", replace(rank.limits, chunk_length=length))
        chunks, plan = list[int](), scheduler.plan

        def noted() -> list[StepPlan] | None:
            plans = plan()
            chunks.extend(n for each in plans or () for n in each.num_scheduled if n > 1)
            return plans

        monkeypatch.setattr(scheduler, "plan", noted)
        assert_same(llm.generate(PROMPTS, PARAMS), expected)
    assert chunks[:2] == [48, 16]  # These are the chunks of a prompt of 80 tokens.
