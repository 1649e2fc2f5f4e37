"""Decode steps as CUDA graphs: one graph per batch size holds the whole step, from the rows' tokens
to the sampled ones.

A replay reads the slots and positions of its rows from fixed buffers and everything else from the
persistent rows, so the host sends a few integers and one launch per step, and may do so before the
step before it has ended.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from negamax.kernels.attention.metadata import AttentionMetadata
from negamax.kernels.peers import Collective
from negamax.kernels.registry import KernelTable
from negamax.kernels.signatures import DRAW_LEADING, PICK
from negamax.layers.attention import KvCaches
from negamax.models.registry import CausalModel
from negamax.scheduler.step import StepPlan
from negamax.worker.request_state import RequestState

Result = TypeVar("Result")


def record(
    step: Callable[[], Result], pool: tuple[int, int]
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Run `step` once, which compiles and allocates what a capture may not, then capture it in the
    memory of `pool`.
    """
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as NCCL's watchdog, go on calling CUDA while this one captures.
    with torch.cuda.graph(
        graph, pool=pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
    ):
        result = step()
    return graph, result


def pool_bytes(pool: tuple[int, int]) -> int:
    """GPU memory that the graphs captured in `pool` hold. What the allocator has reserved in all is
    no measure: a capture begins by giving unused memory back."""
    segments = torch.cuda.memory_snapshot()
    return sum(
        segment["total_size"]
        for segment in segments
        if tuple(segment["segment_pool_id"]) == tuple(pool)
    )


def capture_sizes(largest: int) -> list[int]:
    """Batch sizes worth a graph: each up to 16, then in steps that leave at most an eighth of a
    step to padding.
    """
    sizes = [
        *range(1, 17),
        *range(20, 65, 4),
        *range(72, 129, 8),
        *range(144, 257, 16),
        *range(288, largest + 1, 32),
    ]
    return sorted({*(size for size in sizes if size < largest), largest})


@dataclass(frozen=True)
class DecodeOutputs:
    """Buffers that every replay fills. N is the largest captured size."""

    token_ids: Tensor  # [N] int64
    logits: Tensor  # [N, V of this rank] fp32


