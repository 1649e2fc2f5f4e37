"""The Triton products and the activation quantiser through Triton's interpreter, on the CPU at
small sizes.
"""

from __future__ import annotations

import pytest
import torch
import triton_support  # noqa: F401  before the kernels

from negamax.kernels.formats import e4m3_blocks, plain
from negamax.kernels.gemm import cases, spec, tiles
from negamax.kernels.gemm import triton as kernels
from negamax.kernels.op import Case, Op
from negamax.kernels.quantize import spec as quantize_spec
from negamax.kernels.quantize import triton as quantize

DTYPES = (torch.bfloat16, torch.float16)
LINEAR = next(op for op in spec.OPS if op.name == "gemm.linear")
QUANTIZE = next(op for op in quantize_spec.OPS if op.name == "quantize.activations")
KERNEL = kernels.KERNELS[0]
SIZES = tiles.H200()


def compare(op: Op, kernel: object, case: Case, dtype: torch.dtype) -> None:
    tolerance = op.tolerance[dtype]
    with torch.inference_mode():
        expected = op.apply(op.reference, case.upcast())
        actual = op.apply(kernel, case)  # type: ignore[arg-type]
    for want, got in zip(expected, actual, strict=True):
        assert got.shape == want.shape, case.label
        torch.testing.assert_close(
            got.float(), want.float(), atol=tolerance.atol, rtol=tolerance.rtol
        )


