"""Convert E4M3 and E2M1 to fp32 on the CPU, several times as fast as PyTorch.

PyTorch converts one value at a time. This code shifts the bits of a value to the fields of fp16.
The fp16 number has the same mantissa and an exponent that is too small by a constant, and vector
instructions convert fp16 to fp32. The code converts a block of rows at a time, in cache.
"""

import torch
from torch import Tensor

from negamax.formats.floats import E4M3_GROUP

_FP16_BITS = 0xBF80 - 2**16  # int16 mask of the sign bit and of an E4M3 byte's lower 7 bits << 7
_E2M1_BITS = 0x8E00 - 2**16  # int16 mask of the sign bit and of an E2M1 code's lower 3 bits << 9
_NAN = 0x7F  # bits that are all set in an E4M3 NaN, and in no other value
_FNUZ_NAN = -0x80  # byte 0x80 as int8, the only NaN of E4M3FNUZ


def dequantize_block(
    weight: Tensor,  # [N, K] float8_e4m3fn
    scale: Tensor,  # [ceil(N / 128), ceil(K / 128)] fp32
) -> Tensor:  # [N, K] fp32
    """Dequantize a weight in fp32, with one scale per block. NaN stays NaN."""
    rows, columns = weight.shape
    stored = weight.view(torch.int8)
    has_nan = bool(stored.numel() and stored.bitwise_and(_NAN).amax() == _NAN)
    plain = torch.empty(rows, columns, dtype=torch.float32, device=weight.device)
    for row, first in enumerate(range(0, rows, E4M3_GROUP)):
        part, out = stored[first : first + E4M3_GROUP], plain[first : first + E4M3_GROUP]
        _decode(part, out, shift=7, bits=_FP16_BITS, factor=2.0**8)
        if has_nan:
            out.masked_fill_(part.bitwise_and(_NAN) == _NAN, torch.nan)
        out.mul_(scale[row].repeat_interleave(E4M3_GROUP)[:columns])
    return plain


def e4m3_numbers(values: Tensor) -> Tensor:
    """Convert values [..., K] float8_e4m3fn or float8_e4m3fnuz to fp32."""
    stored = values.view(torch.int8)
    if values.dtype is torch.float8_e4m3fnuz:
        numbers, is_nan = _numbers(stored, 7, _FP16_BITS, 2.0**7), stored == _FNUZ_NAN
    else:
        numbers = _numbers(stored, 7, _FP16_BITS, 2.0**8)
        is_nan = stored.bitwise_and(_NAN) == _NAN
    return numbers.masked_fill_(is_nan, torch.nan) if bool(is_nan.any()) else numbers


def e2m1_numbers(codes: Tensor) -> Tensor:
    """Convert codes [..., K] uint8, 0 to 15, to fp32."""
    return _numbers((codes << 4).view(torch.int8), 5, _E2M1_BITS, 2.0**14)


def _numbers(stored: Tensor, shift: int, bits: int, factor: float) -> Tensor:
    numbers = torch.empty(stored.shape, dtype=torch.float32, device=stored.device)
    width = stored.shape[-1] if stored.dim() else 1
    if stored.numel() == 0:
        return numbers
    rows, out = stored.reshape(-1, width), numbers.view(-1, width)
    for first in range(0, len(rows), E4M3_GROUP):
        part = slice(first, first + E4M3_GROUP)
        _decode(rows[part], out[part], shift=shift, bits=bits, factor=factor)
    return numbers


def _decode(stored: Tensor, out: Tensor, *, shift: int, bits: int, factor: float) -> None:
    shifted = stored.to(torch.int16).bitwise_left_shift_(shift).bitwise_and_(bits)
    out.copy_(shifted.view(torch.float16)).mul_(factor)
