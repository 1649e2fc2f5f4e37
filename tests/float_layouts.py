"""FP8 and FP4 matrices as the tools that publish checkpoints lay them out, written and read back
with plain arithmetic: no packer and no dtype of the engine is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3(byte: int) -> float:
    """The number of an OCP E4M3 byte: sign, 4 bits of exponent (bias 7), 3 of mantissa."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def e4m3_fnuz(byte: int) -> float:
    """Of MI300: bias 8, no negative zero, whose bits are NaN, and no other NaN."""
    if byte == 0x80:
        return math.nan
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-10
    return sign * (8 + mantissa) * 2.0 ** (exponent - 11)


def e8m0(byte: int) -> float:
    """Of an exponent."""
    return math.nan if byte == 255 else 2.0 ** (byte - 127)


def e2m1(code: int) -> float:
    """Of 4 bits: sign, 2 of exponent, 1 of mantissa."""
    return -E2M1[code & 7] if code & 8 else E2M1[code]


def nearest(numbers: Tensor, table: Callable[[int], float], count: int) -> Tensor:
    """The code in 0 ... `count` - 1 whose number is nearest to each of `numbers`, uint8."""
    values = torch.tensor([table(code) for code in range(count)], dtype=torch.float64)
    order = values.nan_to_num(torch.inf).argsort(stable=True)
    values = values[order][: int((~values.isnan()).sum())]
    at = torch.bucketize(numbers.double().contiguous(), (values[1:] + values[:-1]) / 2)
    return order[at].to(torch.uint8)


def groups(weight: Tensor, columns: int) -> Tensor:
    """The largest magnitude of each row's groups of columns."""
    return weight.abs().unflatten(1, (-1, columns)).amax(2).double()


def spread(scale: Tensor, columns: int) -> Tensor:
    return scale.repeat_interleave(columns, 1)


def nibbles(codes: Tensor) -> Tensor:
    """Two codes in a byte, the even column in the low nibble."""
    return codes[:, 0::2] + 16 * codes[:, 1::2]


@dataclass(frozen=True)
class Layout:
    """`write`: a matrix [N, K] -> its tensors by the names behind the module's. `read`: these, a
    row and a column -> the number there.
    """

    write: Callable[[Tensor], dict[str, Tensor]]
    read: Callable[[dict[str, Tensor], int, int], float]


def _bits(tensor: Tensor, *at: int) -> int:
    return int(tensor.view(torch.uint8)[at])


# --- FP4 ------------------------------------------------------------------------------------------


