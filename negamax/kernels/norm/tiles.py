"""Launch sizes of the norm kernels."""

import torch

from negamax.kernels import platform
from negamax.kernels.launch.tile import warps_of_row

# For rows of 3072 values: the best on an H200, or within 1 % of it, from 1 to 8192 rows. The
# interpreter uses the same.
_NUM_WARPS = {"sm_90": 8, "cpu": 8}
_NOT_MEASURED = 4


def num_warps(device: torch.device, width: int) -> int:
    """Warps of the program of one row."""
    measured = _NUM_WARPS.get(platform.platform_of(device).arch, _NOT_MEASURED)
    return warps_of_row(width, measured=measured)
