"""Steps with prompt tokens as CUDA graphs: one graph per number of tokens holds all layers, for any
mix of sequences.

Launching sixty layers kernel by kernel takes a host several times as long as a GPU takes to run a
thousand tokens. A step is padded to the next captured size; its sequences, generated tokens
included, are runs of queries to the attention, whose tiles are worked out on the device. What is
sampled, and how, stays outside.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.layers.attention import KvCaches
from negamax.models.registry import CausalModel
from negamax.worker.batch import BatchLayout, Column
from negamax.worker.graphs import pool_bytes, record
from negamax.worker.request_state import RequestState

# A generated token in such a step is one query of a whole tile and reads its keys alone: slower
# than decoding from here on.
LONGEST_DECODE = 8192  # tokens


def capture_sizes(largest: int) -> list[int]:
    """Numbers of tokens worth a graph, in steps that leave at most a fifth of a step to padding."""
    sizes = [
        *range(128, 1025, 128),
        *range(1280, 2049, 256),
        *range(2560, 4097, 512),
        *range(5120, largest + 1, 1024),
    ]
    return sorted({*(size for size in sizes if size < largest), largest})


class PrefillGraphs:
    """Captured steps of up to `largest` tokens of up to `max_num_seqs` sequences."""

    def __init__(
        self,
        model: CausalModel,
        kv: Sequence[KvCaches],
        rows: RequestState,
        *,
        largest: int,
        max_num_seqs: int,
    ) -> None:
        device = rows.tokens.device
        self._model, self._kv, self._rows = model, kv, rows
        self._sizes, self._num_seqs = capture_sizes(largest), max_num_seqs
        # Slot and position of each token; table row, length and first query of each sequence; all
        # queries; the real tokens.
        self._inputs = torch.zeros(
            2 * largest + 3 * max_num_seqs + 2, dtype=torch.int64, device=device
        )
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        # [largest, hidden], what every replay fills from the front
        self._hidden = torch.empty(0, device=device)

    def capture(self, pool: tuple[int, int], progress: Callable[[int, int], None]) -> str:
        """Run and record every size, the largest first, in the memory of `pool`; a line that says
        what that took.
        """
        started, before = time.monotonic(), pool_bytes(pool)
        for number, size in enumerate(reversed(self._sizes)):
            progress(number, len(self._sizes))
            self._fill_with_nothing(size)
            self._graphs[size], _ = record(partial(self._run, size, self._kv), pool)
        torch.cuda.synchronize()
        taken = (pool_bytes(pool) - before) / 2**20
        seconds = time.monotonic() - started
        return (
            f"{len(self._sizes)} up to {self._sizes[-1]} tokens: {taken:.0f} MiB, {seconds:.1f} s"
        )

    def warmup(self, layers: int) -> None:
        """Launch what every size launches, of the first `layers` alone."""
        for size in self._sizes:
            self._fill_with_nothing(size)
            self._run(size, self._kv[:layers])

    def fits(self, layout: BatchLayout) -> bool:
        """Whether `layout` can be replayed, and gains from it."""
        longest = int(layout.seq_lens[: layout.num_decodes].max(initial=0))
        return (
            layout.num_tokens <= self._sizes[-1]
            and len(layout.slots) <= self._num_seqs
            and longest <= LONGEST_DECODE
        )

    def prepare(self, layout: BatchLayout) -> int:
        """Send the inputs of `layout` to the device; the size to replay."""
        size = self._sizes[bisect_left(self._sizes, layout.num_tokens)]
        tokens = (layout.token_slots, layout.token_positions)
        self._fill(
            size, tokens=tokens, sequences=(layout.slots, layout.seq_lens, layout.query_starts)
        )
        return size

    def replay(self, size: int) -> Tensor:
        """Run the prepared step; hidden states [size, hidden], the real tokens first."""
        self._graphs[size].replay()
        return self._hidden[:size]

    def _fill_with_nothing(self, size: int) -> None:
        empty = np.empty(0, dtype=np.int64)
        self._fill(
            size, tokens=(empty, empty), sequences=(empty, empty, np.zeros(1, dtype=np.int64))
        )

    def _fill(
        self, size: int, *, tokens: tuple[Column, Column], sequences: tuple[Column, Column, Column]
    ) -> None:
        (token_slots, positions), (slots, seq_lens, query_starts) = tokens, sequences
        padding = self._rows.padding_slot
        columns = (
            _padded(token_slots, size, padding),
            _padded(positions, size, 0),
            _padded(slots, self._num_seqs, padding),
            _padded(seq_lens, self._num_seqs, 0),
            _padded(query_starts, self._num_seqs + 1, len(token_slots)),
            np.array([len(token_slots)]),
        )
        packed = torch.from_numpy(np.concatenate(columns)).pin_memory()
        self._inputs[: len(packed)].copy_(packed, non_blocking=True)

    def _run(self, size: int, kv: Sequence[KvCaches]) -> None:
        """The step of `size` tokens, as it is captured. Its result is copied out, so that the next
        size may use its memory.
        """
        rows, num_seqs = self._rows, self._num_seqs
        sizes = [size, size, num_seqs, num_seqs, num_seqs + 1, 1]
        columns = torch.split(self._inputs[: sum(sizes)], sizes)
        token_slots, positions, block_table_indices, seq_lens, query_starts, active = columns
        metadata = AttentionMetadata(
            positions=positions,
            token_slots=token_slots,
            block_tables=rows.block_tables,
            block_table_indices=block_table_indices,
            seq_lens=seq_lens.int(),
            query_starts=query_starts.int(),
            num_decodes=0,
            host_seq_lens=(),
            host_query_lens=(),
            num_actual_tokens=active.int(),
        )
        hidden, _ = self._model.forward(rows.tokens[token_slots, positions].long(), metadata, kv)
        if len(self._hidden) < size:
            self._hidden = torch.empty_like(hidden)
        self._hidden[:size].copy_(hidden)


def _padded(column: Column, length: int, value: int) -> Column:
    return np.concatenate((column, np.full(length - len(column), value, dtype=np.int64)))
