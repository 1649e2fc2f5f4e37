from dataclasses import replace
from typing import Any

import pytest

from negamax.base.errors import ConfigError
from negamax.options.engine import EngineOptions
from negamax.options.parallel import ParallelOptions
from negamax.parallel.layout import ParallelLayout

NAMES = {
    "tp": "tensor_parallel_size", "ep": "expert_parallel_size", "dp": "data_parallel_size",
    "pp": "pipeline_parallel_size", "pcp": "prefill_context_parallel_size",
    "dcp": "decode_context_parallel_size", "whole": "enable_expert_parallel",
    "layers": "pp_layer_partition", "interleave": "cp_kv_cache_interleave_size",
}  # fmt: skip


def options(**short: Any) -> dict[str, Any]:
    return {NAMES[name]: value for name, value in short.items()}


@pytest.mark.parametrize(
    ("given", "layout"),
    [
        ({}, (1, 1)),
        (options(tp=4), (4, 1)),
        (options(tp=4, whole=True), (4, 4)),
        (options(tp=4, ep=2), (4, 2)),
        (options(tp=4, whole=True, ep=2), (4, 2)),
        (options(whole=True), (1, 1)),
        (options(tp=2, pcp=2, whole=True), (2, 4)),
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
        (options(tp=0), "--tensor-parallel-size is 0; allowed: 1 or more"),
        (options(ep=-1), "--expert-parallel-size is -1; allowed: 1 or more"),
        (options(tp=4, ep=3), r"is 4 \(use one of 1, 2, 4\)"),
        (options(tp=1000000000000, ep=3), "8, 16 with --t.* 16"),
        (options(tp=6, ep=4), "1, 2, 4 with --t.*-size 4"),
        (options(ep=2), r"which is 1 \(use one of 1\)"),
        (options(tp=2, whole=True, ep=1), "give one of them"),
        (options(dp=0), "--data-parallel-size is 0; allowed: 1 or more"),
        (
            options(dp=2, tp=2, ep=3),
            r"which is 2 in each of 2 data-parallel ranks \(use one of 1, 2\)",
        ),
        (options(pp=0), "--pipeline-parallel-size is 0; allowed: 1 or more"),
        (options(pp=2, layers="3,x"), "'3,x'; allowed: a number"),
        (options(pp=2, layers="3,0"), "'3,0'; allowed: a number"),
        (
            options(pp=2, layers="2,2,2"),
            r"3 stages, --pipeline-parallel-size is 2 \(use --pipeline-parallel-size 3, or 2 num",
        ),
        (options(pcp=0), "--prefill-context-parallel-size is 0; allowed: 1 or more"),
        (
            options(pcp=2, dp=2, ep=3),
            r"in each of 2 data-parallel ranks in each of 2 context-parallel ranks",
        ),
        (options(pcp=2, ep=4), r"which is 1 in each of 2 context-parallel ranks \(use one of 1"),
        (
            options(dcp=2),
            r"it is a part of --tensor-parallel-size, which is 1 \(use .*-parallel-size 1\)",
        ),
        (options(dcp=5, tp=8), r"which is 8 \(use --decode-context-parallel-size 4\)"),
        (
            options(dcp=2, pcp=2, tp=8),
            r"each hold the whole KV cache \(use one of them, with --tensor-parallel-size\)",
        ),
        (options(interleave=0), "--cp-kv-cache-interleave-size is 0; allowed: 1 or"),
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
