"""Launch sizes of the norm kernels."""

import torch

from negamax.kernels import platform
from negamax.kernels.launch.tile import warps_of_row

# With 8 warps, times are within 1 % of the best on an H200, for 1 to 8192 rows of 3072 values. The
# Triton interpreter also uses 8 warps.
_NUM_WARPS = {"sm_90": 8, "cpu": 8}
_NOT_MEASURED = 4


def num_warps(device: torch.device, width: int) -> int:
    """Return the number of warps of a program, which normalizes one row."""
    measured = _NUM_WARPS.get(platform.platform_of(device).arch, _NOT_MEASURED)
    return warps_of_row(width, measured=measured)
