"""Sizes that a refusal offers are sizes that are taken."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from negamax.base.errors import ConfigError
from negamax.config.families import bundled_spec
from negamax.parallel.layout import ParallelLayout
from negamax.parallel.split import check_split, possible_splits

M2 = bundled_spec("minimax-m2")


def test_what_is_offered_instead_of_a_refused_size_is_taken() -> None:
    for block in (1, 128):
        for size in range(1, 49):
            try:
                check_split(ParallelLayout(tp=size), M2, block=block)
            except ConfigError as error:
                plain, _, whole = (error.hint or "").partition(", or ")
                assert str(size) not in re.findall(r"\d+", plain)
                offered = [ParallelLayout(tp=int(n)) for n in re.findall(r"\d+", plain)]
                offered += [ParallelLayout(tp=int(n), ep=int(n)) for n in re.findall(r"\d+", whole)]
                assert offered
                for layout in offered:
                    check_split(layout, M2, block=block)


def test_fp8_weights_leave_fewer_sizes_than_dequantised_ones() -> None:
    assert sizes(128) == ([1, 2, 4], [8, 16])
    assert sizes(1) == ([1, 2, 4, 8, 16, 24, 48], [])
    with pytest.raises(ConfigError) as caught:
        check_split(ParallelLayout(tp=8), M2, block=128)
    assert str(caught.value) == (
        "on 8 ranks a rank's share of the experts' width is 192 rows; FP8 weights are cut in "
        "blocks "
        "of 128 (use --tensor-parallel-size 1, 2, 4, or 8, 16 with --enable-expert-parallel)"
    )
    check_split(ParallelLayout(tp=8, ep=2), M2, block=128)


def sizes(block: int) -> tuple[list[int], list[int]]:
    """Numbers of ranks: those that cut experts, and those that only hold them whole."""
    found = list(possible_splits(M2, block=block, most=48))
    return tuple(
        [each.tensor_parallel_size for each in found if each.enable_expert_parallel is whole]
        for whole in (False, True)
    )  # type: ignore[return-value]


def test_a_model_that_no_size_fits_is_sent_to_the_cpu() -> None:
    with pytest.raises(ConfigError, match="use --device cpu"):
        check_split(ParallelLayout(), replace(M2, intermediate_size=1500), block=128)