def fp8_case(
    num_tokens: int,
    inputs: int,
    outputs: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Case:
    return cases.fp8_case(
        num_tokens, inputs, outputs, dtype=dtype, generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_16_bit_weights_at_every_case_of_the_op(dtype: torch.dtype) -> None:
    for case in LINEAR.cases(dtype, torch.Generator().manual_seed(0)):
        compare(LINEAR, KERNEL, case, dtype)


@pytest.mark.parametrize("num_tokens", [1, 2, 17, 33, 64])
def test_16_bit_weights_in_every_tile_and_beyond_its_edges(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 200, generator=generator).bfloat16()
    weight = (torch.randn(131, 200, generator=generator) / 14).bfloat16()
    compare(LINEAR, KERNEL, Case("", {"x": x, "weight": weight}), torch.bfloat16)


@pytest.mark.parametrize(
    ("num_tokens", "inputs", "outputs"),
    [
        (0, 128, 64),
        (1, 128, 128),
        (1, 640, 200),  # a last step that is not whole, rows past the end
        (1, 1536, 24),
        (2, 640, 130),  # 16 rows per program, and rows past the end
        (3, 128, 130),
        (5, 1664, 40),  # a last step with fewer blocks than warps
        (8, 512, 16),
        (9, 384, 72),
        (16, 1664, 16),
        (17, 384, 72),  # columns shared by programs
        (33, 640, 64),
        (64, 128, 192),
        (65, 128, 192),  # the tensor memory accelerator
        (129, 256, 130),  # tiles past both ends
    ],
)
def test_fp8_weights_in_every_kernel(num_tokens: int, inputs: int, outputs: int) -> None:
    compare(LINEAR, KERNEL, fp8_case(num_tokens, inputs, outputs), torch.bfloat16)


def test_programs_that_share_columns_leave_their_counters_at_zero() -> None:
    case = fp8_case(20, 384, 128)
    tile = SIZES.split_k(M=20, N=128, K=384)
    assert tile.split_k > 1
    prepared = kernels.prepare(e4m3_blocks(case.tensors["weight"], case.tensors["weight_scale"]))
    x = quantize_spec.quantize_activations(case.tensors["x"])
    first = kernels.linear(x, prepared)
    assert int(prepared.arrivals.sum()) == 0
    assert torch.equal(kernels.linear(x, prepared), first)


def test_programs_of_small_m_all_run_at_once() -> None:
    """A multiprocessor has 65,536 registers; without a limit the compiler gives a thread 184 at 16
    tokens.
    """
    for M, N, K in (
        (2, 8192, 3072),
        (8, 3072, 6144),
        (16, 4096, 3072),
        (16, 3072, 3072),
        (9, 3072, 1536),
    ):
        tile = SIZES.small_m(M=M, N=N, K=K)
        assert tile is not None and tile.block_m >= M
        assert -(-K // tile.block_k) <= 6
        per_multiprocessor = 65_536 // (32 * tile.num_warps * (tile.maxnreg or 184))
        assert -(-N // tile.block_n) <= SIZES.multiprocessors * per_multiprocessor
    assert SIZES.small_m(M=16, N=8192, K=3072) is None
    assert SIZES.small_m(M=17, N=128, K=128) is None
    assert SIZES.small_m(M=1, N=16, K=16_384) is None


def test_small_m_and_split_k_agree() -> None:
    """The same rows through the kernels for up to 8, up to 16 and more tokens."""
    case = fp8_case(18, 896, 48)
    prepared = kernels.prepare(e4m3_blocks(case.tensors["weight"], case.tensors["weight_scale"]))
    every = kernels.linear(case.tensors["x"], prepared, out_dtype=torch.float32)
    for num_tokens in (2, 7, 13):
        some = kernels.linear(case.tensors["x"][:num_tokens], prepared, out_dtype=torch.float32)
        torch.testing.assert_close(some, every[:num_tokens], atol=1e-4, rtol=1e-4)


def test_each_block_and_each_token_keeps_its_own_scale() -> None:
    """Scales that differ by orders of magnitude: a scale taken from a neighbour would show."""
    generator = torch.Generator().manual_seed(3)
    for num_tokens in (1, 4, 20, 130):
        case = fp8_case(num_tokens, 512, 256)
        case.tensors["weight_scale"] = 10.0 ** torch.randint(-4, 3, (2, 4), generator=generator)
        x = case.tensors["x"] * 2.0 ** torch.randint(
            -3, 4, (num_tokens, 4), generator=generator
        ).repeat_interleave(128, 1)
        case.tensors["x"] = x.bfloat16()
        want = LINEAR.apply(LINEAR.reference, case.upcast())[0]
        got = LINEAR.apply(KERNEL, case)[0].float()
        per_row = (got - want).view(num_tokens, 2, 128).norm(dim=2) / want.view(
            num_tokens, 2, 128
        ).norm(dim=2)
        assert float(per_row.max()) < 1e-2, num_tokens


def test_fp32_output_is_not_rounded_on_the_way() -> None:
    generator = torch.Generator().manual_seed(4)
    x, weight = (
        torch.randn(3, 256, generator=generator).bfloat16(),
        torch.randn(64, 256, generator=generator).bfloat16(),
    )
    out = kernels.linear(x, kernels.prepare(plain(weight)), out_dtype=torch.float32)
    torch.testing.assert_close(out, x.float() @ weight.float().T, atol=1e-4, rtol=1e-5)


def test_plain_activations_meet_fp8_weights() -> None:
    """A mixed step may hand over activations that nobody quantised."""
    case = fp8_case(6, 256, 64)
    prepared = kernels.prepare(e4m3_blocks(case.tensors["weight"], case.tensors["weight_scale"]))
    with_fp8 = kernels.linear(quantize_spec.quantize_activations(case.tensors["x"]), prepared)
    torch.testing.assert_close(kernels.linear(case.tensors["x"], prepared), with_fp8)


def test_weights_that_no_kernel_reads_are_refused() -> None:
    fp8 = torch.zeros(8, 200).to(torch.float8_e4m3fn)
    with pytest.raises(AssertionError, match="multiple of 128"):
        kernels.prepare(e4m3_blocks(fp8, torch.ones(1, 2)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_are_quantised_as_defined(dtype: torch.dtype) -> None:
    for case in QUANTIZE.cases(dtype, torch.Generator().manual_seed(0)):
        x = case.tensors["x"]
        want, got = quantize_spec.quantize_activations(x), quantize.quantize(x)
        assert got.hidden is x
        torch.testing.assert_close(got.scale, want.scale)
        exact = x.float() / want.scale.repeat_interleave(128, dim=1)
        # there the interpreter errs
        carried = torch.frexp(want.q.float()).exponent != torch.frexp(exact).exponent
        assert carried.float().mean() < 0.1 or x.numel() == 0
        error = (got.q.float() - want.q.float()).masked_fill(carried, 0.0).abs()
        assert (error <= 0.13 * exact.abs()).all(), case.label


def test_an_infinite_activation_stays_one_and_keeps_to_its_group() -> None:
    x = torch.ones(2, 256, dtype=torch.bfloat16)
    x[1, 200] = float("inf")
    plain = quantize.quantize(x).dequantize()
    assert not torch.isfinite(plain[1, 200])
    assert torch.equal(plain[0], torch.ones(256)) and torch.equal(plain[1, :128], torch.ones(128))
