"""Attention metadata: positions of a step's tokens and block tables of their sequences."""

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
    """Query tokens of decodes with draft tokens, grouped by sequence.

    The queries of sequence s are tokens query_starts[s] to query_starts[s + 1] - 1 of the step, at
    most `AttentionMetadata.max_decode_run` tokens. Tokens from query_starts[S] on are padding.
    """

    block_table_indices: Tensor  # [S] int64, row of each sequence in the block tables
    seq_lens: Tensor  # [S] int32, sequence lengths with this step's tokens; 0: padding sequence
    query_starts: Tensor  # [S + 1] int64, first query of each sequence; last, start of the padding


@dataclass(frozen=True)
class SharedTokens:
    """The tokens of a step on all ranks of `group`, N per rank, in rank order."""

    group: Collective
    positions: Tensor  # [ranks * N] int64, positions of the N tokens of each rank
    token_slots: Tensor  # [ranks * N] int64, row of each token's sequence in the block tables


@dataclass(frozen=True)
class StepTokens:
    """Data about the T tokens of a step for the mixture-of-experts layers."""

    num_actual_tokens: Tensor | None = None  # [1] int32, number of tokens before the padding.
    # Token `positions` [T] int64 select a replica of each expert; None: all positions are 0.
    positions: Tensor | None = None
    most_tokens: int | None = None
    is_share: bool = False


@dataclass(frozen=True)
class AttentionMetadata:
    """Metadata of T query tokens of S sequences, whose keys are in paged caches.

    The queries of a sequence are its last tokens. Each of the first `num_decodes` sequences has one
    query, and each later sequence has several queries. The queries of sequence s are tokens
    query_starts[s] to query_starts[s + 1] - 1. Sequence s has the blocks
    block_tables[block_table_indices[s]]. Tensors are on the caches' device. The host plans kernels
    with the `host_` fields, which are empty during graph capture. On GPUs the `host_` lengths are
    upper bounds while draft tokens of an earlier step are being verified.
    """

    positions: Tensor  # [T] int64, position of each token in its sequence
    token_slots: Tensor  # [T] int64, row index in block_tables of each token's sequence
    block_tables: Tensor  # [slots, max_blocks] int32 or int64
    block_table_indices: Tensor  # [S] int64, row of each sequence in block_tables.
    # `seq_lens` [S] int32 with this step's tokens; 0 marks a padding sequence, whose output is 0.
    seq_lens: Tensor
    query_starts: Tensor  # [S + 1] int32, first query index of each sequence, then the query count
    num_decodes: int
    host_seq_lens: tuple[int, ...]  # [S] sequence lengths; upper bounds unless `is_exact`
    host_query_lens: tuple[int, ...]  # [S] number of queries of each sequence.
    # `num_actual_tokens`: [1] int32, number of tokens before the padding; None: no padding.
    num_actual_tokens: Tensor | None = None
    # upper bound of the number of tokens of a rank in this step; None: all ranks have T tokens
    most_tokens: int | None = None
    is_share: bool = False  # Whether any data-parallel rank shards tokens by context parallelism.
    # `shared_tokens`: tokens of all context-parallel ranks; None: the step's tokens are not split.
    shared_tokens: SharedTokens | None = None
    is_exact: bool = True
    # Maximum number of adjacent decodes that belong to one sequence, at consecutive positions. The
    # number exceeds 1 if draft tokens are decodes whose lengths only the device stores.
    max_decode_run: int = 1
    # The decodes grouped by sequence, for kernels that read the keys of a sequence once. The field
    # is None if the groups are unknown or each sequence has one decode.
    decode_runs: DecodeRuns | None = None
    # kind of attention -> kernel plan of this step; all layers of one kind share a plan
    prepared: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_captured(self) -> bool:
        """Whether the sequence lengths are only on the device, not in `host_seq_lens`."""
        return len(self.host_seq_lens) < self.block_table_indices.shape[0]

    @property
    def token_tables(self) -> TokenTables:
        return TokenTables(self.positions, self.token_slots, self.block_tables)

    @cached_property
    def step_tokens(self) -> StepTokens:
        return StepTokens(
            self.num_actual_tokens, self.positions, self.most_tokens, is_share=self.is_share
        )

    @property
    def decodes(self) -> "AttentionMetadata | None":
        """Return the sequences with one query each; None if there is no such sequence."""
        return self._part(0, self.num_decodes)

    @property
    def prefills(self) -> "AttentionMetadata | None":
        """Return the sequences with several queries; None if there is no such sequence."""
        return self._part(self.num_decodes, self.block_table_indices.shape[0])

    def used_tables(self, block_size: int) -> Tensor:
        """Return block tables [S, blocks] int64 with enough columns for max(host_seq_lens)."""
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
    """The blocks of the KV cache that a rank stores.

    If `ranks` ranks share one KV head, each of them stores every `ranks`-th block of the pool. Rank
    b % ranks stores block b of the pool at index b // ranks + 1 of its own cache. Index 0 of each
    rank's cache is the padding block.
    """

    rank: int = 0
    ranks: int = 1  # number of ranks that split the blocks; 1: this rank holds the whole pool


WHOLE_CACHE = CacheShard()


@dataclass(frozen=True)
class PagedShape:
    """Sizes that determine the plan of an attention kernel."""

    kv_heads: int
    group: int  # number of query heads per KV head
    block_size: int
    cache: CacheShard = field(default=WHOLE_CACHE, kw_only=True)
    dtype: torch.dtype = field(default=torch.bfloat16, kw_only=True)  # dtype of queries
    quantize: bool = field(default=False, kw_only=True)  # whether GPU kernels also write FP8 output


def attention_metadata(
    block_tables: Tensor,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    indices: Sequence[int] | None = None,
    num_decodes: int = 0,
) -> AttentionMetadata:
    """Build metadata for sequences of seq_lens[s] tokens, whose last query_lens[s] are queries.

    The blocks of sequence s are block_tables[s], or block_tables[indices[s]] if `indices` is given.
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
