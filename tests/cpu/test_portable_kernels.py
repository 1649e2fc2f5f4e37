"""What an AMD GPU gets of every op, in Triton's interpreter: no program waits for another one,
nothing is said in PTX, and on MI300 FP8 values are e4m3fnuz.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import triton_support  # noqa: F401  before the kernels
from block_fp8 import quantize_block

from negamax.kernels import platform
from negamax.kernels.activations import QuantizedActivations
from negamax.kernels.attention import spec as attention
from negamax.kernels.attention.metadata import attention_metadata
from negamax.kernels.formats import E4M3_BLOCKS, e4m3_blocks
from negamax.kernels.gemm.cases import fp8_case
from negamax.kernels.launch.tile import Tile
from negamax.kernels.launch.triton import launch_options
from negamax.kernels.moe import tiles as moe_tiles
from negamax.kernels.quantize.native import to_native
from negamax.kernels.quantize.spec import dequantize_block
from negamax.kernels.registry import OPS, resolve

BF16 = torch.bfloat16
# as few multiprocessors as the interpreter has patience for
MI300X = platform.amd("gfx942", name="MI300X", multiprocessors=2, shared_memory=65536)
TABLE = resolve(platform=MI300X, dtype=BF16)
FNUZ = torch.float8_e4m3fnuz


@pytest.fixture(autouse=True)
def on_mi300x(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(platform, "platform_of", lambda device: MI300X)
    launch_options.cache_clear()
    yield
    launch_options.cache_clear()


@pytest.mark.parametrize("name", [name for name in OPS if TABLE[name].provider != "reference"])
def test_portable_kernel_computes_its_op(name: str) -> None:
    op, kernel = OPS[name], TABLE[name]
    assert kernel.requires <= MI300X.features
    for case in op.cases(BF16, torch.Generator().manual_seed(0)):
        expected, actual = op.apply(op.reference, case.upcast()), op.apply(kernel, case)
        if name == "quantize.activations":  # the scales are those of values up to 240
            expected, actual = expected[:2], actual[:2]
        for want, got in zip(expected, actual, strict=True):
            tolerance = op.tolerance[BF16]
            if want.is_floating_point():
                torch.testing.assert_close(
                    got.float(), want.float(), atol=tolerance.atol, rtol=tolerance.rtol
                )
            else:
                assert torch.equal(got.long(), want.long()), case.label


def test_whatever_has_a_kernel_on_nvidia_has_one_on_amd() -> None:
    nvidia = resolve(platform=platform.nvidia((9, 0), name="H200"), dtype=BF16)
    for name in OPS:
        assert (TABLE[name].provider == "reference") == (nvidia[name].provider == "reference"), name
    assert TABLE.reads_stored(E4M3_BLOCKS)


def test_stored_values_are_the_same_numbers_in_the_form_of_mi300() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    found, scale = to_native(values, torch.tensor([[3.0]]))
    assert found.dtype is FNUZ and scale.item() == 6.0
    want, got = values.float() * 3.0, found.float() * scale
    assert torch.equal(got.isnan(), want.isnan()) and int(want.isnan().sum()) == 2
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.parametrize("num_tokens", [1, 5, 70])
def test_products_of_fnuz_values(num_tokens: int) -> None:
    case = fp8_case(num_tokens, 384, 200, dtype=BF16, generator=torch.Generator().manual_seed(1))
    kernel = TABLE.choose("gemm.linear", E4M3_BLOCKS)
    assert kernel is not None and kernel.prepare is not None
    x, weight, scale = (case.tensors[name] for name in ("x", "weight", "weight_scale"))
    prepared = kernel.prepare(e4m3_blocks(weight, scale))
    activations = TABLE["quantize.activations"].run(x)
    assert prepared.weight.dtype is FNUZ and activations.q.dtype is FNUZ
    want = activations.dequantize() if num_tokens > 1 else x.float()
    got = kernel.run(activations, prepared)
    assert error(got, want @ dequantize_block(weight, scale).T) < 4e-3


@pytest.mark.parametrize("path", ["gemv", "small_m", "large_m"])
def test_experts_of_fnuz_values(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    most = {"gemv": 9, "small_m": 0, "large_m": 0}[path]
    monkeypatch.setattr(moe_tiles.Tiles, "gemv_max_m", lambda self, width: most)
    monkeypatch.setattr(moe_tiles, "SMALL_M_MAX_M", 9 if path == "small_m" else 0)
    few = moe_tiles.ExpertTiles(
        Tile(1, 16, 256, num_warps=4), Tile(1, 32, 128, num_warps=4), choices=2
    )  # programs
    monkeypatch.setattr(moe_tiles.Tiles, "gemv", lambda self, width: few)
    generator = torch.Generator().manual_seed(2)
    stored = {}
    for name, shape in (("gate_up", (3, 256, 128)), ("down", (3, 128, 128))):
        weights = torch.randn(*shape, generator=generator) * 128**-0.5
        stored[name] = [
            torch.stack(part) for part in zip(*map(quantize_block, weights), strict=True)
        ]
    x = torch.randn(9, 128, generator=generator).to(BF16)
    ids = torch.rand(9, 3, generator=generator).topk(2).indices.int()
    weights = torch.full((9, 2), 0.5)
    kernel = TABLE.choose("moe.experts", E4M3_BLOCKS)
    assert kernel is not None and kernel.prepare is not None
    prepared = kernel.prepare(*(e4m3_blocks(*pair) for pair in stored.values()))
    assert prepared.down.dtype is FNUZ and torch.equal(prepared.down_scale, 2 * stored["down"][1])
    activations = TABLE["quantize.activations"].run(x)
    got = kernel.run(activations, ids, weights, prepared, first=0, count=3).float().sum(1)
    plain = [
        torch.stack([dequantize_block(*pair) for pair in zip(*stored[name], strict=True)])
        for name in ("gate_up", "down")
    ]
    reference = OPS["moe.experts"].reference.run
    want = reference(x.float(), ids, weights, tuple(plain), first=0, count=3)
    assert error(got, want) < 5e-2  # activations and h are rounded to 4 bits each


def test_norms_and_attention_give_fnuz_values_that_their_scales_fit() -> None:
    generator = torch.Generator().manual_seed(3)
    norm = TABLE["norm.add_rms"]
    assert norm.prepare is not None
    x, residual = (torch.randn(3, 256, generator=generator).to(BF16) for _ in range(2))
    prepared = norm.prepare(torch.ones(256, dtype=BF16), 1e-6, quantize=True)
    found = [norm.run(x, residual, prepared)]
    shape = attention.PagedShape(kv_heads=1, group=2, block_size=16)
    queries = attention_metadata(torch.tensor([[1, 2], [0, 3]]), [20, 7], [1, 1])
    decode = TABLE["attention.decode"]
    assert decode.prepare is not None
    plan = decode.prepare(queries, shape, dtype=BF16, quantize=True)
    q, *cache = (
        torch.randn(*sizes, generator=generator).to(BF16)
        for sizes in ((2, 2, 128), (4, 1, 16, 128), (4, 1, 16, 128))
    )
    found.append(decode.run(q, *cache, plan))
    for activations in found:
        assert isinstance(activations, QuantizedActivations) and activations.q.dtype is FNUZ
        assert activations.q.float().abs().amax() == 240.0
        assert error(activations.dequantize(), activations.hidden.float()) < 4e-2
