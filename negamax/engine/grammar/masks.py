"""Build masks of allowed tokens. Bit i of byte j of a mask allows token 8 j + i."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.uint8]  # [ceil(vocabulary / 8)], read-only


class MaskMaker:
    """Builds masks that need no grammar. Rows of a batch share the cached masks."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._only: dict[int, Mask] = {}
        self._all_but: dict[frozenset[int], Mask] = {}

    def only(self, token_id: int) -> Mask:
        mask = self._only.get(token_id)
        if mask is None:
            bits = np.zeros(self._vocab_size, dtype=np.uint8)
            bits[token_id] = 1
            mask = self._only[token_id] = np.packbits(bits, bitorder="little")
        return mask

    def all_but(self, token_ids: frozenset[int]) -> Mask:
        mask = self._all_but.get(token_ids)
        if mask is None:
            bits = np.ones(self._vocab_size, dtype=np.uint8)
            bits[list(token_ids)] = 0
            if len(self._all_but) >= 64:  # bounds the cache, as requests add their stop tokens
                self._all_but.clear()
            mask = self._all_but[token_ids] = np.packbits(bits, bitorder="little")
        return mask

    def exclude(self, mask: Mask, token_ids: Iterable[int]) -> Mask:
        """Return `mask` without `token_ids`, or `mask` itself if no token would be allowed."""
        made = mask.copy()
        for token_id in token_ids:
            made[token_id // 8] &= 0xFF ^ (1 << token_id % 8)
        return made if made.any() else mask


def allows(mask: Mask, token_id: int) -> bool:
    return bool(mask[token_id // 8] >> (token_id % 8) & 1)
