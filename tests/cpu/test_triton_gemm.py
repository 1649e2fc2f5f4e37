import pytest
import torch
import triton_support  # noqa: F401  (must precede the kernels)

from negamax.formats.floats import e4m3_blocks, plain
from negamax.kernels.gemm import tiles
from negamax.kernels.gemm import triton as kernels
from negamax.kernels.gemm.op import LinearOutput
from negamax.kernels.norm import triton as norm_kernels
from negamax.kernels.quantize import op as quantize_spec
from negamax.kernels.quantize import triton as quantize
from negamax.kernels.registry import OPS
from tests.kernel_cases import CASES
from tests.kernel_cases import gemm as cases

SIZES = tiles.H200GemmTiles()


def fp8_linear(
    num_tokens: int, inputs: int, outputs: int
) -> tuple[torch.Tensor, kernels.PreparedLinear]:
    generator = torch.Generator().manual_seed(0)
    t = cases.fp8_case(torch.bfloat16, generator, num_tokens, inputs, outputs).tensors
    return t["x"], kernels.prepare(e4m3_blocks(t["weight.weight"], t["weight.weight_scale_inv"]))


def test_all_programs_of_small_m_run_at_once() -> None:
    """A multiprocessor has 65,536 registers; the compiler alone would use 184 a thread."""
    for M, N, K in (
        (2, 8192, 3072), (8, 3072, 6144), (16, 4096, 3072), (16, 3072, 3072), (9, 3072, 1536)
    ):  # fmt: skip
        tile = SIZES.small_m(M=M, N=N, K=K)
        assert tile is not None and tile.block_m >= M
        assert -(-K // tile.block_k) <= 6
        per_multiprocessor = 65_536 // (32 * tile.num_warps * (tile.maxnreg or 184))
        assert -(-N // tile.block_n) <= SIZES.multiprocessors * per_multiprocessor
    assert SIZES.small_m(M=16, N=8192, K=3072) is None
    assert SIZES.small_m(M=17, N=128, K=128) is None
    assert SIZES.small_m(M=1, N=16, K=16_384) is None


def test_small_m_and_split_k_agree_and_leave_counters_at_zero() -> None:
    """Run the same rows by the kernels for up to 8 tokens, for up to 16 and for more."""
    x, prepared = fp8_linear(18, 896, 48)
    every = kernels.linear(x, prepared, LinearOutput(torch.float32))
    for num_tokens in (2, 7, 13):
        some = kernels.linear(x[:num_tokens], prepared, LinearOutput(torch.float32))
        torch.testing.assert_close(some, every[:num_tokens], atol=1e-4, rtol=1e-4)
    x, prepared = fp8_linear(20, 384, 128)
    assert SIZES.split_k(M=20, N=128, K=384).split_k > 1
    first = kernels.linear(x, prepared)
    assert int(prepared.arrivals.sum()) == 0
    assert torch.equal(kernels.linear(x, prepared), first)


def test_activations_and_outputs_are_rounded_once() -> None:
    generator = torch.Generator().manual_seed(4)
    x, weight = torch.randn(67, 256, generator=generator).bfloat16().split((3, 64))
    out = kernels.linear(x, kernels.prepare(plain(weight)), LinearOutput(torch.float32))
    torch.testing.assert_close(out, x.float() @ weight.float().T, atol=1e-4, rtol=1e-5)
    x, prepared = fp8_linear(6, 256, 64)
    with_fp8 = kernels.linear(quantize_spec.quantize_activations(x), prepared)
    torch.testing.assert_close(kernels.linear(x, prepared), with_fp8)
    fp8 = torch.zeros(8, 200).to(torch.float8_e4m3fn)
    with pytest.raises(AssertionError, match="multiple of 128"):
        kernels.prepare(e4m3_blocks(fp8, torch.ones(1, 2)))
    x = torch.ones(2, 256, dtype=torch.bfloat16)
    x[1, 200] = float("inf")
    back = quantize.quantize(x).dequantize()
    assert not torch.isfinite(back[1, 200])
    assert torch.equal(back[0], torch.ones(256)) and torch.equal(back[1, :128], torch.ones(128))


ADD_RMS = OPS["norm.add_rms"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_rounds_where_the_reference_rounds(dtype: torch.dtype) -> None:
    """Check that the residual is bit-identical; the norm may differ by the sum's last bit."""
    for case in CASES[ADD_RMS].small(dtype, torch.Generator().manual_seed(2)):
        out, *_, residual = CASES[ADD_RMS].apply(norm_kernels.KERNELS[0], case)
        expected, *_, expected_residual = CASES[ADD_RMS].apply(ADD_RMS.reference, case)
        assert torch.equal(residual, expected_residual), case.label
        if out.numel():
            assert (out != expected).float().mean() < 0.02, case.label


def test_fp8_norms_need_whole_groups() -> None:
    with pytest.raises(AssertionError, match="200"):
        norm_kernels.prepare(torch.ones(200, dtype=torch.bfloat16), 1e-6, quantize=True)