class DecodeGraphs:
    """Captured decode steps of up to `largest` rows."""

    def __init__(
        self,
        model: CausalModel,
        kv: Sequence[KvCaches],
        rows: RequestState,
        *,
        kernels: KernelTable,
        group: Collective,
        largest: int,
    ) -> None:
        device = rows.tokens.device
        self._model, self._kv, self._rows, self._group = model, kv, rows, group
        self._pick, self._draw_leading = (
            kernels[PICK].run,
            kernels[DRAW_LEADING].run,
        )
        self._sizes = capture_sizes(largest)
        # For a step of n rows: n slots, n positions, n lengths (the positions of the new tokens; 0
        # for padding) and the number of rows that are not padding.
        self._inputs = torch.zeros(3 * largest + 1, dtype=torch.int64, device=device)
        self._query_starts = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._outputs = DecodeOutputs(
            token_ids=torch.zeros(largest, dtype=torch.int64, device=device),
            logits=torch.zeros(largest, len(model.vocab_range), dtype=torch.float32, device=device),
        )
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._draws: dict[int, torch.cuda.CUDAGraph] = {}
        # by size: slots, positions, rows that are no padding
        self._latest: dict[int, tuple[list[int], list[int], int]] = {}

    @property
    def largest(self) -> int:
        return self._sizes[-1]

    def capture(self, pool: tuple[int, int], progress: Callable[[int, int], None]) -> str:
        """Run and record every size, the largest first, in the memory of `pool`; a line that says
        what that took.
        """
        started, before = time.monotonic(), pool_bytes(pool)
        for number, size in enumerate(reversed(self._sizes)):
            progress(number, len(self._sizes))
            self._fill(size, slots=[self._rows.padding_slot] * size, positions=[0] * size, active=0)
            self._graphs[size], _ = record(partial(self._run, size, self._kv), pool)
            self._draws[size], _ = record(partial(self._draw, size), pool)
        torch.cuda.synchronize()
        taken = (pool_bytes(pool) - before) / 2**20
        return (
            f"{len(self._sizes)} up to {self.largest} rows: {taken:.0f} MiB, "
            f"{time.monotonic() - started:.1f} s"
        )

    def warmup(self, layers: int) -> None:
        """Launch what every size launches, of the first `layers` alone."""
        for size in self._sizes:
            self._fill(size, slots=[self._rows.padding_slot] * size, positions=[0] * size, active=0)
            self._run(size, self._kv[:layers])
            self._draw(size)

    def prepare(self, plan: StepPlan) -> torch.cuda.CUDAGraph:
        """Send the rows of `plan`, all decodes, to the device; the graph to replay for them."""
        num_rows = len(plan.slots)
        size = self._size(num_rows)
        padding = size - num_rows
        slots = plan.slots + [self._rows.padding_slot] * padding
        positions = self._rows.num_computed[plan.slots].tolist() + [0] * padding
        self._latest[size] = (slots, positions, num_rows)
        self._fill(size, slots=slots, positions=positions, active=num_rows)
        return self._graphs[size]

    def replay(self, graph: torch.cuda.CUDAGraph) -> DecodeOutputs:
        """Run the prepared step; the buffers hold the results of its rows until the next replay."""
        graph.replay()
        return self._outputs

    def draw(self, num_rows: int) -> None:
        """Choose again for those rows of the step that have a small top_k."""
        self._draws[self._size(num_rows)].replay()

    def _size(self, num_rows: int) -> int:
        """The smallest captured size that holds `num_rows`."""
        return self._sizes[bisect_left(self._sizes, num_rows)]

    def _fill(self, size: int, *, slots: list[int], positions: list[int], active: int) -> None:
        lengths = [position + 1 for position in positions[:active]] + [0] * (size - active)
        inputs = torch.tensor(
            [*slots, *positions, *lengths, active], dtype=torch.int64
        ).pin_memory()
        self._inputs[: len(inputs)].copy_(inputs, non_blocking=True)

    def replay_seconds(self, num_rows: int, *, repeats: int) -> float | None:
        """Device time of the latest step of `num_rows` rows, replayed back to back: a step without
        any host. None: there was none."""
        size = self._size(num_rows)
        if size not in self._latest:
            return None
        slots, positions, active = self._latest[size]
        self._fill(size, slots=slots, positions=positions, active=active)
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._graphs[size].replay()
        began.record()
        for _ in range(repeats):
            self._graphs[size].replay()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3 / repeats

    def _run(self, size: int, kv: Sequence[KvCaches]) -> None:
        """The step of `size` rows, as it is captured."""
        rows = self._rows
        slots, positions, lengths, active = torch.split(
            self._inputs[: 3 * size + 1], [size, size, size, 1]
        )
        metadata = AttentionMetadata(
            positions=positions,
            token_slots=slots,
            block_tables=rows.block_tables,
            block_table_indices=slots,
            seq_lens=lengths.int(),
            query_starts=self._query_starts[: size + 1],
            num_decodes=size,
            host_seq_lens=(),
            host_query_lens=(),
            num_actual_tokens=active.int(),
        )
        hidden, _ = self._model.forward(rows.tokens[slots, positions].long(), metadata, kv)
        logits = self._model.local_logits(hidden, out=self._outputs.logits[:size])
        token_ids = self._pick(
            logits,
            first_id=self._model.vocab_range.start,
            temperature=rows.sampling[slots, 0],
            seeds=rows.seeds[slots],
            positions=lengths,
            group=self._group,
        )
        self._keep(token_ids, slots, lengths)

    def _draw(self, size: int) -> None:
        """What `draw` replays."""
        rows = self._rows
        slots, _, lengths = torch.split(self._inputs[: 3 * size], size)
        token_ids = self._draw_leading(
            self._outputs.logits[:size],
            first_id=self._model.vocab_range.start,
            filters=rows.sampling[slots],
            seeds=rows.seeds[slots],
            positions=lengths,
            otherwise=self._outputs.token_ids[:size],
            group=self._group,
        )
        self._keep(token_ids, slots, lengths)

    def _keep(self, token_ids: Tensor, slots: Tensor, positions: Tensor) -> None:
        """The chosen tokens, to where the next step and the host find them."""
        self._rows.tokens[slots, positions] = token_ids.clamp_min(0).to(self._rows.tokens.dtype)
        self._outputs.token_ids[: len(slots)].copy_(token_ids)
