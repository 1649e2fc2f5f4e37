"""Sizes that a refusal offers are sizes that are taken."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from negamax.base.errors import ConfigError
from negamax.config.families import bundled_spec
from negamax.parallel.layout import ParallelLayout
from negamax.parallel.split import check_split, tensor_parallel_sizes

M2 = bundled_spec("minimax-m2")


def test_what_is_offered_instead_of_a_refused_size_is_taken() -> None:
    for block in (1, 128):
        for size in range(1, 49):
            try:
                check_split(ParallelLayout(tp=size), M2, block=block)
            except ConfigError as error:
                offered = [int(number) for number in re.findall(r"\d+", error.hint or "")]
                assert offered and size not in offered
                for other in offered:
                    check_split(ParallelLayout(tp=other), M2, block=block)


def test_fp8_weights_leave_fewer_sizes_than_dequantised_ones() -> None:
    assert list(tensor_parallel_sizes(M2, block=128, most=48)) == [1, 2, 4]
    assert list(tensor_parallel_sizes(M2, most=48)) == [1, 2, 4, 8, 16, 24, 48]
    with pytest.raises(ConfigError) as caught:
        check_split(ParallelLayout(tp=8), M2, block=128)
    assert str(caught.value) == (
        "on 8 ranks a rank's share of the experts' width is 192 rows; FP8 weights are cut in "
        "blocks "
        "of 128 (use --tensor-parallel-size 1, 2, 4)"
    )


def test_a_model_that_no_size_fits_is_sent_to_the_cpu() -> None:
    with pytest.raises(ConfigError, match="use --device cpu"):
        check_split(ParallelLayout(), replace(M2, intermediate_size=1500), block=128)
