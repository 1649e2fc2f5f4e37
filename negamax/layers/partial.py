"""The result of a block split over ranks: a part of a sum that the next norm completes."""

from dataclasses import dataclass

from torch import Tensor

from negamax.kernels.peers import Collective


@dataclass(frozen=True)
class Partial:
    """This rank's part of the sum over `group`. `RmsNorm` completes it, together with the residual
    add and the norm.
    """

    x: Tensor  # [T, width], or [T, P, width] with P parts to sum
    group: Collective
