"""Packing of 2, 4 and 8 bit integers in 32-bit words (AWQ, GPTQ), and of FP4 codes in bytes."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# The nibble of each of the 8 numbers of a word in AWQ; for example, number 1 is in nibble 4.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack(words: Tensor, bits: int, *, axis: int = -1, order: Sequence[int] = ()) -> Tensor:
    """Unpack int32 words along dimension `axis`: each word yields 32 / bits numbers in uint8.

    The first bit of number i of a word is bits * order[i], or bits * i if `order` is empty.
    """
    axis %= words.dim()
    mask = (1 << bits) - 1
    numbers = [
        ((words >> bits * place) & mask).to(torch.uint8) for place in order or range(32 // bits)
    ]
    return torch.stack(numbers, axis + 1).flatten(axis, axis + 1)


def pack(numbers: Tensor, bits: int, *, axis: int = -1, order: Sequence[int] = ()) -> Tensor:
    """Pack numbers into words, the inverse of `unpack`; zeros fill a partial last word."""
    axis %= numbers.dim()
    per_word = 32 // bits
    padding = [0, 0] * (numbers.dim() - 1 - axis) + [0, -numbers.shape[axis] % per_word]
    apart = F.pad(numbers.int(), padding).unflatten(axis, (-1, per_word)).unbind(axis + 1)
    words = torch.zeros_like(apart[0])
    for number, place in zip(apart, order or range(per_word), strict=True):
        words |= number << bits * place
    return words


def nibbles(packed: Tensor) -> Tensor:
    """Unpack uint8 [..., K / 2] to codes [..., K]; the low nibble holds the even column."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack codes [..., K] into bytes; a zero fills a partial last byte."""
    even, odd = F.pad(codes, (0, codes.shape[-1] % 2)).unflatten(-1, (-1, 2)).unbind(-1)
    packed: Tensor = even + (odd << 4)
    return packed
