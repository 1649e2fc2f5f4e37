"""Launch sizes of the sampling kernels."""

from dataclasses import dataclass

import torch

from negamax.kernels import platform


@dataclass(frozen=True)
class SamplingTiles:
    """Default launch sizes, which were not measured."""

    pick_block: int = 1024  # number of logits that a program of `pick` reads
    strip_block: int = 4096  # number of logits per program that finds the maximum of every strip
    draw_warps: int = 4  # number of warps of a program that draws the token of a row


_H200 = SamplingTiles(draw_warps=8)  # measured on an H200
_BY_ARCH = {"sm_90": _H200, "cpu": _H200}  # "cpu": Triton's interpreter


def tiles_for(device: torch.device) -> SamplingTiles:
    return _BY_ARCH.get(platform.platform_of(device).arch, SamplingTiles())


def strip(vocab: int) -> int:
    """Return the number of logits per strip; all selected strips together have a few thousand."""
    return 32 if vocab <= 1 << 17 else 64
