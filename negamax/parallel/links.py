"""Send tensors between pipeline stages over links. A link has one direction."""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from negamax.base.errors import EngineDeadError
from negamax.parallel.layout import ParallelLayout


class Arrival:
    """A tensor that is being received."""

    def __init__(self, work: dist.Work | None) -> None:
        self._work = work

    def wait(self) -> None:
        """Wait for the tensor. On a GPU, only the CUDA stream waits. Raises `EngineDeadError`."""
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise EngineDeadError(f"a pipeline stage ended or is not in sync: {error}") from error


class Link:
    """A one-way link to or from rank `peer`. Each link has a separate process group."""

    def __init__(self, group: dist.ProcessGroup, peer: int, *, kept: int) -> None:
        """`send` first waits until fewer than `kept` sent tensors are in flight."""
        self._group, self._peer, self._kept = group, peer, kept
        self._sent: deque[tuple[dist.Work | None, Tensor]] = deque()

    def send(self, tensor: Tensor) -> None:
        """Start to send `tensor`, which must not change later. Raises `EngineDeadError`."""
        while len(self._sent) >= self._kept:
            Arrival(self._sent[0][0]).wait()
            self._sent.popleft()
        tensor = tensor.contiguous()
        try:
            work = dist.isend(tensor, self._peer, group=self._group)
        except RuntimeError as error:
            raise EngineDeadError(f"a pipeline stage ended: {error}") from error
        self._sent.append((work, tensor))

    def receive(self, out: Tensor) -> Arrival:
        """Receive the oldest sent tensor into contiguous `out`. Raises `EngineDeadError`."""
        try:
            return Arrival(dist.irecv(out, self._peer, group=self._group))
        except RuntimeError as error:
            raise EngineDeadError(f"a pipeline stage ended: {error}") from error

    def finish(self) -> None:
        """Wait until all tensors are sent and can be freed. Raises `EngineDeadError`."""
        while self._sent:
            Arrival(self._sent.popleft()[0]).wait()


@dataclass(frozen=True)
class PipelineLinks:
    """Links of one rank to the ranks that have the same position in other pipeline stages."""

    previous: Link | None = None  # Link to the previous stage; None on the first stage.
    next: Link | None = None  # Link to the next stage; None on the last stage.
    sampled: tuple[Link, ...] = ()  # Links from the last to all other stages, for sampled tokens.

    @staticmethod
    def connect(
        layout: ParallelLayout, *, backend: str, device: torch.device, has_drafts: bool = False
    ) -> "PipelineLinks":
        """Open the links. All ranks must call this method. The last stage sends sampled tokens to
        the first stage, or to all stages if `has_drafts` is set. Raises `EngineDeadError`.
        """
        if layout.pp == 1:
            return PipelineLinks()
        made: dict[tuple[int, int], Link] = {}
        for place in range(layout.stage_size):
            ranks = layout.replace_rank(place).pipeline_ranks
            listeners = ranks[:-1] if has_drafts else ranks[:1]
            ways = [(*pair, 2) for pair in pairwise(ranks)]
            ways += [(ranks[-1], listener, 2 * layout.pp + 2) for listener in listeners]
            for sender, receiver, kept in ways:
                group = dist.new_group([sender, receiver], backend=backend)
                if layout.rank in (sender, receiver):
                    peer = receiver if layout.rank == sender else sender
                    made[sender, receiver] = Link(group, peer, kept=kept)
        rank, ranks, at = layout.rank, layout.pipeline_ranks, layout.pp_rank
        sampled = [(ranks[-1], listener) for listener in ranks[:-1]]
        links = PipelineLinks(
            None if layout.is_first_stage else made[ranks[at - 1], rank],
            None if layout.is_last_stage else made[rank, ranks[at + 1]],
            tuple(made[pair] for pair in sampled if pair in made),
        )
        links._open(layout, device)
        return links

    def broadcast(self, tensor: Tensor) -> None:
        """Copy the first stage's contiguous `tensor` to every stage. Raises `EngineDeadError`."""
        if self.previous is not None:
            self.previous.receive(tensor).wait()
        if self.next is not None:
            self.next.send(tensor)
            self.next.finish()

    def _open(self, layout: ParallelLayout, device: torch.device) -> None:
        """Use every link once, so that opening connections does not delay the first step."""
        token = torch.zeros(1, device=device)
        for link, sends in (
            (self.previous, False),
            (self.next, True),
            *((link, layout.is_last_stage) for link in self.sampled),
        ):
            if link is not None and sends:
                link.send(token)
            elif link is not None:
                link.receive(token).wait()
