"""Codes represent a quantized matrix with one entry per element, however a checkpoint packs it.

`stored.decode` makes codes. Dequantization, kernels and quantizers work on codes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from negamax.formats.floats import E4M3_GROUP
from negamax.kernels.quantize.cpu import dequantize_block, e2m1_numbers, e4m3_numbers

_E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # values of codes 0 to 7; bit 3 is the sign


@dataclass(frozen=True)
class Codes:
    """value[n, k] = (code[n, k] - zero_point[n, g]) * scale[n / rows, g] * global_scale

    g is the column's group: k / columns, or group_of[k]. Codes with a floating-point or signed
    integer dtype are the numbers themselves. uint8 codes are integers, or FP4 with `is_e2m1`.
    """

    values: Tensor  # [..., N, K] float, e4m3, int8 or uint8
    scale: Tensor | None = None  # [..., ceil(N / rows), groups] float, e4m3 or e8m0
    block: tuple[int, int] = (1, 1)  # number of rows and columns that share a scale
    zero_point: Tensor | None = None  # [..., ceil(N / rows), groups] uint8
    global_scale: Tensor | None = None  # fp32, [...] or [..., 1], or one per row: [..., N]
    group_of: Tensor | None = None  # [K] int32, group of each column; None: given by `block`
    is_e2m1: bool = False

    def dequantize(self) -> Tensor:
        """Return the matrix [..., N, K] in fp32."""
        rows, columns = self.block
        if self.scale is None:
            return self._numbers()
        is_e4m3 = self.values.dtype is torch.float8_e4m3fn
        if is_e4m3 and self.values.dim() == 2 and rows == columns == E4M3_GROUP:
            return dequantize_block(self.values, self.scale)
        numbers = self._numbers()
        numbers = numbers.clone() if numbers is self.values else numbers
        height, width = numbers.shape[-2:]
        # whether the columns divide into groups of equal size, each with its own scale
        is_even = self.group_of is None and width % columns == 0 and self.scale.shape[-1] > 1
        grouped = numbers.unflatten(-1, (-1, columns)) if is_even else numbers

        def spread(each: Tensor) -> Tensor:
            """Expand `each` (one entry per group) to a shape that broadcasts to `grouped`."""
            each = _floats(each)
            each = each.repeat_interleave(rows, -2)[..., :height, :] if rows > 1 else each
            if is_even:
                return each.unsqueeze(-1)
            if self.group_of is not None:
                order = self.group_of.long()
                if numbers.stride(-1) == 1:
                    return each.contiguous().index_select(-1, order)
                # GPTQ's codes are column-major, so expanding scales row by row would be slow
                return each.mT.contiguous().index_select(-2, order).mT
            if each.shape[-1] == 1:
                return each
            return each.repeat_interleave(columns, -1)[..., :width]

        if self.zero_point is not None:
            grouped.sub_(spread(self.zero_point))
        grouped.mul_(spread(self.scale))
        if self.global_scale is not None:
            numbers.mul_(self.global_scale.float().reshape(*numbers.shape[:-2], -1, 1))
        return numbers

    def _numbers(self) -> Tensor:
        return e2m1_numbers(self.values) if self.is_e2m1 else _floats(self.values)


def _floats(numbers: Tensor) -> Tensor:
    return e4m3_numbers(numbers) if numbers.dtype in _E4M3 else numbers.float()
