import pytest
import torch
from float_layouts import LAYOUTS, e4m3_fnuz
from torch import Tensor

from negamax.formats import floats as formats
from negamax.formats.floats import E4M3_GROUP
from negamax.formats.tensor_format import ONE, ROWS, Axis, Dim, TensorFormat
from negamax.kernels.quantize.stored import dequantize, encode
from negamax.layers.weights import MatrixWeight
from negamax.quantization.scheme import Scheme, WeightFormat

CPU = torch.device("cpu")
_BLOCKS = Dim(Axis.ROWS, E4M3_GROUP), Dim(Axis.COLUMNS, E4M3_GROUP)
BLOCK = "fp8_e4m3_block_128x128"
FORMATS = {
    "modelopt-nvfp4": formats.nvfp4(input_scale="input_scale"),
    "modelopt-mxfp8": formats.mxfp8(),
    "modelopt-fp8": formats.fp8("fp8_e4m3_tensor", (ONE,), input_scale="input_scale"),
    "modelopt-fp8-channel": formats.fp8("fp8_e4m3_channel", (ROWS,)),
    "modelopt-fp8-block": formats.fp8(BLOCK, (_BLOCKS[0], ONE, _BLOCKS[1], ONE)),
    "mxfp8": formats.mxfp8(scale_name="weight_scale_inv"),
    "quark-mxfp4": formats.mxfp4(),
    "compressed-nvfp4": formats.nvfp4(
        values="weight_packed", global_scale="weight_global_scale", divides=True,
        input_scale="input_global_scale",
    ),
    "compressed-mxfp4": formats.mxfp4(values="weight_packed"),
    "fp8-fnuz": formats.fp8(BLOCK, _BLOCKS, scale_name="weight_scale_inv", fnuz=True),
    "fp8-fnuz-bits": formats.fp8(BLOCK, _BLOCKS, scale_name="weight_scale_inv", fnuz=True),
}  # fmt: skip
ROW_COUNT, COLUMN_COUNT = 136, 160


def matrix(seed: int, rows: int = ROW_COUNT, columns: int = COLUMN_COUNT) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def kept(stored: TensorFormat, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {t.name: tensors[t.name] for t in stored.tensors if t.is_kept}


@pytest.mark.parametrize("name", FORMATS)
def test_every_element_matches_its_bits(name: str) -> None:
    layout, stored, plain = LAYOUTS[name], FORMATS[name], matrix(1)
    tensors, expected = layout.write(plain)
    assert {t.name: t.shape(plain.shape) or (1,) for t in stored.tensors} == {
        key: tuple(tensor.shape) or (1,) for key, tensor in tensors.items()
    }
    got = dequantize(stored, kept(stored, tensors))
    assert got.dtype == torch.float32
    assert torch.allclose(got, expected, rtol=1e-6, atol=0)
    assert (got - plain).abs().max() < plain.abs().max() / 6  # the writer represents this matrix
    rows = sorted({0, 1, 127, 128, 135})
    for n in rows:
        for k in range(COLUMN_COUNT):
            assert float(got[n, k]) == pytest.approx(layout.read(tensors, n, k), rel=1e-6), (n, k)


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.unit(Axis.ROWS) == 1])
def test_fused_matrices_dequantise_like_single_ones(name: str) -> None:
    layout, stored = LAYOUTS[name], FORMATS[name]
    weights = WeightFormat(torch.float32, CPU, Scheme((stored,), lambda module: stored))
    rows, columns = 8, 64
    held = MatrixWeight((2, 2 * rows, columns), stored, weights=weights)
    expected = torch.empty(2, 2 * rows, columns)
    for expert in range(2):
        for number, first in enumerate((0, rows)):
            tensors, _ = layout.write(matrix(2 * expert + number, rows, columns) * 10.0**expert)
            alone = dequantize(stored, kept(stored, tensors))
            expected[expert, first : first + rows] = alone
            region = (range(rows), range(columns))
            where = (expert, first)
            for slot in held.slots("x.weight", (rows, columns), region=region, at=where):
                tensor = tensors.get(slot.name.removeprefix("x."))
                assert tensor is not None
                if slot.needed:
                    slot.write(tensor.reshape(slot.shape))
    weight = held.take()
    assert torch.equal(dequantize(weight.format, weight.tensors), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_quantiser_writes_the_published_layout(name: str) -> None:
    stored, plain = FORMATS[name], matrix(2)
    theirs = kept(stored, LAYOUTS[name].write(plain)[0])
    tensors = dict(encode(stored, plain))
    assert {key: (t.shape or (1,)) for key, t in tensors.items()} == {
        key: (t.shape or (1,)) for key, t in theirs.items()
    }
    error, other = (
        (dequantize(stored, each) - plain).norm() / plain.norm() for each in (tensors, theirs)
    )
    assert float(error) == pytest.approx(float(other), rel=0.02)


def test_exponents_as_uint8_and_e8m0_are_equal() -> None:
    layout, stored = LAYOUTS["mxfp8"], FORMATS["mxfp8"]
    tensors, _ = layout.write(matrix(3))
    other = {**tensors, "weight_scale_inv": tensors["weight_scale_inv"].view(torch.float8_e8m0fnu)}
    assert torch.equal(dequantize(stored, tensors), dequantize(stored, other))


def test_every_fnuz_byte_is_decoded() -> None:
    stored, codes = FORMATS["fp8-fnuz"], torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    expected = torch.tensor([2 * e4m3_fnuz(byte) for byte in range(256)]).reshape(16, 16)
    for dtype in (torch.float8_e4m3fnuz, torch.float8_e4m3fn):
        tensors = {"weight": codes.view(dtype), "weight_scale_inv": torch.full((1, 1), 2.0)}
        got = dequantize(stored, tensors)
        assert torch.equal(got.nan_to_num(-1.0), expected.nan_to_num(-1.0))
