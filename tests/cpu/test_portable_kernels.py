"""What an AMD GPU gets of every op, in Triton's interpreter: no program waits for another one,
nothing is said in PTX, and on MI300 FP8 values are e4m3fnuz.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import triton_support  # noqa: F401  before the kernels

from negamax.kernels import platform
from negamax.kernels.launch.triton import launch_options
from negamax.kernels.registry import OPS, resolve

BF16 = torch.bfloat16
# as few multiprocessors as the interpreter has patience for
MI300X = platform.amd("gfx942", name="MI300X", multiprocessors=2, shared_memory=65536)
TABLE = resolve(platform=MI300X, dtype=BF16)


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
        for want, got in zip(expected, actual, strict=True):
            tolerance = op.tolerance[BF16]
            if want.is_floating_point():
                torch.testing.assert_close(
                    got.float(), want.float(), atol=tolerance.atol, rtol=tolerance.rtol
                )
            else:
                assert torch.equal(got.long(), want.long()), case.label
