from dataclasses import replace

import pytest
import torch
import triton_support  # noqa: F401  (must precede the kernels)
from torch import Tensor

from negamax.formats.floats import PLAIN
from negamax.formats.tensor_format import StoredWeight, TensorFormat
from negamax.kernels import platform
from negamax.kernels.gemm import triton_w8a8
from negamax.kernels.gemm.op import LINEAR
from negamax.kernels.moe import tiles as moe_tiles
from negamax.kernels.moe import triton as moe
from negamax.kernels.moe.op import EXPERTS, SelectedExperts
from negamax.kernels.op import W8A8, WEIGHT_ONLY
from negamax.kernels.quantize.stored import dequantize
from negamax.kernels.registry import resolve
from negamax.kernels.weight_only import layout
from negamax.kernels.weight_only.triton_rounding import round_activations
from tests.kernel_cases import weight_only as cases

INT8, FP8 = cases.INT8_CHANNEL, cases.E4M3_CHANNEL
BOTH = pytest.mark.parametrize("stored", [INT8, FP8], ids=lambda stored: stored.name)


def weight(stored: TensorFormat, *shape: int) -> StoredWeight:
    tensors = cases.tensors_of(stored, "w", *shape, generator=torch.Generator().manual_seed(0))
    return StoredWeight(stored, {name.removeprefix("w."): t for name, t in tensors.items()})


def activations(num_tokens: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_tokens, width, generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("capability", "int8", "fp8"),
    [((8, 0), W8A8, WEIGHT_ONLY), ((8, 9), W8A8, W8A8), ((9, 0), W8A8, W8A8)],
)
def test_activations_are_rounded_where_the_format_says_so_and_the_gpu_multiplies_it(
    capability: tuple[int, int], int8: str, fp8: str
) -> None:
    table = resolve(platform=platform.nvidia(capability, name=""), dtype=torch.bfloat16)
    for stored, provider in ((INT8, int8), (FP8, fp8)):
        for op in (LINEAR, EXPERTS):
            rounded = table.choose(op, stored)
            kept = table.choose(op, replace(stored, activation=None))
            assert rounded and rounded.provider == provider and rounded.activation is None
            assert kept and kept.provider == WEIGHT_ONLY
            assert table[op].reads(PLAIN)


@BOTH
def test_each_token_has_a_scale_of_its_own(stored: TensorFormat) -> None:
    x = activations(4, 200) * torch.tensor([1.0, 1e-6, 1e4, 0.0])[:, None]
    packed = layout.pack(weight(stored, 1, 200))
    q, scale = round_activations(x.to(torch.bfloat16), packed.packing)
    dtype, largest = (torch.int8, 127) if stored is INT8 else (torch.float8_e4m3fn, 448)
    assert q.dtype is dtype and q.shape == (4, 256)
    torch.testing.assert_close(scale[:3], x.float().abs().amax(1)[:3] / largest, rtol=1e-2, atol=0)
    axes = [1 + axis for axis in layout.AXES]
    in_order = torch.arange(256).view(-1, 2, 2, 2, 4, 2).permute(0, *axes).flatten()
    columns = torch.empty(4, 256).index_copy_(1, in_order, q.float())
    assert not columns[:, 200:].any() and not columns[3].any()
    assert (columns[:3].abs().amax(1) == largest).all()
    error = (columns * scale[:, None])[:, :200] - x.to(torch.bfloat16).float()
    step = scale[:, None] / 2 if stored is INT8 else x.float().abs() / 15.9 + scale[:, None] / 1023
    assert (error.abs() <= 1.001 * step).all()


@BOTH
def test_infinite_token_stays_alone(stored: TensorFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_tiles, "SMALL_M_MAX_M", 2)
    x = activations(66, 160)
    clean = x.clone()
    x[1, 7], x[65, 0] = float("nan"), float("inf")
    dense = triton_w8a8.triton_packed.prepare(weight(stored, 72, 160))
    experts = moe.prepare_packed(weight(stored, 3, 80, 160), weight(stored, 3, 160, 40))
    ids = torch.tensor([[0, 1]]).repeat(66, 1).int()
    ids[:, 1] += (torch.arange(66) % 2).int()
    weights = torch.full((66, 2), 0.5)
    with torch.inference_mode():
        for run in (
            lambda x: triton_w8a8.linear(x, dense),
            lambda x: moe.experts_rounded(x, SelectedExperts(ids, weights, 0, 3), experts).sum(1),
        ):
            found, expected = run(x), run(clean)
            broken = ~found.isfinite().any(1)
            assert broken.nonzero().flatten().tolist() == [1, 65]
            assert torch.equal(found[~broken], expected[~broken]) and expected.isfinite().all()


@pytest.mark.parametrize(("stored", "error"), [(INT8, 0.011), (FP8, 0.03)])
def test_rounding_costs_what_its_element_is_known_for(stored: TensorFormat, error: float) -> None:
    whole, x = weight(stored, 130, 640), activations(65, 640)
    with torch.inference_mode():
        found = triton_w8a8.linear(x, triton_w8a8.triton_packed.prepare(whole)).float()
    expected = x.float() @ dequantize(stored, whole.tensors).t()
    assert error / 2 < (found - expected).norm() / expected.norm() < error
