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

from split_models import answers, check_nano, check_nano_m3, skip_without

from negamax import LLM, SamplingParams
from negamax.engine.core.executor import MultiProcessExecutor

STAGES: list[dict[str, Any]] = [
    {"pipeline_parallel_size": 2, "enforce_eager": True},
    {"pipeline_parallel_size": 2},
    {"pipeline_parallel_size": 2, "max_num_batched_tokens": 48},
    {"pipeline_parallel_size": 4},
    {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2, "data_parallel_size": 2},
    {"pipeline_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
    {"pipeline_parallel_size": 2, "speculative_config": {"method": "ngram"}},
    {"pipeline_parallel_size": 4, "speculative_config": {"model": "nano-draft"}},
]


@pytest.fixture(scope="module")
def of_one_gpu() -> list[list[int]]:
    return answers()[0]


@pytest.mark.parametrize("options", STAGES, ids=str)
def test_stages_agree_with_one_gpu(of_one_gpu: list[list[int]], options: dict[str, Any]) -> None:
    check_nano(of_one_gpu, options)


@pytest.mark.parametrize("options", [STAGES[1], STAGES[4], STAGES[6]], ids=str)
def test_nano_m3_agrees_with_one_gpu(options: dict[str, Any]) -> None:
    check_nano_m3(options)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_stage_leaves_nobody_waiting(victim: int) -> None:
    options = {"pipeline_parallel_size": 2}
    skip_without(options)
    llm = LLM("nano", device="cuda", max_num_seqs=8, max_model_len=2048, **options)
    executor = llm._loop.executor
    assert isinstance(executor, MultiProcessExecutor)
    process = executor._processes[victim]
    threading.Timer(0.5, os.kill, (process.pid, signal.SIGKILL)).start()
    sampling = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
    with contextlib.suppress(Exception):
        llm.generate([[5, 6, 7]] * 8, sampling)
    began = time.monotonic()
    llm.shutdown()
    seconds = time.monotonic() - began
    print(f"the ranks ended after {seconds:.2f} s: {[p.exit_code for p in executor._processes]}")
    assert all(child.exit_code is not None for child in executor._processes)
    assert seconds < 8  # the survivor may need five more until it is killed
