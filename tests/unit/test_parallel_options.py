from dataclasses import replace
from typing import Any

import pytest

from negamax.base.errors import ConfigError
from negamax.options.engine import EngineOptions
from negamax.options.parallel import ParallelOptions
from negamax.parallel.layout import ParallelLayout


@pytest.mark.parametrize(
    ("given", "layout"),
    [
        ({}, (1, 1)),
        ({"tensor_parallel_size": 4}, (4, 1)),
        ({"tensor_parallel_size": 4, "enable_expert_parallel": True}, (4, 4)),
        ({"tensor_parallel_size": 4, "expert_parallel_size": 2}, (4, 2)),
        (
            {"tensor_parallel_size": 4, "enable_expert_parallel": True, "expert_parallel_size": 2},
            (4, 2),
        ),
        ({"enable_expert_parallel": True}, (1, 1)),
        (
            {
                "tensor_parallel_size": 2,
                "prefill_context_parallel_size": 2,
                "enable_expert_parallel": True,
            },
            (2, 4),
        ),
    ],
)
def test_experts_are_split_over_the_given_ranks(
    given: dict[str, Any], layout: tuple[int, int]
) -> None:
    found = ParallelLayout.of(EngineOptions(model="nano", **given).parallel)
    assert (found.tp, found.ep) == layout


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size is 0; allowed: 1 or more"),
        ({"expert_parallel_size": -1}, "--expert-parallel-size is -1; allowed: 1 or more"),
        ({"tensor_parallel_size": 4, "expert_parallel_size": 3}, r"is 4 \(use one of 1, 2, 4\)"),
        ({"tensor_parallel_size": 10**12, "expert_parallel_size": 3}, "8, 16 with --t.* 16"),
        ({"tensor_parallel_size": 6, "expert_parallel_size": 4}, "1, 2, 4 with --t.*-size 4"),
        ({"expert_parallel_size": 2}, r"which is 1 \(use one of 1\)"),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True, "expert_parallel_size": 1},
            "give one of them",
        ),
        ({"data_parallel_size": 0}, "--data-parallel-size is 0; allowed: 1 or more"),
        (
            {"data_parallel_size": 2, "tensor_parallel_size": 2, "expert_parallel_size": 3},
            r"which is 2 in each of 2 data-parallel ranks \(use one of 1, 2\)",
        ),
        ({"pipeline_parallel_size": 0}, "--pipeline-parallel-size is 0; allowed: 1 or more"),
        ({"pipeline_parallel_size": 2, "pp_layer_partition": "3,x"}, "'3,x'; allowed: a number"),
        ({"pipeline_parallel_size": 2, "pp_layer_partition": "3,0"}, "'3,0'; allowed: a number"),
        (
            {"pipeline_parallel_size": 2, "pp_layer_partition": "2,2,2"},
            r"3 stages, --pipeline-parallel-size is 2 \(use --pipeline-parallel-size 3, or 2 num",
        ),
        (
            {"prefill_context_parallel_size": 0},
            "--prefill-context-parallel-size is 0; allowed: 1 or more",
        ),
        (
            {
                "prefill_context_parallel_size": 2,
                "data_parallel_size": 2,
                "expert_parallel_size": 3,
            },
            r"in each of 2 data-parallel ranks in each of 2 context-parallel ranks",
        ),
        (
            {"prefill_context_parallel_size": 2, "expert_parallel_size": 4},
            r"which is 1 in each of 2 context-parallel ranks \(use one of 1",
        ),
        (
            {"decode_context_parallel_size": 2},
            r"it is a part of --tensor-parallel-size, which is 1 \(use .*-parallel-size 1\)",
        ),
        (
            {"decode_context_parallel_size": 5, "tensor_parallel_size": 8},
            r"which is 8 \(use --decode-context-parallel-size 4\)",
        ),
        (
            {
                "decode_context_parallel_size": 2,
                "prefill_context_parallel_size": 2,
                "tensor_parallel_size": 8,
            },
            r"each hold the whole KV cache \(use one of them, with --tensor-parallel-size\)",
        ),
        ({"cp_kv_cache_interleave_size": 0}, "--cp-kv-cache-interleave-size is 0; allowed: 1 or"),
    ],
)
def test_impossible_sizes_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ParallelOptions(**given)


def test_dcp_ranks_hold_whole_blocks() -> None:
    two = ParallelOptions(8, decode_context_parallel_size=2)
    for size in (None, 128):
        replace(two, cp_kv_cache_interleave_size=size).check_interleave(128)
    for size in (1, 64, 256, 100):
        with pytest.raises(ConfigError, match=rf"is {size}, .*whole blocks .*-size 128\)"):
            replace(two, cp_kv_cache_interleave_size=size).check_interleave(128)
    # without DCP any interleave is accepted
    ParallelOptions(8, cp_kv_cache_interleave_size=1).check_interleave(128)
