"""Round a plain matrix to the nearest codes, the inverse of `Codes.dequantize`.

Scales are rounded to their stored dtype before codes are computed, so each code is the nearest code
for the stored scale. A group of zeros has scale 1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from negamax.formats.floats import E4M3_MAX
from negamax.kernels.quantize.codes import E2M1_VALUES, Codes

E2M1_MAX = E2M1_VALUES[-1]


def to_e4m3(
    matrix: Tensor,
    block: tuple[int, int],
    *,
    largest: float = E4M3_MAX,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> Codes:
    """Quantize matrix [N, K] fp32 to e4m3, scaled so that a block's maximum becomes `largest`."""
    scale = _positive(_largest(matrix, block) / largest)
    values = (matrix / _spread(scale, block, matrix)).clamp_(-largest, largest)
    return Codes(values.to(dtype), scale, block)


def to_integers(
    matrix: Tensor, bits: int, columns: int, *, scale_dtype: torch.dtype = torch.float32
) -> Codes:
    """Quantize matrix [N, K] fp32 to symmetric int8 codes of `bits` bits, with group scales.

    The scale per row and `columns` columns is the largest magnitude / ((2^bits - 1) / 2), as in
    compressed-tensors. If the largest element is positive, clamping reduces its code by half a
    step. Quantization steps are smaller than with the divisor 2^(bits - 1) - 1.
    """
    least = -(2 ** (bits - 1))
    block = (1, columns)
    scale = _positive(_largest(matrix, block) / (-least - 0.5), scale_dtype)
    values = (matrix / _spread(scale.float(), block, matrix)).round_().clamp_(least, -least - 1)
    return Codes(values.to(torch.int8), scale, block)


def to_e4m3_powers(matrix: Tensor, columns: int, *, rows: int = 1) -> Codes:
    """Quantize matrix [N, K] fp32 to e4m3 with an e8m0 scale per `rows` rows and `columns` columns.

    The scale is the least power of two with which no element exceeds 448. The formula of the OCP
    standard would round the scale down, and large elements would saturate.
    """
    block = (rows, columns)
    scale = _power_of_two(_largest(matrix, block) / E4M3_MAX)
    values = (matrix / _spread(scale.float(), block, matrix)).clamp_(-E4M3_MAX, E4M3_MAX)
    return Codes(values.to(torch.float8_e4m3fn), scale, block)


def to_e2m1_powers(matrix: Tensor, columns: int) -> Codes:
    """Quantize matrix [N, K] fp32 to FP4 (largest value 6) with powers of two as scales."""
    block = (1, columns)
    scale = _power_of_two(_largest(matrix, block) / E2M1_MAX)
    return Codes(_e2m1(matrix / _spread(scale.float(), block, matrix)), scale, block, is_e2m1=True)


def to_e2m1(matrix: Tensor, columns: int) -> Codes:
    """Quantize matrix [N, K] fp32 to FP4 with an e4m3 scale per row and `columns` columns.

    The e4m3 scales share one fp32 scale: the largest magnitude of the matrix / (6 * 448).
    """
    block = (1, columns)
    groups = _largest(matrix, block) / E2M1_MAX
    whole = _positive(groups.amax().reshape(1) / E4M3_MAX)
    scale = (groups / whole).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn)
    # a group that is tiny compared with the largest group has scale 0 and elements 0
    divisor = scale.float().where(scale.float() > 0, torch.inf) * whole
    return Codes(
        _e2m1(matrix / _spread(divisor, block, matrix)), scale, block, global_scale=whole,
        is_e2m1=True,
    )  # fmt: skip


def _largest(matrix: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the largest magnitude of each block; blocks at the edges may be smaller."""
    rows, columns = block[0], min(block[1], matrix.shape[1])
    height, width = matrix.shape
    padded = F.pad(matrix.abs(), (0, -width % columns, 0, -height % rows))
    blocks: Tensor = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return blocks.amax(dim=(1, 3))


def _spread(scale: Tensor, block: tuple[int, int], matrix: Tensor) -> Tensor:
    """Repeat the entry of each block for the rows of the block, and also for the columns of the
    block if a row has several blocks.
    """
    height, width = matrix.shape
    scale = scale.repeat_interleave(block[0], 0)[:height] if block[0] > 1 else scale
    if scale.shape[1] == 1:
        return scale
    return scale.repeat_interleave(block[1], 1)[:, :width]


def _positive(scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert `scale` to `dtype`; 0 becomes 1, and the conversion rounds no other scale to 0."""
    stored = scale.to(dtype).clamp_min(torch.finfo(torch.bfloat16).tiny)
    return stored.where(scale != 0, 1.0)


def _power_of_two(scale: Tensor) -> Tensor:
    """Return the least power of two >= `scale` as e8m0; 1 for zeros."""
    mantissa, exponent = torch.frexp(scale)  # mantissa in [0.5, 1)
    exponent = exponent - (mantissa == 0.5).int()
    biased = (exponent + 127).clamp(0, 254).where(scale != 0, 127)
    return biased.to(torch.uint8).view(torch.float8_e8m0fnu)


def _e2m1(numbers: Tensor) -> Tensor:
    """Return the nearest FP4 code of each number as uint8; ties go to the even code."""
    size = numbers.abs()
    upper = (2 + size.round()).where(size < 4, 4 + (size / 2).round())
    code = (2 * size).round().where(size < 2, upper).clamp_(max=7)
    return (code + 8 * torch.signbit(numbers)).to(torch.uint8)
