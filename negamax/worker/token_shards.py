"""Select the tokens of a step that a rank computes: a shard with context parallelism, else all.

A run of prompt tokens is split into 2 * ranks pieces. Rank i computes the i-th piece from the front
and the i-th piece from the back. Two pieces per rank balance the work, as later tokens attend to
more tokens. For attention, a piece is a sequence that ends with the last token of the piece.
Earlier tokens may be on other ranks, because all keys of the step are in the caches before any rank
attends. Single tokens (decodes) are assigned to the ranks in turn.

Ranks derive the sharding from the plan without communication. The plan also states whether the
steps of all data-parallel ranks are sharded, and how many tokens the largest shard has.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from negamax.kernels.attention.metadata import AttentionMetadata, SharedTokens
from negamax.kernels.peers import Collective
from negamax.scheduler.step import StepSize, is_sharded
from negamax.worker.batch import BatchLayout, Column, StepColumns, build, build_padding
from negamax.worker.device import upload
from negamax.worker.request_state import RequestState


@dataclass(frozen=True)
class AllTokens:
    """All tokens of the step, or one padding token if the step has no tokens."""

    layout: BatchLayout
    requests: RequestState
    most_tokens: int | None = None  # largest number of tokens of any data-parallel rank
    is_share: bool = False  # whether some data-parallel ranks shard their tokens of this step

    @property
    def columns(self) -> StepColumns:
        """Columns of the shard's tokens, or empty columns if the shard has only a padding token."""
        return self.layout.columns

    def build(self) -> tuple[Tensor, AttentionMetadata]:
        """Return token ids [N] of the shard and their metadata; see `batch.build`."""
        if not self.layout.num_tokens:
            assert self.most_tokens is not None, "a step of one rank has tokens"
            return build_padding(
                self.requests, most_tokens=self.most_tokens, is_share=self.is_share
            )
        return build(self.layout, self.requests, most_tokens=self.most_tokens)

    def gather(self, rows: Tensor) -> Tensor:
        """Gather rows [N, ...] of all shards into rows [T, ...], in the order of the step."""
        return rows

    def describe_all(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """Return the metadata of all tokens of the step. `metadata` describes the shard."""
        return metadata


class ShardedRuns:
    """A shard of the tokens of a step, with the methods of `AllTokens`."""

    def __init__(
        self,
        layout: BatchLayout,
        requests: RequestState,
        group: Collective,
        *,
        most_tokens: int | None = None,
    ) -> None:
        """`most_tokens`: size of the largest shard of all data-parallel ranks (None: one rank)."""
        self._layout, self._requests, self._group = layout, requests, group
        shards = [_shard_of(layout, rank, group.size) for rank in range(group.size)]
        self._own, self._num_rows = shards[group.rank], max(len(each.tokens) for each in shards)
        self._most_tokens = most_tokens or self._num_rows
        assert self._num_rows <= self._most_tokens, "a shard exceeds the size in the plan"
        columns, device = layout.columns, requests.tokens.device
        # slot of each token in each rank's shard, followed by padding
        slots = np.full((group.size, self._num_rows), requests.padding_slot, dtype=np.int64)
        offsets = np.zeros_like(slots)
        order = np.empty(len(columns.token_slots), dtype=np.int64)
        for rank, shard in enumerate(shards):
            count = len(shard.tokens)
            slots[rank, :count] = columns.token_slots[shard.tokens]
            offsets[rank, :count] = columns.token_offsets[shard.tokens]
            order[shard.tokens] = rank * self._num_rows + np.arange(count)
        all_slots, all_offsets, self._order = upload(
            (slots.ravel(), offsets.ravel(), order), device
        )
        positions = requests.num_computed[all_slots] + all_offsets
        self._shared = SharedTokens(group, positions, all_slots)

    @property
    def columns(self) -> StepColumns:
        return self._own.layout.columns

    def build(self) -> tuple[Tensor, AttentionMetadata]:
        """Return token ids and metadata. A shard without tokens has a padding token."""
        requests, most = self._requests, self._most_tokens
        if len(self._own.tokens):
            token_ids, metadata = build(self._own.layout, requests, most_tokens=most)
        else:
            token_ids, metadata = build_padding(requests, most_tokens=most, is_share=True)
        return token_ids, replace(metadata, shared_tokens=self._shared, is_share=True)

    def gather(self, rows: Tensor) -> Tensor:
        padded = F.pad(rows, (0, 0, 0, self._num_rows - len(rows)))
        return self._group.all_gather(padded, dim=0)[self._order]

    def describe_all(self, metadata: AttentionMetadata) -> AttentionMetadata:
        return build(self._layout, self._requests)[1]


TokenShard = AllTokens | ShardedRuns


@dataclass(frozen=True)
class _ShardTokens:
    tokens: Column  # indices of the shard's tokens in the step
    layout: BatchLayout  # layout of only the shard's tokens, without samples


def shard_tokens(
    layout: BatchLayout, requests: RequestState, group: Collective, *, size: StepSize | None = None
) -> TokenShard:
    """Return this rank's shard of a step, or all tokens if the step has no long prompt run. With
    several data-parallel ranks, `size` decides whether the step is sharded.
    """
    if size is not None:
        most_tokens = size.largest_shard or size.num_tokens
        if not size.largest_shard or not layout.num_tokens:
            return AllTokens(layout, requests, most_tokens, is_share=size.largest_shard > 0)
        return ShardedRuns(layout, requests, group, most_tokens=size.largest_shard)
    runs = np.diff(layout.columns.query_starts)[layout.num_decodes :]
    if is_sharded(runs.max(initial=0), group.size):
        return ShardedRuns(layout, requests, group)
    return AllTokens(layout, requests)


def _shard_of(layout: BatchLayout, rank: int, ranks: int) -> _ShardTokens:
    """Return the pieces of `rank`, in the order of the step's tokens."""
    columns, pieces = layout.columns, 2 * ranks
    starts, counts = columns.query_starts[:-1], np.diff(columns.query_starts)
    edges = starts[:, None] + counts[:, None] * np.arange(pieces + 1) // pieces
    # piece 0 of sequence i goes to rank i % ranks, so that single tokens are spread over ranks
    owner = np.minimum(np.arange(pieces), pieces - 1 - np.arange(pieces))
    owner = (owner + np.arange(len(counts))[:, None]) % ranks
    sequence, piece = np.nonzero((owner == rank) & (edges[:, 1:] > edges[:, :-1]))
    first, stop = edges[sequence, piece], edges[sequence, piece + 1]
    lengths = stop - first
    query_starts = np.concatenate(([0], lengths.cumsum()))
    tokens = np.arange(query_starts[-1]) + (first - query_starts[:-1]).repeat(lengths)
    before_end = columns.query_starts[1:][sequence] - stop  # tokens of a sequence after each piece
    own = StepColumns(
        token_slots=columns.token_slots[tokens],
        slots=columns.slots[sequence],
        token_offsets=columns.token_offsets[tokens],
        end_offsets=columns.end_offsets[sequence] - before_end,
        query_starts=query_starts,
    )
    num_decodes = int((sequence < layout.num_decodes).sum())
    bounds = layout.seq_len_bounds[sequence] - before_end
    return _ShardTokens(tokens, BatchLayout.without_samples(num_decodes, own, bounds))
