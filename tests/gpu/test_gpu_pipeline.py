"""Pipeline stages on GPUs: whole steps of a stage as graphs, what goes between stages by NCCL; the
answers are those of one GPU.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

from test_gpu_engine import AGREEMENT, GREEDY, agreement, answers_of_m3, prompts

from negamax import LLM, SamplingParams
from negamax.engine.core.executor import MultiProcessExecutor

STAGES: list[dict[str, Any]] = [
    {"pipeline_parallel_size": 2, "enforce_eager": True},
    {"pipeline_parallel_size": 2},
    {"pipeline_parallel_size": 2, "max_num_batched_tokens": 48},
    {"pipeline_parallel_size": 4},
    {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
]


def skip_without(options: dict[str, Any]) -> None:
    needed = options["pipeline_parallel_size"] * options.get("tensor_parallel_size", 1)
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} GPUs")


def answers(**options: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Of many requests at a time, and of some that are alone."""
    with LLM("nano", device="cuda", **options) as llm:
        asked = prompts(llm)
        together = [each.outputs[0].token_ids for each in llm.generate(asked, GREEDY)]
        time.sleep(0.5)  # without a plan: what is on its way is received
        alone = [llm.generate(each, GREEDY)[0].outputs[0].token_ids for each in asked[:3]]
        if not options.get("enforce_eager"):
            assert "CUDA graphs" in llm.info.memory
        return together, alone


@pytest.fixture(scope="module")
def of_one_gpu() -> list[list[int]]:
    return answers()[0]


@pytest.mark.parametrize("options", STAGES, ids=str)
def test_stages_agree_with_one_gpu(of_one_gpu: list[list[int]], options: dict[str, Any]) -> None:
    skip_without(options)
    together, alone = answers(**options)
    share = agreement(of_one_gpu, together)
    print(f"agreement of {options} with one GPU: {share:.4f}")
    assert share >= AGREEMENT
    assert agreement(of_one_gpu[:3], alone) >= 0.9  # a few hundred tokens


@pytest.mark.parametrize("options", [STAGES[1], STAGES[4]], ids=str)
def test_nano_m3_agrees_with_one_gpu(options: dict[str, Any]) -> None:
    skip_without(options)
    share = agreement(answers_of_m3(device="cuda"), answers_of_m3(device="cuda", **options))
    print(f"agreement of nano-m3 on {options} with one GPU: {share:.4f}")
    assert share >= AGREEMENT


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_stage_leaves_nobody_waiting(victim: int) -> None:
    options = {"pipeline_parallel_size": 2}
    skip_without(options)
    llm = LLM("nano", device="cuda", max_num_seqs=8, max_model_len=2048, **options)
    executor = llm._loop._executor
    assert isinstance(executor, MultiProcessExecutor)
    process = executor._processes[victim]
    threading.Timer(0.5, os.kill, (process.pid, signal.SIGKILL)).start()
    sampling = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
    with contextlib.suppress(Exception):
        llm.generate([[5, 6, 7]] * 8, sampling)
    began = time.monotonic()
    llm.shutdown()
    seconds = time.monotonic() - began
    print(f"the ranks ended after {seconds:.2f} s: {[p.returncode for p in executor._processes]}")
    assert all(child.poll() is not None for child in executor._processes)
    assert seconds < 8  # the survivor may have to be killed, after five
