"""Simulate captured steps without CUDA: a replay repeats a step that reads only fixed buffers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from negamax.formats.platform import CPU
from negamax.kernels.attention.metadata import AttentionMetadata, DecodeRuns
from negamax.kernels.attention.op import DECODE, PREFILL
from negamax.kernels.block_sparse.op import (
    BLOCK_SPARSE_DECODE,
    BLOCK_SPARSE_MERGE_SHARDS,
    BLOCK_SPARSE_PREFILL,
    BLOCK_SPARSE_SELECT,
    BLOCK_SPARSE_SELECT_SHARD,
)
from negamax.kernels.cache_shards.op import (
    PARTIAL_DECODE,
    PARTIAL_PREFILL,
    PARTIAL_SPARSE_DECODE,
    PARTIAL_SPARSE_PREFILL,
)
from negamax.kernels.op import Kernel
from negamax.kernels.registry import OPS, KernelTable, resolve
from negamax.worker import runner, worker
from negamax.worker.device import HostTensor, Runtime

# attention ops whose plans read the lengths of sequences
_PLANNED = (
    DECODE, PREFILL, BLOCK_SPARSE_SELECT, BLOCK_SPARSE_SELECT_SHARD, BLOCK_SPARSE_MERGE_SHARDS,
    BLOCK_SPARSE_DECODE, BLOCK_SPARSE_PREFILL, PARTIAL_DECODE, PARTIAL_PREFILL,
    PARTIAL_SPARSE_DECODE, PARTIAL_SPARSE_PREFILL,
)  # fmt: skip


class RepeatedStep:
    def __init__(self, pool: RepeatedSteps, step: Callable[[], None]) -> None:
        self._pool, self._step = pool, step

    def replay(self) -> None:
        self._pool.num_replays += 1
        with torch.inference_mode():
            self._step()


class RepeatedSteps:
    """Stand in for `GraphPool`. If `runs_captured`, a capture also runs the step on padding."""

    def __init__(self, *, runs_captured: bool = True) -> None:
        self._runs_captured = runs_captured
        self.num_graphs = self.num_replays = 0

    def capture(self, step: Callable[[], None]) -> RepeatedStep:
        self.num_graphs += 1
        if self._runs_captured:
            step()
        return RepeatedStep(self, step)

    def num_bytes(self) -> int:
        return self.num_graphs << 20


def plan_on_device(
    prepare: Callable[..., Any], queries: AttentionMetadata, *args: Any, **options: Any
) -> Any:
    """Plan attention from lengths that only the device holds, as the kernels of a GPU do."""
    counts = queries.query_starts.diff()
    real = counts > 0
    if queries.decode_runs is not None:
        check_runs(queries, queries.decode_runs)
    queries = replace(
        queries,
        block_table_indices=queries.block_table_indices[real],
        host_seq_lens=tuple(queries.seq_lens[real].tolist()),
        host_query_lens=tuple(counts[real].tolist()),
    )
    return prepare(queries, *args, **options)


def check_runs(queries: AttentionMetadata, runs: DecodeRuns) -> None:
    lengths, tables = queries.seq_lens.tolist(), queries.block_table_indices.tolist()
    table, end, starts = (
        column.tolist() for column in (runs.block_table_indices, runs.seq_lens, runs.query_starts)
    )
    assert len(lengths) == len(end) * queries.max_decode_run
    for row, length in enumerate(end):
        tokens = range(starts[row], starts[row + 1])
        assert len(tokens) <= queries.max_decode_run
        assert [lengths[at] for at in tokens] == list(range(length + 1 - len(tokens), length + 1))
        assert {tables[at] for at in tokens} <= {table[row]}
        assert length == 0 or len(tokens)
    assert not any(lengths[starts[-1] :])


def kernels(dtype: torch.dtype) -> KernelTable:
    """Return the CPU's kernels, with attention that reads lengths only from the device."""
    table = resolve(platform=CPU, dtype=dtype)
    own = {}
    for op in _PLANNED:
        reference = OPS[op].reference
        plan = partial(plan_on_device, reference.prepare)
        own[op] = (Kernel(op, "test", run=reference.run, prepare=plan),)
    return replace(table, candidates={**table.candidates, **own})


def install(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> None:
    """Make the engines of this process run on the CPU with `runtime`, as they run on a GPU."""
    monkeypatch.setattr(runner, "runtime_of", lambda _device: runtime)
    monkeypatch.setattr(runner, "resolve", lambda *, platform, dtype: kernels(dtype))
    monkeypatch.setattr(runner, "peak_bytes", lambda *_args, **_options: 0)
    monkeypatch.setattr(runner, "compile_eager_steps", lambda *_args, **_options: None)
    monkeypatch.setattr(runner, "warming_up", lambda *_, **_options: nullcontext())


class Clockless(Runtime):
    def record_event(self) -> None:
        return None

    def release_memory(self) -> None:
        return None


def runtime(
    pool: RepeatedSteps | None, *, is_asynchronous: bool = False, kind: type[Runtime] = Clockless
) -> Runtime:
    """Return a GPU's runtime on the CPU. If `pool` is given, it captures the steps."""
    return kind(
        is_asynchronous=is_asynchronous,
        graph_pool=None if pool is None else lambda: pool,
        is_batch_invariant=False,
        samples_on_shards=True,
    )


def capture(monkeypatch: pytest.MonkeyPatch) -> RepeatedSteps:
    """Let this process's engines capture their steps and run them asynchronously."""
    pool = RepeatedSteps()
    install(monkeypatch, runtime(pool, is_asynchronous=True))
    watch_reads(monkeypatch)
    return pool


def watch_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Keep the values of host tensors. Return (launch, launch that made the value) of each read."""
    launching = threading.local()
    counter = itertools.count(1)
    reads: list[tuple[int, int]] = []
    launch, init, read = worker.Worker.launch, HostTensor.__init__, HostTensor.read

    def counting(*args: Any) -> Any:
        launching.number = next(counter)
        try:
            return launch(*args)
        finally:
            del launching.number

    def keeping(self: HostTensor, tensor: Tensor) -> None:
        init(self, tensor.clone())
        self.made_by = launching.number  # type: ignore[attr-defined]

    def noting(self: HostTensor) -> Tensor:
        if hasattr(launching, "number"):
            reads.append((launching.number, self.made_by))  # type: ignore[attr-defined]
        return read(self)

    monkeypatch.setattr(worker.Worker, "launch", counting)
    monkeypatch.setattr(HostTensor, "__init__", keeping)
    monkeypatch.setattr(HostTensor, "read", noting)
    return reads
