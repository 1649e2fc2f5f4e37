import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))

from split_models import answers, check_mixed_run, check_nano, check_nano_m3

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
    check_mixed_run("minimax-m2", options)
