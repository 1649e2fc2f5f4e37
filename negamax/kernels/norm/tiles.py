"""Launch sizes of the norm kernels."""

from __future__ import annotations

# of the program that holds one row of 3072; on an H200 the best or within 1 % of it from 1 to 8192
# rows
WARPS = 8
