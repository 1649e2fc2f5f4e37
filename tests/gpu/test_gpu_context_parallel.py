"""Context-parallel ranks on GPUs: prompts shared out kernel by kernel, keys and values gathered by
NCCL, decodes as graphs on every rank; the answers are those of one rank. Also beside data-parallel
ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))

from split_models import answers, check_nano, check_nano_m3, skip_without
from test_gpu_engine import _mixed_run

from negamax.config.options import EngineOptions
from negamax.engine.core.setup import start_loop

RANKS: list[dict[str, Any]] = [
    {"prefill_context_parallel_size": 2},
    {"prefill_context_parallel_size": 2, "enforce_eager": True},
    {"prefill_context_parallel_size": 2, "kv_cache_dtype": "fp8"},
    {"prefill_context_parallel_size": 4, "enable_expert_parallel": True},
    {"prefill_context_parallel_size": 2, "tensor_parallel_size": 2, "expert_parallel_size": 2},
    {"prefill_context_parallel_size": 2, "pipeline_parallel_size": 2},
    {"prefill_context_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
    {"prefill_context_parallel_size": 2, "data_parallel_size": 2, "all2all_backend": "one_sided"},
]


@pytest.fixture(scope="module")
def of_one_rank() -> list[list[int]]:
    return answers()[0]


@pytest.mark.parametrize("options", RANKS, ids=str)
def test_ranks_agree_with_one(of_one_rank: list[list[int]], options: dict[str, Any]) -> None:
    check_nano(of_one_rank, options)


@pytest.mark.parametrize("options", [RANKS[0], RANKS[3], RANKS[4], RANKS[6]], ids=str)
def test_nano_m3_agrees_with_one_rank(options: dict[str, Any]) -> None:
    check_nano_m3(options)


@pytest.mark.parametrize("options", [RANKS[0], RANKS[3], RANKS[4], RANKS[6]], ids=str)
def test_a_long_mixed_run_ends_with_every_block_free(options: dict[str, Any]) -> None:
    """M2's own kernels and sizes, two layers: prompts of up to 8,000 tokens beside short ones,
    preemptions, aborts.
    """
    skip_without(options)
    sizes = {"max_model_len": 8320, "num_kv_blocks": 160, "max_num_seqs": 64}
    model = {"load_format": "synthetic", "num_hidden_layers": 2, "device": "cuda"}
    loop, info = start_loop(EngineOptions("minimax-m2", **model, **sizes, **options))
    try:
        _mixed_run(loop, longest=min(8000, info.max_model_len - 301))
    finally:
        loop.shutdown()
