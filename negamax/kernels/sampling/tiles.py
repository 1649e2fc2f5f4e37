"""Launch sizes of the sampling kernels."""

from __future__ import annotations

PICK_TILE = 1024  # logits of one program
PICK_WARPS = 4
STRIP_TILE = 4096  # logits of one program that keeps the largest of every strip
STRIP_WARPS = 4
DRAW_WARPS = 8


def strip(vocab: int) -> int:
    """Logits that share a maximum: there are some thousand strips in a row, and some thousand
    logits in the leading ones.
    """
    return 32 if vocab <= 1 << 17 else 64
