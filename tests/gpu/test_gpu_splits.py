import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))

from test_gpu_engine import (
    AGREEMENT,
    GREEDY,
    agreement,
    answers_of_m3,
    mixed_run,
    plain_answers_of_m3,
    prompts,
    skip_without,
)

from negamax import LLM, SamplingParams
from negamax.engine.core.executor import MultiProcessExecutor
from negamax.engine.core.setup import start_loop
from negamax.options.engine import EngineOptions
from tests.layouts import parallel

BALANCING = {"step_interval": 8, "window_size": 8, "num_redundant_experts": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
DATA = [
    parallel(dp=2),
    parallel(dp=2, ep=True),
    parallel(dp=2, ep=True, enforce_eager=True),
    parallel(dp=2, max_num_batched_tokens=48),
    parallel(dp=4, ep=True),
    parallel(dp=2, tp=2, expert_parallel_size=2),
    parallel(dp=2, ep=True, enable_eplb=True, eplb_config=BALANCING),
]
CONTEXT = [
    parallel(pcp=2), parallel(pcp=2, enforce_eager=True), parallel(pcp=2, kv_cache_dtype="fp8"),
    parallel(pcp=4, ep=True), parallel(pcp=2, tp=2, expert_parallel_size=2), parallel(pcp=2, pp=2),
    parallel(pcp=2, dp=2, ep=True), parallel(pcp=2, dp=2, all2all_backend="one_sided"),
]  # fmt: skip
STAGES = [
    parallel(pp=2, enforce_eager=True), parallel(pp=2), parallel(pp=2, max_num_batched_tokens=48),
    parallel(pp=4), parallel(pp=2, tp=2), parallel(pp=2, dp=2), parallel(pp=2, dp=2, ep=True),
    parallel(pp=2, speculative_config={"method": "ngram"}),
    parallel(pp=4, speculative_config={"model": "nano-draft"}),
]  # fmt: skip
# The built-in models have two KV heads.
CACHE_SHARDS = [
    parallel(tp=4, dcp=2),
    parallel(tp=4, dcp=2, enforce_eager=True),
    parallel(tp=4, dcp=2, kv_cache_dtype="fp8"),
    parallel(tp=4, dcp=2, speculative_config=NGRAM),
    parallel(tp=4, dcp=2, ep=True),
]
OF_M3 = [
    *(DATA[at] for at in (0, 1, 4, 5, 6)),
    *(CONTEXT[at] for at in (0, 3, 4, 6)),
    *(STAGES[at] for at in (1, 4, 6)),
    CACHE_SHARDS[0],
    parallel(tp=4, dcp=2, index_cache_sharding="on"),
    parallel(tp=4, dcp=2, index_cache_sharding="on", kv_cache_dtype="fp8"),
]
MIXED = [
    *(("minimax-m2", DATA[at]) for at in (1, 4, 5, 6)),
    *(("minimax-m2", CONTEXT[at]) for at in (0, 3, 4, 6)),
    ("minimax-m3-mxfp8", parallel(tp=8, dcp=2)),
    ("minimax-m3-mxfp8", parallel(tp=8, dcp=2, index_cache_sharding="on", kv_cache_dtype="fp8")),
]


def answers(**options: Any) -> tuple[list[list[int]], list[list[int]]]:
    with LLM("nano", device="cuda", **options) as llm:
        asked = prompts(llm)
        together = [each.outputs[0].token_ids for each in llm.generate(asked, GREEDY)]
        time.sleep(0.5)  # Stages receive tensors in flight even without a plan.
        alone = [llm.generate(each, GREEDY)[0].outputs[0].token_ids for each in asked[:3]]
        if not options.get("enforce_eager"):
            assert "CUDA graphs" in llm.info.memory
        return together, alone


@pytest.fixture(scope="module")
def of_one_gpu() -> list[list[int]]:
    return answers()[0]


@pytest.mark.parametrize("options", [*DATA, *CONTEXT, *STAGES, *CACHE_SHARDS], ids=str)
def test_ranks_agree_with_one(of_one_gpu: list[list[int]], options: dict[str, Any]) -> None:
    skip_without(options)
    together, alone = answers(**options)
    share = agreement(of_one_gpu, together)
    print(f"agreement of {options} with one GPU: {share:.4f}")
    assert share >= AGREEMENT
    assert agreement(of_one_gpu[:3], alone) >= 0.9  # The text has a few hundred tokens.


@pytest.mark.parametrize("options", OF_M3, ids=str)
def test_nano_m3_agrees_with_one_gpu(options: dict[str, Any]) -> None:
    skip_without(options)
    share = agreement(plain_answers_of_m3("cuda"), answers_of_m3(device="cuda", **options))
    print(f"agreement of nano-m3 on {options} with one GPU: {share:.4f}")
    assert share >= AGREEMENT


@pytest.mark.parametrize(("model", "options"), MIXED, ids=str)
def test_a_long_mixed_run_ends_with_every_block_free(model: str, options: dict[str, Any]) -> None:
    skip_without(options)
    layers, blocks = (2, 160) if model == "minimax-m2" else (4, 80)
    sizes = {"max_model_len": 8320, "num_kv_blocks": blocks, "max_num_seqs": 64}
    drawn = {"load_format": "synthetic", "num_hidden_layers": layers, "device": "cuda"}
    loop, info = start_loop(EngineOptions(model, **drawn, **sizes, **options))
    try:
        mixed_run(loop, longest=min(8000, info.max_model_len - 301))
    finally:
        loop.shutdown()


def test_a_seed_gives_the_same_text_on_either_rank() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=40, seed=11, ignore_eos=True)
    skip_without(DATA[1])
    with LLM("nano", device="cuda", **DATA[1]) as llm:
        prompt = prompts(llm)[0]
        texts = [each.outputs[0].token_ids for each in llm.generate([prompt] * 4, params)]
        assert min(rank.generated_tokens for rank in llm._loop._scheduler.ranks) > 0
    for text in texts[1:]:
        same = sum(a == b for a, b in zip(texts[0], text, strict=True))
        assert same >= 36  # Rounding at another batch size may change a token near a tie.


@pytest.mark.parametrize(
    ("options", "victim", "most_seconds"),
    [
        (parallel(tp=2), 1, 3.0),
        # The survivor may need five more seconds until it is killed.
        (STAGES[1], 0, 8.0),
        (STAGES[1], 1, 8.0),
    ],
    ids=str,
)
def test_killed_rank_ends_others(options: dict[str, Any], victim: int, most_seconds: float) -> None:
    skip_without(options)
    llm = LLM("nano", device="cuda", max_num_seqs=8, max_model_len=2048, **options)
    executor = llm._loop.executor
    assert isinstance(executor, MultiProcessExecutor)
    ranks = executor._processes
    threading.Timer(0.5, os.kill, (ranks[victim].pid, signal.SIGKILL)).start()
    sampling = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
    with contextlib.suppress(Exception):
        llm.generate([[5, 6, 7]] * 8, sampling)
    began = time.monotonic()
    llm.shutdown()
    seconds = time.monotonic() - began
    print(f"the ranks ended after {seconds:.2f} s: {[each.exit_code for each in ranks]}")
    assert all(each.exit_code is not None for each in ranks) and seconds < most_seconds
    if "tensor_parallel_size" in options:
        assert ranks[1 - victim].exit_code == 1  # The survivor ended without being killed.
