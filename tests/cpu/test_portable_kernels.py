import pytest
import torch
from triton_support import MI300X

from negamax.formats.floats import E4M3_BLOCKS, e4m3_blocks
from negamax.kernels import platform
from negamax.kernels.attention.metadata import PagedShape, attention_metadata
from negamax.kernels.attention.op import DECODE
from negamax.kernels.gemm.op import LINEAR
from negamax.kernels.kvcache.op import KvCache
from negamax.kernels.moe.op import EXPERTS
from negamax.kernels.norm.op import ADD_RMS
from negamax.kernels.quantize.native import to_native
from negamax.kernels.quantize.op import QUANTIZE
from negamax.kernels.registry import OPS, resolve

BF16 = torch.bfloat16
TABLE = resolve(platform=MI300X, dtype=BF16)
FNUZ = torch.float8_e4m3fnuz


def test_whatever_has_a_kernel_on_nvidia_has_one_on_amd() -> None:
    nvidia = resolve(platform=platform.nvidia((9, 0), name="H200"), dtype=BF16)
    for name in OPS:
        assert (TABLE[name].provider == "reference") == (nvidia[name].provider == "reference"), name
        assert TABLE[name].requires <= MI300X.features or TABLE[name].provider == "reference"
    assert TABLE.reads_stored(E4M3_BLOCKS)


@pytest.fixture
def on_mi300x(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "platform_of", lambda device: MI300X)


@pytest.mark.usefixtures("on_mi300x")
def test_stored_values_are_the_same_numbers_in_the_form_of_mi300() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    found, scale = to_native(values, torch.tensor([[3.0]]))
    assert found.dtype is FNUZ and scale.item() == 6.0
    want, got = values.float() * 3.0, found.float() * scale
    assert torch.equal(got.isnan(), want.isnan()) and int(want.isnan().sum()) == 2
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.usefixtures("on_mi300x")
def test_all_values_in_fp8_have_the_form_of_mi300() -> None:
    values = torch.zeros(1, 256, 128).to(torch.float8_e4m3fn)
    stored = e4m3_blocks(values, torch.ones(1, 2, 1))
    linear, experts = (TABLE.choose(name, E4M3_BLOCKS) for name in (LINEAR, EXPERTS))
    assert linear is not None and experts is not None
    assert linear.prepare(e4m3_blocks(values[0], torch.ones(2, 1))).weight.dtype is FNUZ
    prepared = experts.prepare(stored, e4m3_blocks(values[:, :128], torch.ones(1, 1, 1)))
    assert prepared.gate_up.dtype is FNUZ and prepared.down.dtype is FNUZ
    x = torch.ones(1, 256, dtype=BF16)
    norm = TABLE[ADD_RMS].prepare(x[0], 1e-6, quantize=True)
    queries = attention_metadata(torch.tensor([[0]]), [1], [1])
    shape = PagedShape(kv_heads=1, group=2, block_size=16, quantize=True)
    plan = TABLE[DECODE].prepare(queries, shape)
    cache = torch.ones(1, 1, 16, 128, dtype=BF16)
    for made in (
        TABLE[QUANTIZE].run(x),
        TABLE[ADD_RMS].run(x, x.clone(), norm),
        TABLE[DECODE].run(x.view(1, 2, 128), KvCache(cache, cache), plan),
    ):
        assert made.q.dtype is FNUZ and made.q.float().abs().amax() == 240.0
