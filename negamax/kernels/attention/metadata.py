"""Attention metadata: positions of a step's tokens and the caches of their sequences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from negamax.kernels.kvcache.op import TokenTables
from negamax.kernels.peers import Collective


@dataclass(frozen=True)
class DecodeRuns:
    """Decodes with draft tokens, grouped by sequence.

    Sequence s has query_starts[s + 1] - query_starts[s] tokens in the step, its last ones, at most
    `AttentionMetadata.max_decode_run`. Tokens from query_starts[S] on are padding.
    """

    block_table_indices: Tensor  # [S] int64
    seq_lens: Tensor  # [S] int32, tokens including this step; 0: padding
    query_starts: Tensor  # [S + 1] int64


@dataclass(frozen=True)
class SharedTokens:
    """Tokens of a step, N per rank of `group` in rank order; padding is in the padding sequence."""

    group: Collective
    positions: Tensor  # [ranks * N] int64
    token_slots: Tensor  # [ranks * N] int64, row of block_tables of each token's sequence


@dataclass(frozen=True)
class StepTokens:
    """The T tokens of a step, for a mixture of experts; by default all are real."""

    num_actual_tokens: Tensor | None = None  # as in `AttentionMetadata`, like the next fields
    # they name the copy of an expert that a token uses; None: all 0
    positions: Tensor | None = None
    most_tokens: int | None = None
    is_share: bool = False


@dataclass(frozen=True)
class AttentionMetadata:
    """T query tokens of S sequences with keys in paged caches.

    A sequence's queries are its last tokens. First come `num_decodes` sequences of one query each,
    then runs of several. Sequence s has the queries query_starts[s] to query_starts[s + 1] - 1, and
    its blocks are block_tables[block_table_indices[s]]. Tensors are on the device of the caches.
    The host's copies serve preparation on the host. They are () during graph capture, and upper
    bounds while draft tokens of an earlier step are being verified, which does not happen on a CPU.
    """

    positions: Tensor  # [T] int64
    token_slots: Tensor  # [T] int64, row of block_tables of each token's sequence
    block_tables: Tensor  # [slots, max_blocks] int32 or int64
    block_table_indices: Tensor  # [S] int64
    # [S] int32, tokens including this step; 0: a row of padding, with output 0
    seq_lens: Tensor
    query_starts: Tensor  # [S + 1] int32
    num_decodes: int
    host_seq_lens: tuple[int, ...]  # [S] lengths; upper bounds unless `is_exact`
    host_query_lens: tuple[int, ...]  # [S] queries of each sequence
    # [1] int32, the number of real tokens, before the padding; None: all
    num_actual_tokens: Tensor | None = None
    # tokens of the rank that has the most in this step, or more; None: all ranks have T
    most_tokens: int | None = None
    is_share: bool = False  # context-parallel ranks have different tokens of this step
    # the split over context-parallel ranks; None: every rank has all tokens, or none
    shared_tokens: SharedTokens | None = None
    is_exact: bool = True
    # Adjacent decodes that may belong to one sequence, at most; each is one token longer than the
    # previous. Set for steps with draft tokens whose lengths only the device holds.
    max_decode_run: int = 1
    # The same decodes by sequence, for kernels that read the keys of adjacent decodes once. None:
    # they are not known, or each sequence has one.
    decode_runs: DecodeRuns | None = None
    # by kind of attention, the plan that its layers share in this step
    prepared: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_captured(self) -> bool:
        """Whether only the device knows the lengths."""
        return len(self.host_seq_lens) < self.block_table_indices.shape[0]

    @property
    def token_tables(self) -> TokenTables:
        return TokenTables(self.positions, self.token_slots, self.block_tables)

    @cached_property
    def step_tokens(self) -> StepTokens:
        """Return the step's tokens for a mixture of experts."""
        return StepTokens(
            self.num_actual_tokens, self.positions, self.most_tokens, is_share=self.is_share
        )

    @property
    def decodes(self) -> "AttentionMetadata | None":
        """Return the sequences with one query each; None if there are none."""
        return self._part(0, self.num_decodes)

    @property
    def prefills(self) -> "AttentionMetadata | None":
        """Return the sequences with runs of queries; None if there are none."""
        return self._part(self.num_decodes, self.block_table_indices.shape[0])

    def used_tables(self, block_size: int) -> Tensor:
        """Return the tables [S, blocks] int64, as wide as the longest host length needs."""
        width = max(1, -(-max(self.host_seq_lens, default=0) // block_size))
        return self.block_tables[:, :width].index_select(0, self.block_table_indices).long()

    def _part(self, first: int, end: int) -> "AttentionMetadata | None":
        if first == end:
            return None
        if end - first == self.block_table_indices.shape[0]:
            return self
        tokens = slice(first, end) if end == self.num_decodes else slice(first, None)
        return replace(
            self,
            positions=self.positions[tokens],
            token_slots=self.token_slots[tokens],
            block_table_indices=self.block_table_indices[first:end],
            seq_lens=self.seq_lens[first:end],
            query_starts=self.query_starts[first : end + 1] - first,
            num_decodes=self.num_decodes if first == 0 else 0,
            decode_runs=None,
            host_seq_lens=self.host_seq_lens[first:end],
            host_query_lens=self.host_query_lens[first:end],
        )


@dataclass(frozen=True)
class CacheShard:
    """The blocks of keys and values that a rank holds.

    Of several ranks with copies of a KV head, each has every `ranks`-th block of the pool. Block b
    is block b // ranks + 1 of rank b % ranks. Block 0 of each rank is the padding block.
    """

    rank: int = 0
    ranks: int = 1  # 1: all blocks, with their indices in the pool


WHOLE_CACHE = CacheShard()


@dataclass(frozen=True)
class PagedShape:
    """Sizes that a plan depends on."""

    kv_heads: int
    group: int  # query heads per KV head
    block_size: int
    cache: CacheShard = field(default=WHOLE_CACHE, kw_only=True)
    dtype: torch.dtype = field(default=torch.bfloat16, kw_only=True)  # of queries
    quantize: bool = field(default=False, kw_only=True)  # the result is in FP8, too; on GPUs only


def attention_metadata(
    block_tables: Tensor,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    indices: Sequence[int] | None = None,
    num_decodes: int = 0,
) -> AttentionMetadata:
    """Build the metadata of the last query_lens[s] tokens of sequences of seq_lens[s] tokens.

    The blocks of sequence s are block_tables[s], or block_tables[indices[s]].
    """
    device = block_tables.device
    rows = range(len(seq_lens)) if indices is None else indices
    columns = list(zip(rows, seq_lens, query_lens, strict=True))
    return AttentionMetadata(
        positions=torch.tensor(
            [at for _, end, count in columns for at in range(end - count, end)],
            dtype=torch.int64,
            device=device,
        ),
        token_slots=torch.tensor(
            [row for row, _, count in columns for _ in range(count)],
            dtype=torch.int64,
            device=device,
        ),
        block_tables=block_tables,
        block_table_indices=torch.tensor(rows, dtype=torch.int64, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        query_starts=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=device),
        num_decodes=num_decodes,
        host_seq_lens=tuple(seq_lens),
        host_query_lens=tuple(query_lens),
    )
