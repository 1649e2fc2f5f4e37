import itertools

import pytest
import torch
from torch import Tensor

from negamax.kernels.quantize.codes import E2M1_VALUES, Codes

ROWS, COLUMNS = 6, 20
VALUES = {
    "uint4": torch.randint(0, 16, (ROWS, COLUMNS), dtype=torch.uint8),
    "int8": torch.randint(-128, 128, (ROWS, COLUMNS), dtype=torch.int8),
    "e4m3": torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn),
    "e2m1": torch.arange(ROWS * COLUMNS).remainder(16).reshape(ROWS, COLUMNS).to(torch.uint8),
}
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu)


def number(codes: Codes, code: Tensor) -> float:
    if not codes.is_e2m1:
        return float(code)
    value = E2M1_VALUES[int(code) & 7]
    return -value if int(code) & 8 else value


@pytest.mark.parametrize("dtype", SCALE_DTYPES, ids=str)
@pytest.mark.parametrize("element", VALUES)
@pytest.mark.parametrize("block", [(1, 8), (1, 1000), (4, 8)], ids=str)
@pytest.mark.parametrize("extras", ["", "zeros", "global", "rows", "order"])
def test_every_entry_follows_the_formula(
    element: str, block: tuple[int, int], dtype: torch.dtype, extras: str
) -> None:
    shape = (-(-ROWS // block[0]), -(-COLUMNS // block[1]))
    scale = torch.rand(shape).add(0.5).to(dtype)
    order = torch.arange(COLUMNS).flip(0) // block[1]
    whole = {"global": torch.tensor(0.375), "rows": torch.rand(ROWS)}
    codes = Codes(
        VALUES[element],
        scale,
        block,
        zero_point=torch.randint(0, 16, shape, dtype=torch.uint8) if extras == "zeros" else None,
        global_scale=whole.get(extras),
        group_of=order.int() if extras == "order" else None,
        is_e2m1=element == "e2m1",
    )
    plain = codes.dequantize()
    assert plain.dtype == torch.float32
    for n, k in itertools.product(range(ROWS), range(COLUMNS)):
        group = n // block[0], int(order[k]) if extras == "order" else k // block[1]
        value = number(codes, codes.values[n, k])
        if codes.zero_point is not None:
            value -= float(codes.zero_point[group])
        value *= float(scale[group].float())
        if codes.global_scale is not None:
            value *= float(codes.global_scale.expand(ROWS)[n])
        assert float(plain[n, k]) == pytest.approx(value, rel=1e-6), (n, k)


def test_stacked_matrices_have_their_own_scales() -> None:
    values = torch.randint(-128, 128, (3, ROWS, COLUMNS), dtype=torch.int8)
    scale, whole = torch.rand(3, ROWS, 1), torch.rand(3, 1)
    stacked = Codes(values, scale, (1, COLUMNS), global_scale=whole).dequantize()
    for n in range(3):
        alone = Codes(values[n], scale[n], (1, COLUMNS), global_scale=whole[n]).dequantize()
        assert torch.equal(stacked[n], alone)
