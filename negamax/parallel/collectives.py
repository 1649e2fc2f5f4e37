"""Sum and concatenate tensors over a group of ranks with `torch.distributed`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from negamax.base.errors import EngineDeadError
from negamax.kernels.peers import Collective, PeerMemory

if TYPE_CHECKING:
    from negamax.parallel.symmetric import SharedBuffer

__all__ = ["Collective", "Partial", "ProcessGroup", "SingleRank"]


@dataclass(frozen=True)
class Partial:
    """One rank's summand of a tensor. `RmsNorm` adds the summands of all ranks of `group`."""

    x: Tensor  # [T, width], or [T, P, width] with P summands of this rank
    group: Collective


class SingleRank:
    """A group of one rank, which neither communicates nor uses torch.distributed."""

    size = 1
    rank = 0
    peers: PeerMemory | None = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, *, dim: int) -> Tensor:
        return tensor

    def exchange(
        self, *, sent: tuple[Tensor, int] | None, received: tuple[Tensor, int] | None
    ) -> None:
        assert sent is None and received is None, "there is no other rank"


class ProcessGroup:
    """Collectives of a torch.distributed group. CPU tensors use gloo, and GPU tensors use NCCL."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        peers: PeerMemory | None = None,
        shared: SharedBuffer | None = None,
    ) -> None:
        self._group = group
        self._shared = shared
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.peers = peers

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the ranks. The result is `tensor` itself, or a buffer that the next
        call overwrites. CPU tensors are summed in fp32 in rank order, so a token's result does not
        depend on its batch. On GPUs, norm kernels sum small tensors in rank order.
        """
        if tensor.is_cuda:
            if self._shared is not None and self._shared.fits(tensor):
                return self._shared.all_reduce(tensor)
            tensor = tensor.contiguous()
            dist.all_reduce(tensor, group=self._group)
            return tensor
        total = torch.zeros(tensor.shape, dtype=torch.float32)
        for part in self._gather(tensor):
            total = total.add_(part)
        return total.to(tensor.dtype)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the ranks, and return this rank's equal part of the sum's rows."""
        assert tensor.shape[0] % self.size == 0, f"{tensor.shape[0]} rows over {self.size} ranks"
        rows = tensor.shape[0] // self.size
        if not tensor.is_cuda:
            return self.all_reduce(tensor)[self.rank * rows : (self.rank + 1) * rows]
        out = tensor.new_empty(rows, *tensor.shape[1:])
        dist.reduce_scatter_tensor(out, tensor.contiguous(), group=self._group)
        return out

    def all_gather(self, tensor: Tensor, *, dim: int) -> Tensor:
        if dim == 0 and tensor.dim() and tensor.is_cuda:  # Each rank's part of `out` is contiguous.
            out = tensor.new_empty(self.size * tensor.shape[0], *tensor.shape[1:])
            dist.all_gather_into_tensor(out, tensor.contiguous(), group=self._group)
            return out
        return torch.cat(self._gather(tensor), dim=dim)

    def exchange(
        self, *, sent: tuple[Tensor, int] | None, received: tuple[Tensor, int] | None
    ) -> None:
        """Send a tensor to one rank and receive a tensor from another rank at the same time. On a
        GPU, only enqueue both transfers. Raises `EngineDeadError` if a rank is gone.
        """
        operations = [
            dist.P2POp(way, part[0], group=self._group, group_peer=part[1])
            for way, part in ((dist.isend, sent), (dist.irecv, received))
            if part is not None
        ]
        if not operations:
            return
        try:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        except RuntimeError as error:
            raise EngineDeadError(f"another rank ended or is not in sync: {error}") from error

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        parts = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        if tensor.is_cuda:
            dist.all_gather_into_tensor(parts, tensor.contiguous(), group=self._group)
        else:
            try:
                dist.all_gather(list(parts), tensor.contiguous(), group=self._group)
            except RuntimeError as error:  # A failed group is unusable.
                raise EngineDeadError(f"another rank ended or is not in sync: {error}") from error
        return list(parts)
