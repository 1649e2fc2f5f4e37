"""Launch sizes of the sampling kernels."""

from __future__ import annotations

PICK_TILE = 1024  # logits of one program
PICK_WARPS = 4
SORT_ROWS = 16  # up to so many rows two rounds of partial sorting are faster than torch.topk (H200: 21 us to 50 for one row)
SORT_TILE = 2048  # logits of one program that keeps the leading ones
SORT_WARPS = 4
MERGE_WARPS = 8
