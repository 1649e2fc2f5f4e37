import itertools
import math

import pytest
import torch
from block_fp8 import quantize_block
from torch import Tensor

from negamax.formats.floats import E4M3_BLOCKS
from negamax.formats.tensor_format import TensorFormat
from negamax.kernels.quantize import quantizers
from negamax.kernels.quantize.codes import E2M1_VALUES, Codes
from negamax.kernels.quantize.stored import dequantize, encode
from negamax.quantization.compressed_tensors import INT8_CHANNEL, STRATEGIES, packed

BYTES = torch.arange(256, dtype=torch.uint8)
E4M3 = BYTES.view(torch.float8_e4m3fn).float()
E4M3_NUMBERS = E4M3[E4M3.isfinite()]
E2M1_NUMBERS = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])


def matrix(rows: int, columns: int) -> Tensor:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    values *= torch.logspace(-6, 3, rows).unsqueeze(1)
    values[1] = 0.0
    values[2] = 0.0
    values[2, columns // 2] = -3e-30
    values[3] = torch.arange(columns) % 13 / 2.0 - 3
    return values


QUANTIZERS = {
    "e4m3 blocks": (lambda m: quantizers.to_e4m3(m, (128, 128)), E4M3_NUMBERS),
    "e4m3 rows": (lambda m: quantizers.to_e4m3(m, (1, m.shape[1])), E4M3_NUMBERS),
    "e4m3 to 240": (
        lambda m: quantizers.to_e4m3(m, (1, m.shape[1]), largest=240.0),
        E4M3_NUMBERS[E4M3_NUMBERS.abs() <= 240],
    ),
    "int8 rows": (lambda m: quantizers.to_integers(m, 8, m.shape[1]), torch.arange(-128.0, 128)),
    "int4 groups": (
        lambda m: quantizers.to_integers(m, 4, 32, scale_dtype=torch.bfloat16),
        torch.arange(-8.0, 8),
    ),
    "mxfp8": (lambda m: quantizers.to_e4m3_powers(m, 32), E4M3_NUMBERS),
    "mxfp4": (lambda m: quantizers.to_e2m1_powers(m, 32), E2M1_NUMBERS),
    "nvfp4": (lambda m: quantizers.to_e2m1(m, 16), E2M1_NUMBERS),
}


@pytest.mark.parametrize("name", QUANTIZERS)
def test_every_element_becomes_the_nearest_number_for_its_scale(name: str) -> None:
    quantize, numbers = QUANTIZERS[name]
    plain = matrix(9, 160)
    codes = quantize(plain.clone())
    ones = Codes(
        torch.ones_like(codes.values) if not codes.is_e2m1 else torch.full_like(codes.values, 2),
        codes.scale, codes.block, global_scale=codes.global_scale, is_e2m1=codes.is_e2m1,
    )  # fmt: skip
    step = ones.dequantize().double()
    distance = (plain.double().unsqueeze(2) - step.unsqueeze(2) * numbers.double()).abs()
    best = distance.amin(dim=2)
    found = (codes.dequantize().double() - plain.double()).abs()
    assert codes.dequantize().isfinite().all()
    assert (found <= best * (1 + 1e-5) + plain.abs() * 1e-6).all()
    assert torch.equal(codes.dequantize()[1], torch.zeros(160))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_power_of_two_scales_are_the_smallest_without_clipping(name: str) -> None:
    largest = 448.0 if name == "mxfp8" else 6.0
    plain = torch.zeros(7, 32)
    tops = (largest, largest * 1.0001, largest / 2, 1.0, 1e-20, 3.0e4, largest * 0.9999)
    plain[:, 5] = torch.tensor(tops)
    scale = QUANTIZERS[name][0](plain).scale
    assert scale is not None
    for row, top in zip(scale.float().flatten().tolist(), tops, strict=True):
        assert row == 2.0 ** math.ceil(math.log2(torch.tensor(top).double().item() / largest))


def test_ties_between_fp4_values_go_to_the_even_code() -> None:
    middles = [(a + b) / 2 for a, b in itertools.pairwise(E2M1_VALUES)]
    row = torch.tensor([*middles, 6.0, *(-m for m in middles), -6.0]).repeat(2)[None]
    codes = quantizers.to_e2m1_powers(row, 32).values[0, :16]
    assert codes.tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 8, 10, 10, 12, 12, 14, 14, 15]


def test_fp8_blocks_equal_published_ones() -> None:
    plain = matrix(200, 300)
    values, scale = quantize_block(plain)
    stored = encode(E4M3_BLOCKS, plain)
    assert torch.equal(stored["weight_scale_inv"], scale)
    assert torch.equal(stored["weight"].float(), values.float())


FORMATS = (E4M3_BLOCKS, STRATEGIES["channel"], INT8_CHANNEL, packed(4, 128), packed(8, 32))


@pytest.mark.parametrize("stored", FORMATS, ids=lambda one: one.name)
def test_quantised_tensors_are_stored_as_the_format_says(stored: TensorFormat) -> None:
    plain = matrix(64, 256)
    tensors = encode(stored, plain)
    assert list(tensors) == [tensor.name for tensor in stored.tensors]
    for tensor in stored.tensors:
        found = tensors[tensor.name]
        assert str(found.dtype).removeprefix("torch.") in tensor.dtypes, tensor.name
        assert tuple(found.shape) == tensor.shape((64, 256)), tensor.name
    error = (dequantize(stored, tensors) - plain).norm() / plain.norm()
    assert error < (0.12 if "int4" in stored.element else 0.03)
