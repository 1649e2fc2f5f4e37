"""Launch sizes of the norm kernels."""

import torch

from negamax.kernels import platform
from negamax.kernels.launch.tile import warps_of_row

# Within 1 % of the best number on an H200, with 1 to 8192 rows of 3072 values. The interpreter
# uses the same number.
_NUM_WARPS = {"sm_90": 8, "cpu": 8}
_NOT_MEASURED = 4


def num_warps(device: torch.device, width: int) -> int:
    """Return the warps of a program, which has one row."""
    measured = _NUM_WARPS.get(platform.platform_of(device).arch, _NOT_MEASURED)
    return warps_of_row(width, measured=measured)
