"""Rows that may not sample every token: their grammar bitmasks on the device, applied to logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from negamax.scheduler.step import GrammarBitmask, StepPlan
from negamax.worker.device import indices
from negamax.worker.request_state import RequestState

WaitForBitmask = Callable[[], GrammarBitmask]

TILE = 32  # rows unpacked at a time, which bounds the memory


@dataclass(frozen=True)
class RowBitmasks:
    """The masks of some of a step's sampled rows. M rows."""

    members: list[int]  # [M] which of the sampled rows
    packed: Tensor  # [M, ceil(V / 8)] uint8: bit i of byte j allows token 8 j + i

    def of(self, rows: Sequence[int], *, renumber: bool = False) -> RowBitmasks | None:
        """The masks of those among `rows`, if any; with `renumber` their members are places in
        `rows`.
        """
        place = {row: i for i, row in enumerate(rows)}
        kept = [i for i, member in enumerate(self.members) if member in place]
        if not kept:
            return None
        members = [place[self.members[i]] if renumber else self.members[i] for i in kept]
        whole = len(kept) == len(self.members)
        return RowBitmasks(
            members, self.packed if whole else self.packed[indices(kept, self.packed.device)]
        )

    def apply(self, logits: Tensor, *, first_id: int) -> None:
        """Set what the masks forbid to minus infinity, in place. logits [R, V of this rank] fp32,
        from token `first_id` on.
        """
        num_ids = logits.shape[1]
        shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
        for start in range(0, len(self.members), TILE):
            members = self.members[start : start + TILE]
            first, last = first_id // 8, -(-(first_id + num_ids) // 8)
            bits = self.packed[start : start + TILE, first:last].unsqueeze(-1) >> shifts & 1
            skipped = first_id - 8 * first
            allowed = bits.flatten(1)[:, skipped : skipped + num_ids].bool()
            if members == list(range(members[0], members[0] + len(members))):
                logits[members[0] : members[-1] + 1].masked_fill_(~allowed, float("-inf"))
            else:
                where = indices(members, logits.device)
                logits.index_copy_(0, where, logits[where].masked_fill_(~allowed, float("-inf")))


class PendingBitmask:
    """The bitmask of a plan, which comes after it: the first who asks waits for it."""

    def __init__(
        self,
        by_row: Callable[[], Mapping[int, bytes]],
        postponed: Callable[[], Sequence[int]] = list,
    ) -> None:
        """`by_row` gives the masks by row of the plan."""
        self._by_row, self._postponed = by_row, postponed

    @property
    def postponed(self) -> Sequence[int]:
        """The rows of the plan whose mask is late."""
        return self._postponed()

    @classmethod
    def of_plan(
        cls, plan: StepPlan, wait: WaitForBitmask, *, vocab_size: int, rows: RequestState
    ) -> PendingBitmask:
        """The one that `wait` brings; a plan without grammar rows waits for none. A row whose mask
        is not one of this vocabulary fails."""
        bitmask = cache(wait)

        def by_row() -> dict[int, bytes]:
            masks = bitmask()
            found = {
                row: masks.masks[place] for row, place in zip(masks.rows, masks.places, strict=True)
            }
            for row in [
                row for row, mask in found.items() if 8 * len(mask) - vocab_size not in range(8)
            ]:
                num_bytes = len(found.pop(row))
                rows.fail(
                    plan.slots[row],
                    ValueError(f"a mask of {num_bytes} bytes for {vocab_size} tokens"),
                )
            return found

        if not plan.grammar_rows:
            return cls(dict)
        return cls(cache(by_row), lambda: bitmask().postponed)

    def of(self, sampled_rows: Sequence[int], *, device: torch.device) -> RowBitmasks | None:
        """The masks of the plan's rows `sampled_rows`, on their way to the device; None: none of
        them has one.
        """
        mask_of = self._by_row()
        members = [i for i, row in enumerate(sampled_rows) if row in mask_of]
        if not members:
            return None
        packed = torch.from_numpy(
            np.stack([np.frombuffer(mask_of[sampled_rows[i]], dtype=np.uint8) for i in members])
        )
        return RowBitmasks(
            members,
            packed if device.type == "cpu" else packed.pin_memory().to(device, non_blocking=True),
        )

    def single(self, row: int) -> PendingBitmask:
        """Those of a plan of this row alone."""

        def by_row() -> dict[int, bytes]:
            mask = self._by_row().get(row)
            return {} if mask is None else {0: mask}

        return PendingBitmask(by_row, lambda: [0] if row in self.postponed else [])
