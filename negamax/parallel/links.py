"""Links between two stages of a pipeline, each in one direction."""

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
        """Wait (on a GPU, its stream) for it. Errors: `EngineDeadError` without a sender."""
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise EngineDeadError(f"another stage is gone or out of step: {error}") from error


class Link:
    """A link to or from rank `peer`; over NCCL a group of its own: directions are independent."""

    def __init__(self, group: dist.ProcessGroup, peer: int, *, kept: int) -> None:
        """`kept`: tensors that may be in flight before sending waits for the first."""
        self._group, self._peer, self._kept = group, peer, kept
        self._sent: deque[tuple[dist.Work | None, Tensor]] = deque()

    def send(self, tensor: Tensor) -> None:
        """Send `tensor`, which must not change, without waiting. Errors: as in `Arrival.wait`."""
        while len(self._sent) >= self._kept:
            Arrival(self._sent[0][0]).wait()
            self._sent.popleft()
        tensor = tensor.contiguous()
        try:
            work = dist.isend(tensor, self._peer, group=self._group)
        except RuntimeError as error:
            raise EngineDeadError(f"another stage is gone: {error}") from error
        self._sent.append((work, tensor))

    def receive(self, out: Tensor) -> Arrival:
        """Receive the oldest message into contiguous `out`. Errors: as in `Arrival.wait`."""
        try:
            return Arrival(dist.irecv(out, self._peer, group=self._group))
        except RuntimeError as error:
            raise EngineDeadError(f"another stage is gone: {error}") from error

    def finish(self) -> None:
        """Wait until every sent tensor may be freed. Errors: as in `Arrival.wait`."""
        while self._sent:
            Arrival(self._sent.popleft()[0]).wait()


@dataclass(frozen=True)
class PipelineLinks:
    """Links of one rank to the same place of other stages."""

    previous: Link | None = None  # None: this is the first stage
    next: Link | None = None  # None: this is the last stage
    # from the last stage to all stages that receive its samples; on those, from the last stage
    sampled: tuple[Link, ...] = ()

    @staticmethod
    def connect(
        layout: ParallelLayout, *, backend: str, device: torch.device, has_drafts: bool = False
    ) -> "PipelineLinks":
        """Open the links on every rank of the world. Samples go to the first stage, or with draft
        tokens to all. Errors: `EngineDeadError` if ranks do not meet.
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
        rank, ranks = layout.rank, layout.pipeline_ranks
        at = layout.pp_rank
        links = PipelineLinks(
            None if layout.is_first_stage else made[ranks[at - 1], rank],
            None if layout.is_last_stage else made[rank, ranks[at + 1]],
            tuple(
                made[ranks[-1], listener]
                for listener in ranks[:-1]
                if (ranks[-1], listener) in made
            ),
        )
        links._open(layout, device)
        return links

    def hand_down(self, tensor: Tensor) -> None:
        """Broadcast the first stage's contiguous `tensor`. Errors: as in `Arrival.wait`."""
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