def _nvfp4(values: str, whole: str, *, divides: bool, activation: str | None) -> Layout:
    def write(weight: Tensor) -> dict[str, Tensor]:
        total = weight.abs().max().double() / (6 * 448)
        scale = nearest(groups(weight, 16) / 6 / total, e4m3, 127)
        step = (
            torch.tensor([e4m3(b) for b in range(127)], dtype=torch.float64)[scale.long()] * total
        )
        codes = nearest(weight / spread(step, 16).clamp_min(1e-30), e2m1, 16)
        tensors = {
            values: nibbles(codes),
            "weight_scale": scale.view(torch.float8_e4m3fn),
            whole: (1 / total if divides else total).float().reshape(1 if divides else ()),
        }
        if activation:
            tensors[activation] = torch.tensor([37.5] if divides else 0.0123)
        return tensors

    def read(tensors: dict[str, Tensor], n: int, k: int) -> float:
        code = _bits(tensors[values], n, k // 2) >> 4 * (k % 2) & 15
        total = float(tensors[whole])
        number = e2m1(code) * e4m3(_bits(tensors["weight_scale"], n, k // 16))
        return number / total if divides else number * total

    return Layout(write, read)


def _mxfp4(values: str) -> Layout:
    def write(weight: Tensor) -> dict[str, Tensor]:
        exponent = torch.log2(groups(weight, 32) / 6).ceil()
        codes = nearest(weight / spread(2**exponent, 32), e2m1, 16)
        return {values: nibbles(codes), "weight_scale": (exponent + 127).to(torch.uint8)}

    def read(tensors: dict[str, Tensor], n: int, k: int) -> float:
        code = _bits(tensors[values], n, k // 2) >> 4 * (k % 2) & 15
        return e2m1(code) * e8m0(_bits(tensors["weight_scale"], n, k // 32))

    return Layout(write, read)


# --- FP8 ------------------------------------------------------------------------------------------


def _mxfp8(scale: str) -> Layout:
    def write(weight: Tensor) -> dict[str, Tensor]:
        exponent = torch.log2(groups(weight, 32) / 448).ceil()
        codes = nearest(weight / spread(2**exponent, 32), e4m3, 256)
        values = codes.view(torch.float8_e4m3fn)
        return {"weight": values, scale: (exponent + 127).to(torch.uint8)}

    def read(tensors: dict[str, Tensor], n: int, k: int) -> float:
        return e4m3(_bits(tensors["weight"], n, k)) * e8m0(_bits(tensors[scale], n, k // 32))

    return Layout(write, read)


def _fp8(
    block: tuple[int, int] | None,
    *,
    scale: str = "weight_scale",
    shape: Callable[[Tensor], Tensor] = lambda scale: scale,
    fnuz: bool = False,
    dtype: torch.dtype | None = None,
    activation: str | None = None,
) -> Layout:
    """`block`: rows and columns (0: all of them) that share a scale; None: all of the matrix."""
    number, largest = (e4m3_fnuz, 240.0) if fnuz else (e4m3, 448.0)
    dtype = dtype or (torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn)

    def sizes(weight: Tensor) -> tuple[int, int]:
        rows, columns = block or (0, 0)
        return rows or weight.shape[0], columns or weight.shape[1]

    def write(weight: Tensor) -> dict[str, Tensor]:
        rows, columns = sizes(weight)
        grid = torch.zeros(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        codes = torch.empty(weight.shape, dtype=torch.uint8)
        for i in range(grid.shape[0]):
            for j in range(grid.shape[1]):
                part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                grid[i, j] = weight[part].abs().max() / largest
                codes[part] = nearest(weight[part] / grid[i, j], number, 256)
        tensors = {"weight": codes.view(dtype), scale: shape(grid)}
        if activation:
            tensors[activation] = torch.tensor(0.0123)
        return tensors

    def read(tensors: dict[str, Tensor], n: int, k: int) -> float:
        rows, columns = sizes(tensors["weight"])
        grid = tensors[scale].reshape(-1, -(-tensors["weight"].shape[1] // columns))
        return number(_bits(tensors["weight"], n, k)) * float(grid[n // rows, k // columns])

    return Layout(write, read)


def _number(scale: Tensor) -> Tensor:
    return scale.reshape(())


LAYOUTS = {
    "modelopt nvfp4": _nvfp4("weight", "weight_scale_2", divides=False, activation="input_scale"),
    "modelopt w4a16": _nvfp4("weight", "weight_scale_2", divides=False, activation=None),
    "modelopt mxfp8": _mxfp8("weight_scale"),
    "modelopt fp8": _fp8(None, shape=_number, activation="input_scale"),
    "modelopt fp8 channel": _fp8((1, 0), shape=lambda scale: scale.reshape(-1)),
    "modelopt fp8 block": _fp8((128, 128), shape=lambda scale: scale[:, None, :, None]),
    "mxfp8": _mxfp8("weight_scale_inv"),
    "quark mxfp4": _mxfp4("weight"),
    "quark nvfp4": _nvfp4("weight", "weight_scale_2", divides=False, activation="input_scale_2"),
    "quark fp8": _fp8(None, shape=_number, activation="input_scale"),
    "quark fp8 channel": _fp8((1, 0), shape=lambda scale: scale.reshape(-1)),
    "compressed-tensors nvfp4": _nvfp4(
        "weight_packed", "weight_global_scale", divides=True, activation="input_global_scale"
    ),
    "compressed-tensors mxfp4": _mxfp4("weight_packed"),
    "fp8": _fp8(None, shape=_number),
    "fp8 static": _fp8(None, shape=_number, activation="input_scale"),
    "fp8 fnuz": _fp8((128, 128), scale="weight_scale_inv", fnuz=True),
    "fp8 fnuz bits": _fp8(
        (128, 128), scale="weight_scale_inv", fnuz=True, dtype=torch.float8_e4m3fn
    ),
}  # fmt: skip
