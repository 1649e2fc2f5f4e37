from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl
import triton_support  # noqa: F401  (must precede the kernels)
from kernel_contract import check
from stored_kernels import unpacked
from torch import Tensor
from triton import jit

from negamax.formats.floats import E4M3_BLOCKS, E4M3_GROUPS, PLAIN, e4m3_blocks
from negamax.formats.tensor_format import ActivationFormat, StoredWeight, TensorFormat
from negamax.kernels import platform
from negamax.kernels.gemm import tiles, triton_packed, triton_w8a8
from negamax.kernels.gemm.op import IN_PARTS, LINEAR
from negamax.kernels.gemm.triton_packed_gemv import gemv
from negamax.kernels.launch import ptx
from negamax.kernels.launch.tile import Tile
from negamax.kernels.moe import tiles as moe_tiles
from negamax.kernels.moe import triton as moe
from negamax.kernels.moe.op import EXPERTS, SelectedExperts
from negamax.kernels.op import W8A8, WEIGHT_ONLY, Op
from negamax.kernels.quantize.codes import Codes
from negamax.kernels.quantize.stored import dequantize
from negamax.kernels.registry import KernelTable, gpu_kernels, resolve
from negamax.kernels.weight_only import layout, triton
from negamax.kernels.weight_only.layout import Packing
from negamax.kernels.weight_only.triton_dequantize import dequantize as dequantize_packed
from negamax.kernels.weight_only.triton_rounding import round_activations
from negamax.layers.linear import ColumnParallel, ProjectionPart
from negamax.layers.moe import SparseMoe
from negamax.layers.weights import LayerSetup
from negamax.models import minimax_names as names
from negamax.parallel.context import ParallelContext
from negamax.quantization.scheme import Scheme, WeightFormat
from tests.kernel_cases import weight_only as cases
from tests.kernel_cases.case import Case
from tests.kernel_cases.gemm import fp8_weight
from tests.kernel_cases.moe import fp8_experts
from tests.layouts import full

_MASK = 0xFFFFFFFF


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _stored(stored: TensorFormat, *shape: int) -> StoredWeight:
    tensors = cases.tensors_of(stored, "w", *shape, generator=_generator())
    return StoredWeight(stored, {name.removeprefix("w."): t for name, t in tensors.items()})


@pytest.mark.parametrize("stored", cases.SMALL_FORMATS, ids=lambda stored: stored.name)
def test_packed_weights_hold_the_codes_of_every_matrix(stored: TensorFormat) -> None:
    weight = _stored(stored, 2, 5, 160)  # three spans, of which the last one is ragged
    packed = layout.pack(weight)
    each = [{name: t[index] for name, t in weight.tensors.items()} for index in (0, 1)]
    expected = torch.cat([dequantize(stored, tensors) for tensors in each])
    torch.testing.assert_close(unpacked(packed), expected, rtol=1e-6, atol=0)
    assert packed.qweight.shape == ((10, 192) if packed.packing.CODES == 1 else (2, 10, 64))
    held = sum(t.nbytes for t in packed.tensors[1:] if t is not packed.qweight)
    sides = sum(t.nbytes for name, t in weight.tensors.items() if name != "weight")
    assert packed.qweight.nbytes + held <= 1.65 * (weight.values.nbytes + sides)  # padded columns


def test_fp8_blocks_are_weight_only_where_fp8_has_no_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    a100 = platform.nvidia((8, 0), name="A100", multiprocessors=2)
    monkeypatch.setattr(platform, "platform_of", lambda device: a100)
    kernel = resolve(platform=a100, dtype=torch.bfloat16).choose(LINEAR, E4M3_BLOCKS)
    assert kernel is not None
    values = torch.randn(200, 256, generator=_generator()).to(torch.float8_e4m3fn)
    weight = e4m3_blocks(values, torch.rand(2, 2, generator=_generator()) + 0.5)
    x = torch.randn(3, 256, generator=_generator()).to(torch.bfloat16)
    with torch.inference_mode():
        assert_multiplied(kernel.run(x, kernel.prepare(weight)), x, weight)


