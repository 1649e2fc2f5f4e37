"""Create a rank's process groups at its start. Ranks communicate only through process groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from negamax.base.errors import EngineError
from negamax.kernels.dispatch.op import most_words
from negamax.parallel.collectives import Collective, ProcessGroup, SingleRank
from negamax.parallel.layout import ParallelLayout
from negamax.parallel.links import PipelineLinks
from negamax.parallel.poll_control import PollControl
from negamax.parallel.rendezvous import open_store

START_TIMEOUT_S = 120.0  # Time limit within which all ranks must connect at start.
STEP_TIMEOUT_S = 600.0  # Time limit of one collective operation; all steps are shorter.


@dataclass(frozen=True)
class ParallelContext:
    """A rank's position in the grid (`layout`), and the process groups of the rank."""

    layout: ParallelLayout
    # The ranks of this group split the attention heads and the vocabulary of a replica.
    attention_group: Collective = field(default_factory=SingleRank)
    # The ranks of this group split the experts of a layer.
    expert_group: Collective = field(default_factory=SingleRank)
    world: Collective = field(default_factory=SingleRank)
    # Ranks with the same position in each data-parallel replica, which exchange expert inputs.
    data_group: Collective = field(default_factory=SingleRank)
    # The ranks of this group split the tokens of prompts (prefill context parallelism).
    context_group: Collective = field(default_factory=SingleRank)
    # Ranks of a stage with the same `tp_rank`, which split the tokens of sharded steps.
    token_group: Collective = field(default_factory=SingleRank)
    # Each rank of this group has the same KV heads and a part of the KV cache blocks.
    cache_group: Collective = field(default_factory=SingleRank)
    links: PipelineLinks = field(default_factory=PipelineLinks)
    poll_control: PollControl | None = None  # Limits how long kernels wait for other ranks.

    @staticmethod
    def single() -> ParallelContext:
        """Return the context of a single rank, which does not communicate."""
        return ParallelContext(ParallelLayout())

    @staticmethod
    def gloo(
        layout: ParallelLayout, rendezvous: str, *, has_drafts: bool = False
    ) -> ParallelContext:
        """Connect to the other ranks over gloo. `open_store` explains `rendezvous`. All ranks must
        pass equal parallel sizes. Raises `EngineError` if a rank does not connect in time.
        """
        if layout.world_size == 1:
            return ParallelContext.single()
        _meet(layout, rendezvous, backend="gloo")
        groups: dict[tuple[int, ...], Collective] = {
            ranks: SingleRank() if len(ranks) == 1 else ProcessGroup(group)
            for ranks, group in _new_groups(layout, backend="gloo").items()
        }
        links = PipelineLinks.connect(
            layout, backend="gloo", device=torch.device("cpu"), has_drafts=has_drafts
        )
        return ParallelContext._of(layout, groups, links)

    @staticmethod
    def nccl(
        layout: ParallelLayout,
        rendezvous: str,
        *,
        device: torch.device,
        hidden_size: int,
        max_tokens: int,
        max_rows: int,
        is_one_sided: bool = False,
        has_drafts: bool = False,
    ) -> ParallelContext:
        """Connect to the other ranks. NCCL transfers GPU tensors, and gloo transfers CPU tensors.
        `device` is the rank's GPU and must be the current device. Kernels exchange rows through the
        memory `peers` of a group. `peers` is None if the GPUs of the group cannot access each
        other. `hidden_size`, `max_tokens` of a step and `max_rows` (sampled tokens) determine the
        size of `peers`. With `is_one_sided`, `peers` also has room for partial attention results
        and for tokens sent to experts. Every rank must pass the same sizes.
        """
        if layout.world_size == 1:
            return ParallelContext.single()
        from negamax.parallel import symmetric  # Only GPUs need this slow import.

        backend = "cpu:gloo,cuda:nccl"
        _meet(layout, rendezvous, backend=backend, device=device)
        control = PollControl(symmetric.PEER_TIMEOUT_S)
        groups: dict[tuple[int, ...], Collective] = {}
        # Ranks whose kernels exchange rows -> maximum number of tokens, maximum number of sampled
        # rows, number of words per row sent to experts (0: no rows are sent to experts).
        kernel_groups = {layout.attention.ranks: (max_tokens, max_rows, 0)}
        for senders in (layout.data_ranks, layout.context_ranks):
            if is_one_sided and len(senders) > 1:
                rows = min(symmetric.DISPATCH_ROWS, max_tokens)
                kernel_groups[senders] = (rows, 1, most_words(hidden_size))
        sharing = layout.attention.cache_ranks
        if len(sharing) > 1 and sharing not in kernel_groups:
            kernel_groups[sharing] = (min(symmetric.REDUCE_ROWS, max_tokens), 1, 0)
        kernel_groups = {
            ranks: sizes for ranks, sizes in kernel_groups.items() if layout.is_on_one_node(ranks)
        }
        for ranks, group in _new_groups(layout, backend=backend).items():
            if len(ranks) == 1:
                groups[ranks] = SingleRank()
                continue
            connected = None
            if ranks in kernel_groups:
                connected = symmetric.connect(
                    group, device, *kernel_groups[ranks], hidden_size=hidden_size, control=control
                )
            peers, shared = connected or (None, None)
            groups[ranks] = ProcessGroup(group, peers=peers, shared=shared)
        links = PipelineLinks.connect(layout, backend=backend, device=device, has_drafts=has_drafts)
        return ParallelContext._of(layout, groups, links, control)

    @staticmethod
    def _of(
        layout: ParallelLayout,
        groups: dict[tuple[int, ...], Collective],
        links: PipelineLinks,
        control: PollControl | None = None,
    ) -> ParallelContext:
        own = {name: groups[ranks] for name, ranks in _list_groups(layout).items()}
        return ParallelContext(layout, links=links, poll_control=control, **own)

    def world_min(self, value: int) -> int:
        """Return the smallest `value` over all ranks."""
        return int(self.world.all_gather(torch.tensor([value], dtype=torch.int64), dim=0).min())

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _meet(
    layout: ParallelLayout, rendezvous: str, *, backend: str, device: torch.device | None = None
) -> None:
    try:
        dist.init_process_group(
            backend,
            store=open_store(rendezvous, layout, timeout_s=START_TIMEOUT_S),
            rank=layout.rank,
            world_size=layout.world_size,
            timeout=timedelta(seconds=START_TIMEOUT_S),
            device_id=device,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise EngineError(
            f"rank {layout.rank} of {layout.world_size} could not connect to all other ranks at "
            f"{rendezvous} within {START_TIMEOUT_S:.0f} s: {error}",
            hint="open the ports of gloo and NCCL between all nodes; node 0 logs the ports"
            if layout.nodes > 1
            else None,
        ) from error


def _list_groups(layout: ParallelLayout) -> dict[str, tuple[int, ...]]:
    """Map each field of `ParallelContext` that is a group to the group's world ranks."""
    return {
        "attention_group": layout.attention.ranks,
        "expert_group": layout.experts.ranks,
        "world": tuple(range(layout.world_size)),
        "data_group": layout.data_ranks,
        "context_group": layout.context_ranks,
        "token_group": layout.token_ranks,
        "cache_group": layout.attention.cache_ranks,
    }


def _new_groups(
    layout: ParallelLayout, *, backend: str
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Create the groups of all ranks. Return this rank's groups, keyed by their world ranks."""
    places = [layout.replace_rank(rank) for rank in range(layout.world_size)]
    groups = {}
    # torch.distributed requires that every rank creates all groups in the same order.
    for ranks in sorted({ranks for place in places for ranks in _list_groups(place).values()}):
        group = dist.new_group(
            list(ranks), timeout=timedelta(seconds=STEP_TIMEOUT_S), backend=backend
        )
        if layout.rank in ranks:
            groups[ranks] = group
    return groups
