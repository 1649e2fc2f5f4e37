"""Codes: a quantised matrix with one entry per element, however a checkpoint packs it.

A format's `unpack` gives them; dequantisation, kernels and quantisers go on from there, so that
none of them knows how a checkpoint lays out its nibbles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from negamax.kernels.formats import E4M3_GROUP
from negamax.kernels.quantize.cpu import dequantize_block

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; bit 3 is the sign


@dataclass(frozen=True)
class Codes:
    """value[n, k] = (number of code[n, k] - zero_point[n, g]) * scale[n / rows, g] * global_scale,
    where g is the column's group: k / columns, or group_of[k].

    The dtype of `values` says what a code is: floating point and signed integers are the number
    itself, uint8 is unsigned 4 or 8 bits, or, with `is_e2m1`, a code of FP4.
    """

    values: Tensor  # [..., N, K] float, e4m3, int8 or uint8
    scale: Tensor | None = None  # [..., ceil(N / rows), groups] float, e4m3 or e8m0
    block: tuple[int, int] = (1, 1)  # rows and columns that share a scale
    zero_point: Tensor | None = None  # [..., ceil(N / rows), groups] uint8
    global_scale: Tensor | None = None  # [...], [..., 1] or, one per row, [..., N] fp32
    group_of: Tensor | None = None  # [K] int32, where columns belong to groups by a stored order
    is_e2m1: bool = False

    def dequantize(self) -> Tensor:
        """The matrix [..., N, K] in fp32."""
        rows, columns = self.block
        if self.scale is None:
            return self._numbers()
        is_e4m3 = self.values.dtype is torch.float8_e4m3fn
        if is_e4m3 and self.values.dim() == 2 and rows == columns == E4M3_GROUP:
            return dequantize_block(self.values, self.scale)
        numbers = self._numbers()
        height, width = numbers.shape[-2:]

        def spread(each: Tensor) -> Tensor:
            """One entry per group -> per element."""
            each = each.float()
            each = each.repeat_interleave(rows, -2)[..., :height, :] if rows > 1 else each
            if self.group_of is not None:
                return each[..., self.group_of.long()]
            if each.shape[-1] == 1:
                return each
            return each.repeat_interleave(columns, -1)[..., :width]

        if self.zero_point is not None:
            numbers = numbers - spread(self.zero_point)
        numbers = numbers * spread(self.scale)
        if self.global_scale is not None:
            numbers = numbers * self.global_scale.float().reshape(*numbers.shape[:-2], -1, 1)
        return numbers

    def tensors(self, values: str, scale: str) -> dict[str, Tensor]:
        """Values and scales by these names."""
        assert self.scale is not None
        return {values: self.values, scale: self.scale}

    def _numbers(self) -> Tensor:
        """What the codes stand for, fp32."""
        if not self.is_e2m1:
            return self.values.float()
        table = torch.tensor(E2M1_VALUES, device=self.values.device)
        return torch.cat((table, -table))[self.values.long()]