@pytest.mark.parametrize(
    ("op", "num_tokens"), [(LINEAR, 3), (EXPERTS, 40), full(LINEAR, 40), full(EXPERTS, 3)]
)
def test_fp8_blocks_split_by_hidden_size_stay_stored(op: Op[Any, Any], num_tokens: int) -> None:
    """Split 192 columns into a part of whole FP8 blocks and a part of half a block."""
    generator = torch.Generator().manual_seed(5)
    table = KernelTable.of(gpu_kernels(), platform=platform.CPU, dtype=torch.bfloat16)
    whole, kernel = (table.choose(op, E4M3_BLOCKS, columns=columns) for columns in (256, 192))
    assert whole is not None and kernel is not None
    assert (whole.provider, kernel.provider) == ("triton", WEIGHT_ONLY)
    x = torch.randn(num_tokens, 192, generator=generator).bfloat16()
    if op == LINEAR:
        values, scale = fp8_weight(160, 192, generator=generator)
        tensors = {"x": x, "weight.weight": values, "weight.weight_scale_inv": scale}
        case = Case("192 -> 160", tensors, stored=E4M3_BLOCKS)
    else:
        ids = torch.rand(num_tokens, 4, generator=generator).topk(2).indices.int()
        weights = fp8_experts(4, hidden=192, width=128, generator=generator)
        tensors = {"x": x, "ids": ids, "weights": torch.full(ids.shape, 0.5), **weights}
        case = Case("hidden 192", tensors, {"first": 0, "count": 4}, E4M3_BLOCKS)
    check(kernel, case, torch.bfloat16)


@pytest.mark.parametrize(("hidden", "wanted"), [(192, None), (256, E4M3_GROUPS)])
def test_layers_select_kernels_by_columns(hidden: int, wanted: ActivationFormat | None) -> None:
    table = KernelTable.of(gpu_kernels(), platform=platform.CPU, dtype=torch.bfloat16)
    scheme = Scheme((E4M3_BLOCKS,), lambda module: E4M3_BLOCKS)
    weights = WeightFormat(torch.bfloat16, torch.device("cpu"), scheme)
    setup = LayerSetup(ParallelContext.single(), weights, table)
    linear = ColumnParallel([ProjectionPart("w", 128, range(128))], hidden, setup=setup)
    moe = SparseMoe(
        names.moe(0), layer=0, hidden_size=hidden, width=128, num_experts=2, top_k=2,
        setup=setup,
    )  # fmt: skip
    assert linear.activation == moe.activation == wanted


def each_with(*variants: Any) -> list[Any]:
    """Return all pairs of format and variant. The gate runs one variant per format."""
    return [
        pytest.param(
            variant, stored, id=f"{variant}-{stored.name}",
            marks=() if number % len(variants) == which else pytest.mark.full,
        )
        for number, stored in enumerate(cases.SMALL_FORMATS)
        for which, variant in enumerate(variants)
    ]  # fmt: skip


def assert_multiplied(found: Tensor, x: Tensor, weight: StoredWeight) -> None:
    expected = x.float() @ dequantize(weight.format, weight.tensors).t()
    assert (found.float() - expected).norm() <= 4e-3 * expected.norm()


# tokens, columns, warps, splits of the columns
@pytest.mark.parametrize(
    ("sizes", "stored"), each_with((5, 456, 2, 1), (1, 1096, 1, 1), (3, 456, 1, 2), (1, 1096, 1, 4))
)
def test_few_tokens_use_weights(sizes: tuple[int, int, int, int], stored: TensorFormat) -> None:
    num_tokens, columns, num_warps, split_k = sizes
    weight = _stored(stored, 40, columns)  # Some rows and columns fill no program.
    x = torch.randn(num_tokens, columns, generator=_generator()).to(torch.bfloat16)
    out = torch.full((num_tokens, split_k, 40), torch.nan, dtype=torch.bfloat16)
    tile = Tile(8, 32, 1, num_warps=num_warps, split_k=split_k)
    with torch.inference_mode():
        gemv(x, layout.pack(weight), out, tile)
    assert_multiplied(out.float().sum(1), x, weight)


