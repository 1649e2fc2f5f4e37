import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))

from split_models import answers, check_mixed_run, check_nano, check_nano_m3

# the embedded models have two KV heads
FOUR: dict[str, Any] = {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def of_one_rank() -> list[list[int]]:
    return answers()[0]


@pytest.mark.parametrize(
    "options",
    [
        FOUR,
        {**FOUR, "enforce_eager": True},
        {**FOUR, "kv_cache_dtype": "fp8"},
        {**FOUR, "speculative_config": NGRAM},
        {**FOUR, "enable_expert_parallel": True},
    ],
    ids=str,
)
def test_ranks_agree_with_one(of_one_rank: list[list[int]], options: dict[str, Any]) -> None:
    check_nano(of_one_rank, options)


@pytest.mark.parametrize(
    "options",
    [
        FOUR,
        {**FOUR, "index_cache_sharding": "on"},
        {**FOUR, "index_cache_sharding": "on", "kv_cache_dtype": "fp8"},
    ],
    ids=str,
)
def test_nano_m3_agrees_with_one_rank(options: dict[str, Any]) -> None:
    check_nano_m3(options)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("minimax-m3-mxfp8", {"tensor_parallel_size": 8, "decode_context_parallel_size": 2}),
        ("minimax-m3-mxfp8", {"tensor_parallel_size": 8, "decode_context_parallel_size": 2,
                              "index_cache_sharding": "on", "kv_cache_dtype": "fp8"}),
    ],
    ids=str,
)  # fmt: skip
def test_a_long_mixed_run_ends_with_every_block_free(model: str, options: dict[str, Any]) -> None:
    check_mixed_run(model, options, layers=4, blocks=80)
