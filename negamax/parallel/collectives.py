"""What ranks say to each other: sums and concatenations over one group. `torch.distributed` stays behind these classes."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Collective(Protocol):
    """A group of ranks, of which this process is one."""

    size: int
    rank: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of every rank's `tensor`, on every rank."""

    def all_gather(self, tensor: Tensor, *, dim: int) -> Tensor:
        """Every rank's `tensor` (of one shape), concatenated along `dim` in rank order."""


class Alone:
    """The group of one rank: nothing to say, and no torch.distributed."""

    size = 1
    rank = 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, *, dim: int) -> Tensor:
        return tensor


class ProcessGroup:
    """Collectives over one torch.distributed group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum in fp32 and in rank order, rounded once.

        A ring's order of summation depends on the size of the tensor, and so would a token's result on the batch it is in.
        """
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._group)
        total = parts[0].float()
        for part in parts[1:]:
            total = total.add_(part)
        return total.to(tensor.dtype)

    def all_gather(self, tensor: Tensor, *, dim: int) -> Tensor:
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return torch.cat(parts, dim=dim)
