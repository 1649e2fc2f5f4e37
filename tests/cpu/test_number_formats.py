import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from m2_checkpoints import quantize_block, scale_shape
from stored_formats import FLOATS, e4m3, e4m3_fnuz
from torch import Tensor

from negamax.config.quantization import QuantizationSpec
from negamax.formats.floats import E4M3_BLOCKS
from negamax.formats.readable import reads_e4m3_blocks
from negamax.formats.tensor_format import Axis, TensorFormat
from negamax.kernels.quantize import quantizers
from negamax.kernels.quantize.codes import E2M1_VALUES
from negamax.kernels.quantize.stored import dequantize, encode
from negamax.layers.weights import MatrixWeight
from negamax.quantization.compressed_tensors import INT8_CHANNEL, STRATEGIES, packed
from negamax.quantization.detect import detect
from negamax.quantization.online import convert_to_blocks
from negamax.quantization.scheme import Scheme, WeightFormat

FP8 = torch.float8_e4m3fn


def noise(seed: int, rows: int = 136, columns: int = 160) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


# --- stored float formats -------------------------------------------------------------------------

MODULE = "model.layers.0.block_sparse_moe.experts.1.w1"


def format_of(name: str) -> TensorFormat:
    fields = FLOATS[name].describe([MODULE], {})
    scheme = detect(QuantizationSpec(fields.get("quant_method", "modelopt"), fields))
    assert scheme is not None
    return scheme.format_of(MODULE)


# Other descriptions need names of modules, or headers of files.
FORMATS = {
    name: format_of(name) for name in FLOATS if name not in ("modelopt-mixed", "fp8-fnuz-dtype")
}


def kept(stored: TensorFormat, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {t.name: tensors[t.name] for t in stored.tensors if t.is_kept}


@pytest.mark.parametrize("name", FORMATS)
def test_stored_bytes_dequantize_to_their_matrix(name: str) -> None:
    stored, plain = FORMATS[name], noise(1)
    tensors, expected = FLOATS[name].store(MODULE, plain)
    assert {t.name: t.shape(plain.shape) or (1,) for t in stored.tensors} == {
        key: tuple(tensor.shape) or (1,) for key, tensor in tensors.items()
    }
    got = dequantize(stored, kept(stored, tensors))
    assert got.dtype == torch.float32
    assert torch.allclose(got, expected, rtol=1e-6, atol=0)
    assert (got - plain).abs().max() < plain.abs().max() / 6  # The writer is accurate.


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.unit(Axis.ROWS) == 1])
def test_fused_matrices_dequantize_like_single_ones(name: str) -> None:
    stored = FORMATS[name]
    scheme = Scheme((stored,), lambda module: stored)
    weights = WeightFormat(torch.float32, torch.device("cpu"), scheme)
    rows, columns = 8, 64
    held = MatrixWeight((2, 2 * rows, columns), stored, weights=weights)
    expected = torch.empty(2, 2 * rows, columns)
    for expert, (part, first) in itertools.product(range(2), enumerate((0, rows))):
        plain = noise(2 * expert + part, rows, columns) * 10.0**expert
        tensors, _ = FLOATS[name].store(MODULE, plain)
        expected[expert, first : first + rows] = dequantize(stored, kept(stored, tensors))
        region = (range(rows), range(columns))
        for slot in held.slots("x.weight", (rows, columns), region=region, at=(expert, first)):
            tensor = tensors.get(slot.name.removeprefix("x."))
            assert tensor is not None
            if slot.needed:
                slot.write(tensor.reshape(slot.shape))
    weight = held.take()
    assert torch.equal(dequantize(weight.format, weight.tensors), expected)


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.rounding is not None])
def test_quantizer_writes_the_published_layout(name: str) -> None:
    stored, plain = FORMATS[name], noise(2)
    theirs = kept(stored, FLOATS[name].store(MODULE, plain)[0])
    tensors = dict(encode(stored, plain))
    assert {key: (t.shape or (1,)) for key, t in tensors.items()} == {
        key: (t.shape or (1,)) for key, t in theirs.items()
    }
    error, other = (
        (dequantize(stored, each) - plain).norm() / plain.norm() for each in (tensors, theirs)
    )
    assert float(error) == pytest.approx(float(other), rel=0.02)


def test_scales_are_read_in_each_dtype_as_transformers_reads_them() -> None:
    tensors, _ = FLOATS["mxfp8"].store(MODULE, noise(3))
    other = {**tensors, "weight_scale_inv": tensors["weight_scale_inv"].view(torch.float8_e8m0fnu)}
    assert torch.equal(*(dequantize(FORMATS["mxfp8"], each) for each in (tensors, other)))
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    stored = encode(E4M3_BLOCKS, noise(3, 256, 384))
    theirs = Fp8Dequantize(None)._dequantize_one(stored["weight"], stored["weight_scale_inv"])
    torch.testing.assert_close(dequantize(E4M3_BLOCKS, stored), theirs.float(), rtol=1e-6, atol=0)
    assert reads_e4m3_blocks(E4M3_BLOCKS)
    with pytest.raises(AssertionError, match="'fp8' names no scale"):
        replace(E4M3_BLOCKS, name="fp8")


