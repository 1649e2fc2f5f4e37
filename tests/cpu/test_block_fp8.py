import math
from dataclasses import replace

import pytest
import torch
from block_fp8 import quantize_block, scale_shape
from float_layouts import e4m3

from negamax.formats.floats import E4M3_BLOCKS
from negamax.formats.readable import reads_e4m3_blocks
from negamax.kernels.quantize.op import dequantize_block
from negamax.kernels.quantize.stored import dequantize

FP8 = torch.float8_e4m3fn


def test_every_byte_is_read_by_the_definition_of_the_format() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128).view(FP8)
    scale = torch.tensor([[0.25]])
    expected = torch.tensor([0.25 * e4m3(code) for code in range(256)]).view(2, 128)
    torch.testing.assert_close(
        dequantize_block(codes, scale), expected, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 7), (4, 6), (9, 4), (8, 12)])
def test_scale_of_an_element_is_that_of_its_block(rows: int, columns: int) -> None:
    block = (4, 6)
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator).to(FP8)
    scale = torch.rand(-(-rows // 4), -(-columns // 6), generator=generator)
    plain = dequantize_block(weight, scale, block=block)
    for n in range(rows):
        for k in range(columns):
            assert plain[n, k] == weight[n, k].float() * scale[n // 4, k // 6]


def test_a_bfloat16_result_is_rounded_once() -> None:
    weight, scale = quantize_block(
        torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    )
    spread = scale.repeat_interleave(128, dim=1)
    actual = dequantize_block(weight, scale, dtype=torch.bfloat16)
    assert torch.equal(actual, (weight.float() * spread).to(torch.bfloat16))
    assert not torch.equal(actual, weight.to(torch.bfloat16) * spread.to(torch.bfloat16))


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (200, 130), (3, 500)])
def test_quantise_then_dequantise_errs_at_most_half_a_step(rows: int, columns: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    values, scale = quantize_block(weight)
    assert (
        values.dtype == FP8
        and scale.dtype == torch.float32
        and tuple(scale.shape) == scale_shape(rows, columns)
    )
    largest = weight.abs().max().item()
    # Half a step of a normal value is 1/16 of it. Below the smallest normal (2^-6 of the scale),
    # half a step is 2^-10.
    limit = (weight.abs() / 16).clamp_min(largest / 448 * 2**-10) * (1 + 1e-5)
    assert torch.all((dequantize_block(values, scale) - weight).abs() <= limit)


def test_quantising_what_was_dequantised_gives_the_same_weight() -> None:
    weight, scale = quantize_block(
        torch.randn(200, 200, generator=torch.Generator().manual_seed(2))
    )
    plain = dequantize_block(weight, scale)
    torch.testing.assert_close(dequantize_block(*quantize_block(plain)), plain, rtol=1e-6, atol=0)


def test_a_block_of_zeros_stays_zero_and_its_scale_is_one() -> None:
    values, scale = quantize_block(torch.zeros(130, 4))
    assert torch.equal(scale, torch.ones(2, 1))
    assert torch.equal(dequantize_block(values, scale), torch.zeros(130, 4))


@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1e-30, 1e30, 3e38])
def test_extreme_magnitudes_neither_overflow_nor_vanish(magnitude: float) -> None:
    weight = torch.tensor([[magnitude, -magnitude], [0.0, magnitude]])
    plain = dequantize_block(*quantize_block(weight))
    torch.testing.assert_close(plain, weight, rtol=1e-6, atol=2e-38 if magnitude < 1e-35 else 0.0)
    assert torch.isfinite(plain).all()


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_broken_value_makes_its_block_nan_and_no_other(broken: float) -> None:
    weight = torch.ones(4, 8)
    weight[1, 1] = broken
    plain = dequantize_block(*quantize_block(weight, block=(4, 4)), block=(4, 4))
    assert torch.isnan(plain[:, :4]).all()
    assert torch.equal(plain[:, 4:], torch.ones(4, 4))


def test_transformers_reads_the_same_weight() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    values, scale = quantize_block(
        torch.randn(256, 384, generator=torch.Generator().manual_seed(3))
    )
    theirs = Fp8Dequantize(None)._dequantize_one(values, scale)
    torch.testing.assert_close(dequantize_block(values, scale), theirs.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("rows", "columns"), [(2, 128), (1, 1), (129, 300), (256, 256), (0, 128)])
def test_weights_are_dequantised_at_load_as_the_op_defines_to_the_bit(
    rows: int, columns: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    # Include NaN and subnormals.
    codes = (
        torch.arange(rows * columns).remainder(256).to(torch.uint8).view(rows, columns).view(FP8)
    )
    scale = torch.rand(scale_shape(rows, columns), generator=generator) * 1e5
    stored = {"weight": codes, "weight_scale_inv": scale}
    actual, expected = dequantize(E4M3_BLOCKS, stored), dequantize_block(codes, scale)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(
        actual.nan_to_num().view(torch.int32), expected.nan_to_num().view(torch.int32)
    )


def test_format_name_must_include_the_scale() -> None:
    assert reads_e4m3_blocks(E4M3_BLOCKS)
    with pytest.raises(AssertionError, match="'fp8' says no scale"):
        replace(E4M3_BLOCKS, name="fp8")
