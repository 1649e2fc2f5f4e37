"""The experts of each rank of a group."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ExpertRanges:
    """Rank r has `count` experts, from firsts[r] on."""

    firsts: Tensor  # [ranks] int32
    count: int
