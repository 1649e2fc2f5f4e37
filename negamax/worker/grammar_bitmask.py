"""Send grammar bitmasks to the device, and apply the bitmasks to logits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from negamax.scheduler.step import GrammarBitmask, StepPlan
from negamax.worker.device import indices, upload
from negamax.worker.request_state import RequestState

WaitForBitmask = Callable[[], GrammarBitmask]

TILE = 32  # rows of `packed` that are expanded to booleans at a time, to bound the memory


@dataclass(frozen=True)
class RowBitmasks:
    """Grammar masks of M sampled rows of a step."""

    members: list[int]  # [M] indices of sampled rows
    packed: Tensor  # [M, ceil(V / 8)] uint8: bit i of byte j allows token 8 j + i

    def select(self, rows: Sequence[int], *, renumber: bool = False) -> "RowBitmasks | None":
        """Return the masks of `rows`. With `renumber`, the result's `members` index `rows`."""
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
        """Set logits [R, tokens from `first_id` on] fp32 of forbidden tokens to -inf."""
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
    """The bitmask of a plan, which may arrive late. The first access waits for the bitmask."""

    def __init__(
        self,
        by_row: Callable[[], Mapping[int, Sequence[bytes | None]]],
        postponed: Callable[[], Sequence[int]] = list,
    ) -> None:
        """`by_row` maps each row of the plan to the masks of its first samples."""
        self._by_row, self._postponed = by_row, postponed

    @property
    def postponed(self) -> Sequence[int]:
        """Rows of the plan whose mask is late."""
        return self._postponed()

    @classmethod
    def of_plan(
        cls, plan: StepPlan, wait: WaitForBitmask, *, vocab_size: int, requests: RequestState
    ) -> "PendingBitmask":
        """`wait` returns the bitmask, and is called once. Rows whose mask has a wrong size fail."""
        bitmask = cache(wait)

        def read_rows() -> dict[int, list[bytes | None]]:
            masks = bitmask()
            found: dict[int, list[bytes | None]] = {}
            for row, place in zip(masks.rows, masks.places, strict=True):
                mask = masks.masks[place] if place >= 0 else None
                if mask is not None and 8 * len(mask) - vocab_size not in range(8):
                    requests.fail(
                        plan.slots[row],
                        ValueError(f"a grammar mask of {len(mask)} bytes for {vocab_size} tokens"),
                    )
                    mask = None
                found.setdefault(row, []).append(mask)
            return found

        if not plan.grammar_rows:
            return cls(dict)
        return cls(cache(read_rows), lambda: bitmask().postponed)

    def select(self, sampled_rows: Sequence[int], *, device: torch.device) -> RowBitmasks | None:
        """Send the masks of `sampled_rows` to the device. Return None if no sample has a mask."""
        left = {row: iter(masks) for row, masks in self._by_row().items()}
        of_samples = [next(left[row], None) if row in left else None for row in sampled_rows]
        members = [i for i, mask in enumerate(of_samples) if mask is not None]
        if not members:
            return None
        packed = torch.from_numpy(
            np.stack([np.frombuffer(mask, dtype=np.uint8) for mask in of_samples if mask])
        )
        return RowBitmasks(
            members,
            packed if device.type == "cpu" else packed.pin_memory().to(device, non_blocking=True),
        )

    def drop_drafts(self, drafts: Tensor, plan: StepPlan) -> bool:
        """Set drafts [R, K] that follow a row's last mask to -1. Return whether a draft changes."""
        limits = {row: len(masks) - 1 for row, masks in self._by_row().items()}
        limits |= dict.fromkeys(self.postponed, 0)
        if all(plan.num_draft_tokens[row] <= limit for row, limit in limits.items()):
            return False
        rows = np.flatnonzero(plan.needs_sampling).tolist()
        kept = np.array([limits.get(row, drafts.shape[1]) for row in rows], dtype=np.int64)
        (most,) = upload((kept,), drafts.device)
        places = torch.arange(drafts.shape[1], device=drafts.device)
        drafts.masked_fill_(places >= most.unsqueeze(1), -1)
        return True

    def single(self, row: int) -> "PendingBitmask":
        """Return the bitmask of a plan that runs only `row`."""

        def read_rows() -> dict[int, Sequence[bytes | None]]:
            masks = self._by_row().get(row)
            return {} if masks is None else {0: masks}

        return PendingBitmask(read_rows, lambda: [0] if row in self.postponed else [])