@pytest.mark.parametrize(
    ("name", "dtype", "number"),
    [
        ("fp8-fnuz", torch.float8_e4m3fnuz, e4m3_fnuz),
        ("fp8-fnuz", FP8, e4m3_fnuz),
        ("fp8-block", FP8, e4m3),
    ],
)
def test_each_byte_is_read(name: str, dtype: torch.dtype, number: Callable[[int], float]) -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    expected = torch.tensor([2 * number(byte) for byte in range(256)]).reshape(16, 16)
    tensors = {"weight": codes.view(dtype), "weight_scale_inv": torch.full((1, 1), 2.0)}
    got = dequantize(FORMATS[name], tensors)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


# --- FP8 blocks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(2, 128), (1, 1), (129, 300), (256, 256), (0, 128)])
def test_load_multiplies_values_by_scales_to_the_bit(rows: int, columns: int) -> None:
    # The codes include NaN and subnormal numbers.
    codes = torch.arange(rows * columns).remainder(256).to(torch.uint8).view(rows, columns)
    scale = torch.rand(scale_shape(rows, columns)) * 1e5
    stored = {"weight": codes.view(FP8), "weight_scale_inv": scale}
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    actual, expected = dequantize(E4M3_BLOCKS, stored), codes.view(FP8).float() * spread
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


# --- quantizers -----------------------------------------------------------------------------------

E4M3_NUMBERS = torch.arange(256, dtype=torch.uint8).view(FP8).float()
E4M3_NUMBERS = E4M3_NUMBERS[E4M3_NUMBERS.isfinite()]
E2M1_NUMBERS = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])


def matrix(rows: int, columns: int) -> Tensor:
    """Return rows of very different magnitude, a row of zeros, a tiny number and ties."""
    values = noise(rows, rows, columns)
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
    ones = torch.full_like(codes.values, 2 if codes.is_e2m1 else 1)
    step = replace(codes, values=ones).dequantize().double()
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


@pytest.mark.parametrize("largest", [224.1, 448.0, 1e-20])
@pytest.mark.parametrize("spread", [0, 9, 14, 30])
def test_mxfp8_as_blocks_changes_less_than_the_stated_bound(spread: int, largest: float) -> None:
    """Make all other rows 2^spread times smaller than the first value of their block."""
    plain = noise(0, 256, 384) / 8 * largest
    plain[1:] *= 2.0**-spread
    plain[::128, ::128] = largest
    blocks = convert_to_blocks(Scheme.uniform(FORMATS["mxfp8"], ())).formats[0]
    tensors = encode(FORMATS["mxfp8"], plain)
    stored = dequantize(FORMATS["mxfp8"], tensors)
    found = dequantize(blocks, encode(blocks, stored.clone()))
    tops = stored.abs().unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).amax((1, 3), keepdim=True)
    change = (found - stored).unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).abs()
    assert (change <= 2**-17.8 * tops).all()
    assert (found - stored).norm() < 5.6e-4 * stored.norm()
    assert spread > 9 or (found - stored)[1:].norm() < 1e-3 * stored[1:].norm()


def test_ties_between_fp4_values_go_to_the_even_code() -> None:
    middles = [(a + b) / 2 for a, b in itertools.pairwise(E2M1_VALUES)]
    row = torch.tensor([*middles, 6.0, *(-m for m in middles), -6.0]).repeat(2)[None]
    codes = quantizers.to_e2m1_powers(row, 32).values[0, :16]
    assert codes.tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 8, 10, 10, 12, 12, 14, 14, 15]


@pytest.mark.parametrize("factor", [1.0, 0.0, 1e-42, 1e-30, 1e30])
def test_fp8_blocks_equal_published_ones(factor: float) -> None:
    """Check numbers from a block of zeros, whose scale is 1, to the largest ones."""
    plain = matrix(200, 300) * factor
    values, scale = quantize_block(plain)
    stored = encode(E4M3_BLOCKS, plain)
    assert torch.equal(stored["weight_scale_inv"], scale)
    assert torch.equal(stored["weight"].float(), values.float())
    assert dequantize(E4M3_BLOCKS, stored).isfinite().all()
    assert factor or torch.equal(scale, torch.ones_like(scale))


@pytest.mark.parametrize(
    "stored",
    (E4M3_BLOCKS, STRATEGIES["channel"], INT8_CHANNEL, packed(4, 128), packed(8, 32)),
    ids=lambda one: one.name,
)
def test_quantized_tensors_are_stored_as_described(stored: TensorFormat) -> None:
    plain = matrix(64, 256)
    tensors = encode(stored, plain)
    assert list(tensors) == [tensor.name for tensor in stored.tensors]
    for tensor in stored.tensors:
        found = tensors[tensor.name]
        assert str(found.dtype).removeprefix("torch.") in tensor.dtypes, tensor.name
        assert tuple(found.shape) == tensor.shape((64, 256)), tensor.name
    error = (dequantize(stored, tensors) - plain).norm() / plain.norm()
    assert error < (0.12 if "int4" in stored.element else 0.03)
