"""The Triton norm kernels through Triton's interpreter, on the CPU at small sizes."""

from __future__ import annotations

import pytest
import torch
import triton_support  # noqa: F401  before the kernels

from negamax.kernels.activations import QuantizedActivations
from negamax.kernels.norm import spec
from negamax.kernels.norm import triton as kernels
from negamax.kernels.op import Case, Kernel

DTYPES = (torch.bfloat16, torch.float16)
OP = next(op for op in spec.OPS if op.name == "norm.add_rms")
KERNEL = kernels.KERNELS[0]


def compare(kernel: Kernel, case: Case, dtype: torch.dtype) -> None:
    tolerance = OP.tolerance[dtype]
    with torch.inference_mode():
        expected = OP.apply(OP.reference, case.upcast())
        actual = OP.apply(kernel, case)
    for want, got in zip(expected, actual, strict=True):
        assert got.shape == want.shape, case.label
        torch.testing.assert_close(
            got.float(), want.float(), atol=tolerance.atol, rtol=tolerance.rtol, msg=case.label
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_case_of_the_op(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for case in OP.cases(dtype, generator):
        compare(KERNEL, case, dtype)


def test_rounds_where_the_reference_rounds() -> None:
    """The residual in every bit, for parts too; the norm but for the sum of squares' last bit.
    fp16: where a GPU rounds to the nearest bf16, the interpreter cuts off."""
    generator = torch.Generator().manual_seed(2)
    for case in OP.cases(torch.float16, generator):
        out, residual = OP.apply(KERNEL, case)
        expected, expected_residual = OP.apply(OP.reference, case)
        assert torch.equal(residual, expected_residual), case.label
        if out.numel():
            assert (out != expected).float().mean() < 0.02, case.label


def test_fp8_output_holds_the_norm_with_a_scale_per_128_columns() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 384, generator=generator).bfloat16()
    residual = torch.randn(3, 384, generator=generator).bfloat16()
    residual[1, 128:256] = -x[1, 128:256]  # a group of zeros
    weight = torch.ones(384, dtype=torch.bfloat16)
    out = KERNEL.run(x, residual, kernels.prepare(weight, 1e-6, quantize=True))
    assert isinstance(out, QuantizedActivations)
    assert out.q.shape == (3, 384) and out.scale.shape == (3, 3)
    largest = out.hidden.float().view(3, 3, 128).abs().amax(dim=-1)
    expected = torch.where(largest > 0, largest / 448, 1.0)
    torch.testing.assert_close(out.scale, expected)
    assert out.scale[1, 1] == 1.0
    exact = out.hidden.float() / out.scale.repeat_interleave(128, dim=1)
    rounded = exact.to(torch.float8_e4m3fn).float()
    # there the interpreter forgets the carry
    carried = torch.frexp(rounded).exponent != torch.frexp(exact).exponent
    assert carried.float().mean() < 0.1
    differs = (out.q.float() != rounded) & ~carried
    assert differs.float().mean() < 0.005  # and rounds ties up


def test_parts_give_what_their_sum_gives_in_fp8_too() -> None:
    generator = torch.Generator().manual_seed(4)
    # whole numbers: sums without rounding
    parts = torch.randint(-8, 9, (5, 8, 256), generator=generator).bfloat16()
    norm = kernels.prepare(torch.ones(256, dtype=torch.bfloat16), 1e-6, quantize=True)
    residuals = [torch.zeros(5, 256, dtype=torch.bfloat16) for _ in range(2)]
    from_parts = KERNEL.run(parts, residuals[0], norm)
    from_sum = KERNEL.run(spec.sum_parts(parts), residuals[1], norm)
    assert torch.equal(residuals[0], residuals[1]) and torch.equal(
        residuals[0], spec.sum_parts(parts)
    )
    assert torch.equal(from_parts.hidden, from_sum.hidden) and torch.equal(
        from_parts.scale, from_sum.scale
    )
    assert torch.equal(from_parts.q.view(torch.uint8), from_sum.q.view(torch.uint8))


def test_fp8_needs_whole_groups() -> None:
    with pytest.raises(AssertionError, match="200"):
        kernels.prepare(torch.ones(200, dtype=torch.bfloat16), 1e-6, quantize=True)
