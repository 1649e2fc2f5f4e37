"""Build masks of allowed tokens. Bit i of byte j in a mask allows token 8 j + i."""

from collections.abc import Iterable
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.uint8]  # [ceil(vocabulary / 8)], read-only; bit i of byte j allows token 8 j + i


class MaskMaker:
    """Builds and caches masks that allow one token, or all tokens except given tokens."""

    def __init__(self, vocab_size: int) -> None:
        # The cache of masks is small, because each request can have different stop tokens.
        self._make = lru_cache(maxsize=64)(partial(_make_mask, vocab_size))

    def only(self, token_id: int) -> Mask:
        return self._make(frozenset((token_id,)), True)

    def all_but(self, token_ids: frozenset[int]) -> Mask:
        return self._make(token_ids, False)

    def exclude(self, mask: Mask, token_ids: Iterable[int]) -> Mask:
        """Return a copy of `mask` without `token_ids`; return `mask` if the copy would be empty."""
        made = mask.copy()
        for token_id in token_ids:
            made[token_id // 8] &= 0xFF ^ (1 << token_id % 8)
        return made if made.any() else mask


def _make_mask(vocab_size: int, token_ids: frozenset[int], is_allowed: bool) -> Mask:
    bits = np.full(vocab_size, not is_allowed, dtype=np.uint8)
    bits[list(token_ids)] = is_allowed
    return np.packbits(bits, bitorder="little")


def allows(mask: Mask, token_id: int) -> bool:
    return bool(mask[token_id // 8] >> (token_id % 8) & 1)
