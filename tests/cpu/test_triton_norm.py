import pytest
import torch
import triton_support  # noqa: F401  (must precede the kernels)

from negamax.kernels.norm import triton as kernels
from negamax.kernels.registry import OPS
from tests.kernel_cases import CASES

OP = OPS["norm.add_rms"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_where_the_reference_rounds(dtype: torch.dtype) -> None:
    """Check that the residual is bit-identical; the norm may differ by the sum's last bit."""
    for case in CASES[OP].small(dtype, torch.Generator().manual_seed(2)):
        out, *_, residual = CASES[OP].apply(kernels.KERNELS[0], case)
        expected, *_, expected_residual = CASES[OP].apply(OP.reference, case)
        assert torch.equal(residual, expected_residual), case.label
        if out.numel():
            assert (out != expected).float().mean() < 0.02, case.label


def test_fp8_needs_whole_groups() -> None:
    with pytest.raises(AssertionError, match="200"):
        kernels.prepare(torch.ones(200, dtype=torch.bfloat16), 1e-6, quantize=True)