@pytest.mark.parametrize(("min_m", "stored"), each_with(4, 1 << 30))
def test_many_tokens_are_multiplied_as_the_weight_reads(
    min_m: int, stored: TensorFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check cuBLAS, and tiles with more tokens than there are registers for two accumulators."""
    monkeypatch.setattr(tiles.GemmTiles, "dequantized_min_m", lambda self, packing: min_m)
    monkeypatch.setattr(
        tiles.H200GemmTiles,
        "packed",
        lambda self, **sizes: Tile(128, 64, 128, num_warps=4, num_stages=2),
    )
    weight = _stored(stored, 70, 424)
    x = torch.randn(130, 424, generator=_generator()).to(torch.bfloat16)
    with torch.inference_mode():
        assert_multiplied(triton_packed.linear(x, triton_packed.prepare(weight)), x, weight)


@pytest.mark.parametrize(("dtype", "stored"), each_with(torch.float16, torch.bfloat16))
def test_dequantized_weight_matches_its_format(dtype: torch.dtype, stored: TensorFormat) -> None:
    weight = _stored(stored, 70, 424)  # Some rows and columns fill no program.
    with torch.inference_mode():
        found = dequantize_packed(layout.pack(weight), dtype)
    expected = dequantize(stored, weight.tensors)
    rounding = torch.finfo(dtype).eps  # Values are rounded once, or twice with half the error.
    torch.testing.assert_close(found.float(), expected, rtol=rounding, atol=1e-6)


@pytest.mark.parametrize(("num_tokens", "num_parts"), [(0, 4), (1, 4), (4, 4), (5, 1)])
def test_returns_parts_for_the_caller_to_add(num_tokens: int, num_parts: int) -> None:
    prepared = triton_packed.prepare(_stored(cases.INT4, 8, 3584))
    x = torch.randn(num_tokens, 3584, generator=_generator()).to(torch.bfloat16)
    whole, out = triton_packed.linear(x, prepared), x.new_empty(num_tokens, 8)
    parts = triton_packed.linear(x, prepared, IN_PARTS)
    assert triton_packed.linear(x, prepared, IN_PARTS._replace(out=out)).equal(whole)
    assert parts.shape == ((num_tokens, num_parts, 8) if num_parts > 1 else whole.shape)
    added = parts.float().view(num_tokens, num_parts, 8).sum(1)
    assert (added - whole.float()).norm() <= 6e-3 * whole.float().norm()


# --- PTX -----------------------------------------------------------------------------------------


def _run_ptx(code: str, inputs: dict[int, int]) -> dict[str, int]:
    registers: dict[str, int] = {f"${number}": value for number, value in inputs.items()}

    def read(unpack_operand: str) -> int:
        return int(unpack_operand, 0) if unpack_operand[0].isdigit() else registers[unpack_operand]

    statements = code.removeprefix("{").removesuffix("}").split(";")
    for statement in filter(None, (each.strip() for each in statements)):
        if statement.startswith(".reg"):
            continue
        op, rest = statement.split(" ", 1)
        if rest.startswith("{"):  # The register is built from two halves.
            low, high, whole = (part.strip("{ }") for part in rest.split(","))
            registers[low], registers[high] = read(whole) & 0xFFFF, read(whole) >> 16
            continue
        out, unpack_operand = (part.strip() for part in rest.split(",", 1))
        if unpack_operand.startswith("{"):
            low, high = unpack_operand.strip("{ }").split(", ")
            registers[out] = read(low) | read(high) << 16
            continue
        operands = [part.strip() for part in unpack_operand.split(",")]
        registers[out] = _OPS[op](*(read(unpack_operand) for unpack_operand in operands)) & _MASK
    return registers


def _fma_bf16x2(a: int, b: int, c: int) -> int:
    halves = []
    for shift in (0, 16):
        x, y, z = (
            torch.tensor(each >> shift & 0xFFFF, dtype=torch.int32)
            .to(torch.uint16)
            .view(torch.bfloat16)
            .double()
            for each in (a, b, c)
        )
        halves.append(int((x * y + z).to(torch.bfloat16).view(torch.int16)) & 0xFFFF)
    return halves[0] | halves[1] << 16


_OPS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shr.u32": lambda a, n: a >> n,
    "shl.b32": lambda a, n: a << n,
    "shf.l.wrap.b32": lambda low, high, n: (high << 32 | low) >> 32 - n,
    "lop3.b32": lambda a, b, c, table: (a & b) | c if table == 0xEA else 1 // 0,
    "fma.rn.bf16x2": _fma_bf16x2,
}


def _pair(*values: float) -> int:
    first, second = torch.tensor(values).to(torch.bfloat16).view(torch.int16).tolist()
    return first & 0xFFFF | (second & 0xFFFF) << 16


@pytest.mark.parametrize(
    ("element", "zeros", "scaled", "is_raw"),
    [(element, zeros, scaled, False) for scaled in (False, True) for element, zeros in (
        ("uint4", False), ("uint4", True), ("uint8", True), ("int8", False), ("e2m1", False),
        ("e4m3", False),
     )] + [("uint4", False, False, True)],
)  # fmt: skip
def test_ptx_decodes_every_byte(
    element: str, zeros: bool, scaled: bool, is_raw: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "_converts_pairs", lambda DTYPE: True)
    per_byte = 2 if element in ("uint4", "e2m1") else 1
    P = Packing(element, per_byte, 128, 128, 32 if zeros or scaled else 0, "float", zeros, False)
    exponent = triton.exponent(P, torch.bfloat16)
    scales, zero_points = (1.5, 0.75) if scaled else (1.0, 1.0), (5.0, 3.0) if zeros else (0.0, 0.0)
    added = _pair(*(triton._offset(P, torch.bfloat16) - zero for zero in zero_points))
    factor = _pair(*(scale * 2.0**exponent for scale in scales))
    left = 2.0 ** (triton._POST if exponent else 0)
    count = 4 * per_byte
    scale = torch.tensor(scales).repeat_interleave(count // 2)
    zero = torch.tensor(zero_points).repeat_interleave(count // 2)
    # The weights have every code in every position.
    generator = torch.Generator().manual_seed(0)
    codes = torch.stack([torch.randperm(256, generator=generator) for _ in range(count)], 1)
    codes = codes.to(torch.uint8) & (15 if per_byte == 2 else 255)
    values = codes
    if element == "e4m3":
        values = codes.view(torch.float8_e4m3fn)
    elif element == "int8":
        values = codes.view(torch.int8)
    elif element != "e2m1":
        values = codes.float() - (zero if zeros else -128 if is_raw else 8)
    expected = Codes(values, is_e2m1=element == "e2m1").dequantize() * scale
    code = ptx.unpacking(element, scaled or exponent != 0, zeros, is_raw)
    bits = layout.BITS.get(element, [range(8 * pair, 8 * pair + 8) for pair in range(2)])
    for own, want in zip(codes.tolist(), expected.to(torch.bfloat16).float(), strict=True):
        word = 0
        for number, value in enumerate(own):
            for bit, place in enumerate(bits[number // 2]):
                word |= (value >> bit & 1) << (place + number % 2 * 16) % 32
        done = _run_ptx(code, dict(enumerate((word, factor, added), count)))
        found = torch.tensor([done[f"${number}"] for number in range(count)])
        numbers = found.to(torch.int32).to(torch.int16).view(torch.bfloat16).float() * left
        finite = want.isfinite()  # Loaded weights are never NaN.
        assert torch.equal(numbers[finite], want[finite]), own


@jit
def _factors_kernel(scale_ptr, first_ptr, second_ptr, P: tl.constexpr, PART: tl.constexpr,
                    ENTRIES: tl.constexpr):  # fmt: skip
    rows, columns = tl.arange(0, 16)[:, None], tl.arange(0, 4)[None, :]
    scale = tl.load(scale_ptr + rows * ENTRIES + tl.arange(0, ENTRIES)[None, :])
    first, second = triton.convert_scales(scale, PART, P, tl.bfloat16)
    tl.store(first_ptr + rows * 4 + columns, first)
    tl.store(second_ptr + rows * 4 + columns, second)


@pytest.mark.parametrize("kind", ["e8m0", "e5m3", "float"])
@pytest.mark.parametrize("group", [16, full(32), full(64), 128])
@pytest.mark.parametrize(("element", "part"), [("e2m1", 0), full("e4m3", 0), ("e4m3", 1)])
def test_factors_of_a_word_are_two_in_bf16(
    element: str, part: int, group: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = 2 if element == "e2m1" else 1
    P = Packing(element, codes, 128, 128, group, kind, False, False)
    scale = torch.randint(100, 130, (16, 128 // group), dtype=torch.uint8, generator=_generator())
    number = scale.float() / 64
    if kind == "e8m0":
        number = 2.0 ** (scale.float() - 127)
    elif kind == "e5m3":
        number = (1 + (scale & 7) / 8) * 2.0 ** (scale.float().div(8).floor() - 23)
    runs = number.repeat_interleave(group // 16, 1)
    own = runs[:, 4 * part : 4 * part + 4]
    expected = (runs[:, ::2], runs[:, 1::2]) if codes == 2 else (own, own)
    held = (number if kind == "float" else scale).contiguous()
    held = held.view(torch.int32) if P.IN_WORDS else held
    for by_pairs in (False, True):
        monkeypatch.setattr(triton, "_converts_pairs", lambda DTYPE, by_pairs=by_pairs: by_pairs)
        found = torch.empty(2, 16, 4, dtype=torch.int32 if by_pairs else torch.float32)
        _factors_kernel[(1,)](held, found[0], found[1], P=P, PART=part, ENTRIES=held.shape[1])
        exponent = triton.exponent(P, torch.bfloat16)
        both = found
        if by_pairs:
            both = found[0].view(torch.bfloat16).view(16, 4, 2).permute(2, 0, 1).float()
        assert torch.equal(both, torch.stack(expected) * 2.0**exponent)


INT8, FP8 = cases.INT8_CHANNEL, cases.E4M3_CHANNEL
BOTH = pytest.mark.parametrize("stored", [INT8, FP8], ids=lambda stored: stored.name)


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
    packed = layout.pack(_stored(stored, 1, 200))
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
    dense = triton_w8a8.triton_packed.prepare(_stored(stored, 72, 160))
    experts = moe.prepare_packed(_stored(stored, 3, 80, 160), _stored(stored, 3, 160, 40))
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
    whole, x = _stored(stored, 130, 640), activations(65, 640)
    with torch.inference_mode():
        found = triton_w8a8.linear(x, triton_w8a8.triton_packed.prepare(whole)).float()
    expected = x.float() @ dequantize(stored, whole.tensors).t()
    assert error / 2 < (found - expected).norm() / expected.norm() < error
