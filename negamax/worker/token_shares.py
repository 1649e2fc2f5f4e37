"""Which tokens of a step a rank computes: all of them, or with context parallelism its share.

The tokens of a prompt are cut into 2 * ranks pieces, and rank i gets the i-th from the front and
the i-th from the back: a token attends to all before it, so that all ranks have as much to do. A
piece is a sequence that ends where the piece does; that others compute what lies before it makes no
difference, since all keys of the step are in the caches before anybody attends. Single tokens are
dealt out. The ranks that share out a step all know how; nothing is exchanged about it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from negamax.kernels.attention.metadata import AttentionMetadata, SharedTokens
from negamax.kernels.peers import Collective
from negamax.worker.batch import BatchLayout, Column, StepColumns, build
from negamax.worker.device import upload
from negamax.worker.request_state import RequestState


class TokenShare(Protocol):
    """A rank's share of the tokens of a step."""

    def build(self, *, most_tokens: int | None) -> tuple[Tensor, AttentionMetadata]:
        """Token ids [N] of the share, and where they stand; see `batch.build`."""

    def gather(self, rows: Tensor) -> Tensor:
        """rows [N, ...] of the share -> [T, ...] of all tokens, in their order."""

    def describe_all(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """Where all tokens stand; `metadata` of the share."""


@dataclass(frozen=True)
class AllTokens:
    """Every token of the step."""

    layout: BatchLayout
    requests: RequestState

    def build(self, *, most_tokens: int | None) -> tuple[Tensor, AttentionMetadata]:
        """See `TokenShare`."""
        return build(self.layout, self.requests, most_tokens=most_tokens)

    def gather(self, rows: Tensor) -> Tensor:
        """See `TokenShare`."""
        return rows

    def describe_all(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """See `TokenShare`."""
        return metadata


class PiecesOfRuns:
    """The pieces of one of the ranks of `group`."""

    def __init__(self, layout: BatchLayout, requests: RequestState, group: Collective) -> None:
        self._layout, self._requests, self._group = layout, requests, group
        shares = [_share_of(layout, rank, group.size) for rank in range(group.size)]
        self._own, self._num_rows = shares[group.rank], max(len(each.tokens) for each in shares)
        columns, device = layout.columns, requests.tokens.device
        # of each rank the tokens of its share, padded with a token of nobody
        slots = np.full((group.size, self._num_rows), requests.padding_slot, dtype=np.int64)
        offsets = np.zeros_like(slots)
        order = np.empty(len(columns.token_slots), dtype=np.int64)
        for rank, share in enumerate(shares):
            count = len(share.tokens)
            slots[rank, :count] = columns.token_slots[share.tokens]
            offsets[rank, :count] = columns.token_offsets[share.tokens]
            order[share.tokens] = rank * self._num_rows + np.arange(count)
        all_slots, all_offsets, self._order = upload(
            (slots.ravel(), offsets.ravel(), order), device
        )
        positions = requests.num_computed[all_slots] + all_offsets
        self._shared = SharedTokens(group, positions, all_slots)

    def build(self, *, most_tokens: int | None) -> tuple[Tensor, AttentionMetadata]:
        """See `TokenShare`."""
        token_ids, metadata = build(self._own.layout, self._requests, most_tokens=self._num_rows)
        return token_ids, replace(metadata, shared_tokens=self._shared)

    def gather(self, rows: Tensor) -> Tensor:
        """See `TokenShare`."""
        padded = F.pad(rows, (0, 0, 0, self._num_rows - len(rows)))
        return self._group.all_gather(padded, dim=0)[self._order]

    def describe_all(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """See `TokenShare`."""
        return build(self._layout, self._requests)[1]


@dataclass(frozen=True)
class _Share:
    tokens: Column  # which of the step's tokens
    layout: BatchLayout  # of these alone, without samples


def share_tokens(layout: BatchLayout, requests: RequestState, group: Collective) -> TokenShare:
    """This rank's share of a step; all of it where no run of prompt tokens has a token for each
    piece.
    """
    if group.size > 1:
        runs = np.diff(layout.columns.query_starts)[layout.num_decodes :]
        if runs.max(initial=0) >= 2 * group.size:
            return PiecesOfRuns(layout, requests, group)
    return AllTokens(layout, requests)


def _share_of(layout: BatchLayout, rank: int, ranks: int) -> _Share:
    """The pieces of one of `ranks`, in the order of the step's tokens."""
    columns, pieces = layout.columns, 2 * ranks
    starts, counts = columns.query_starts[:-1], np.diff(columns.query_starts)
    edges = starts[:, None] + counts[:, None] * np.arange(pieces + 1) // pieces
    # (one further for each sequence, so that those of single tokens go round)
    owner = np.minimum(np.arange(pieces), pieces - 1 - np.arange(pieces))
    owner = (owner + np.arange(len(counts))[:, None]) % ranks
    sequence, piece = np.nonzero((owner == rank) & (edges[:, 1:] > edges[:, :-1]))
    first, stop = edges[sequence, piece], edges[sequence, piece + 1]
    lengths = stop - first
    query_starts = np.concatenate(([0], lengths.cumsum()))
    tokens = np.arange(query_starts[-1]) + (first - query_starts[:-1]).repeat(lengths)
    before_end = columns.query_starts[1:][sequence] - stop  # tokens of the sequence behind a piece
    own = StepColumns(
        token_slots=columns.token_slots[tokens],
        slots=columns.slots[sequence],
        token_offsets=columns.token_offsets[tokens],
        end_offsets=columns.end_offsets[sequence] - before_end,
        query_starts=query_starts,
    )
    num_decodes = int((sequence < layout.num_decodes).sum())
    bounds = layout.seq_len_bounds[sequence] - before_end
    return _Share(tokens, BatchLayout(num_decodes, own, bounds, [], [], [], [], []))
