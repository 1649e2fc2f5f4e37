"""Copy blocks between the KV caches of one rank and host memory, as plans request. Host memory is a
second cache level. Files may be a third cache level (`FileStore`).

On a GPU, stores and loads run on separate streams, in plan order, and start after all steps that
were launched earlier. On the device, a step waits for pending stores of blocks that it writes, and
for pending loads of blocks that it uses. These waits prevent steps from reading incomplete copies.

A host block has the data of one KV block in all caches. On a GPU, stores pass through a staging
buffer on the device: one gather per kind of cache, and one transfer per run of adjacent host
blocks. Loads use no buffer (`BlockLoader`), because loads through a buffer slow down steps more.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from negamax.base.errors import ResourceError
from negamax.layers.attention import KvCaches
from negamax.scheduler.step import FileProgress, HostCopies, StepPlan
from negamax.worker.block_loader import BlockLoader, Launch, Pieces
from negamax.worker.device import indices
from negamax.worker.file_store import FileStore
from negamax.worker.kv_cache import STAGING_BYTES, zeros_on_large_pages

# longest wait for a load or a file copy if no step can run; short, because requests may arrive
AWAIT_SECONDS = 0.005


@dataclass(frozen=True)
class _Batch:
    """The stores or the loads of one plan on a GPU, which may be pending."""

    step_id: int
    launch: Launch
    stored_blocks: frozenset[int] = frozenset()
    loaded_blocks: frozenset[int] = frozenset()
    loaded_places: frozenset[int] = frozenset()

    @property
    def is_done(self) -> bool:
        return self.launch.done() and self.launch.result().query()


@dataclass(frozen=True)
class LoadProgress:
    """Progress of the loads of all plans up to a launch. Any thread may read this progress."""

    loaded_step: int  # all loads of plans up to this step id were complete at the launch
    pending: tuple[_Batch, ...]  # copies of the plans after `loaded_step`, in plan order
    is_awaited: bool
    files: FileStore | None = None  # None: blocks are not stored in files

    def read(self) -> int:
        """Return the step id up to which all loads are complete. If `is_awaited`, first wait up to
        `AWAIT_SECONDS` until a load or a file copy ends.
        """
        end = time.monotonic() + AWAIT_SECONDS * self.is_awaited
        while time.monotonic() < end and not self._has_news:
            time.sleep(AWAIT_SECONDS / 50)
        loaded_step = self.loaded_step
        for batch in self.pending:
            if not batch.is_done:
                break
            loaded_step = batch.step_id
        return loaded_step

    def report_files(self) -> FileProgress | None:
        """Return `FileStore.report`. The caller's step must not fail before this report is sent."""
        return None if self.files is None else self.files.report()

    @property
    def _has_news(self) -> bool:
        is_busy = bool(self.pending) or (self.files is not None and self.files.is_busy)
        has_file = self.files is not None and self.files.has_news
        return not is_busy or has_file or bool(self.pending and self.pending[0].is_done)


class HostPool:
    """Host blocks in memory that is pinned for GPUs. The worker's thread calls most methods."""

    def __init__(
        self, caches: list[KvCaches], num_blocks: int, *, block_size: int, device: torch.device
    ) -> None:
        """`caches`: the KV caches of this rank. `num_blocks`: blocks in host memory."""
        self.num_blocks, self._block_size, self._device = num_blocks, block_size, device
        self._caches = view_blocks(caches)
        sizes = [cache.shape[1:] for cache in self._caches]  # [layers, 8-byte words] of a block
        self.block_bytes = sum(8 * size.numel() for size in sizes)
        most = self._caches[0].shape[0]
        self._piece = min(most, max(1, STAGING_BYTES // self.block_bytes))  # blocks per staged copy
        self._staging = [
            torch.empty(self._piece, *size, dtype=torch.int64, device=device) for size in sizes
        ]
        raw = [zeros_on_large_pages(num_blocks * 8 * size.numel()) for size in sizes]
        self._pinned: list[Tensor] = []
        if device.type == "cuda":
            for memory in raw:  # pin with CUDA, because torch would pin up to twice the bytes
                code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
                if int(code):
                    raise ResourceError(
                        f"{memory.numel() / 2**30:.2f} GiB of main memory cannot be pinned for KV "
                        f"blocks: CUDA error {int(code)}",
                        hint="use a smaller --kv-offloading-size",
                    )
                self._pinned.append(memory)
        # [num_blocks, layers, words] int64 for each kind of cache; also used by `worker.lanes`
        self.host = [
            memory.view(torch.int64).view(num_blocks, *size)
            for memory, size in zip(raw, sizes, strict=True)
        ]
        self._loader: BlockLoader | None = None  # None: copies are synchronous
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # stream of stores
            self._loader = BlockLoader(zip(self._caches, self.host, strict=True), device)
        self._batches: deque[_Batch] = deque()  # batches whose copies may be pending
        self._loaded_step = self._last_step = -1
        self.files: FileStore | None = None  # the runner sets this field if files are enabled

    def run(self, plan: StepPlan) -> LoadProgress:
        """Launch the copies of a plan. The step that is launched next waits on the device for
        copies of its blocks.
        """
        copies = plan.copies
        if copies is not None and (copies.stored_blocks or copies.loaded_blocks):
            self._launch(copies, plan.step_id)
        self._last_step = plan.step_id
        while self._batches and self._batches[0].is_done:
            batch = self._batches.popleft()
            if batch.loaded_blocks:
                self._loaded_step = batch.step_id
        if self._batches:
            self._order_step(plan)
        if copies is not None and copies.files is not None and self.files is not None:
            self.files.run(copies.files, plan.step_id, self._record_end())
        pending = tuple(batch for batch in self._batches if batch.loaded_blocks)
        is_awaited = copies is not None and copies.is_awaited
        return LoadProgress(self._loaded_step, pending, is_awaited, self.files)

    def view_bytes(self) -> list[np.ndarray]:
        """View the blocks as [blocks, bytes] uint8, for each kind of cache."""
        return [kind.view(self.num_blocks, -1).view(torch.uint8).numpy() for kind in self.host]

    def await_copies(self, step_id: int, *, seconds: float) -> bool:
        """Wait until the copies of plans up to `step_id` are complete. Return False after
        `seconds`. Any thread may call this method.
        """
        end = time.monotonic() + seconds
        while self._last_step < step_id:
            if time.monotonic() > end:
                return False
            time.sleep(AWAIT_SECONDS / 50)
        self._record_end()()  # because this thread then reads or writes host blocks
        return True

    def close(self) -> None:
        """Wait for all copies and release the memory."""
        if self.files is not None:
            self.files.close()
        self._record_end()()  # because the memory must outlive its copies
        for memory in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
        self._pinned.clear()

    def _launch(self, copies: HostCopies, step_id: int) -> None:
        loads = self._pieces(copies.loaded_blocks, copies.loaded_places)
        stores = self._pieces(copies.stored_blocks, copies.stored_places)
        if self._loader is None:
            for piece in stores:
                self._store(*piece)
            for blocks, places in loads:
                for cache, host in zip(self._caches, self.host, strict=True):
                    cache[blocks] = host[places]
            if loads:
                self._loaded_step = step_id
            return
        self._stream.wait_stream(torch.cuda.current_stream())  # wait for the end of earlier steps
        with torch.cuda.stream(self._stream):
            stored, filled = frozenset(copies.stored_blocks), frozenset(copies.stored_places)
            # Other ranks may have reported loads that are still pending on this rank.
            for batch in self._batches:
                if batch.loaded_blocks & stored or batch.loaded_places & filled:
                    batch.launch.result().wait()
            for piece in stores:
                self._store(*piece)
            launch = Launch()
            launch.set_result(self._stream.record_event())
        if stored:
            self._batches.append(_Batch(step_id, launch, stored))
        if loads:
            launch = self._loader.launch(loads, launch.result())
            loaded = frozenset(copies.loaded_blocks), frozenset(copies.loaded_places)
            self._batches.append(_Batch(step_id, launch, frozenset(), *loaded))

    def _record_end(self) -> Callable[[], object]:
        """Return a function that waits for the launched copies."""
        if self._loader is None:
            return lambda: None
        launch = self._loader.launch([], self._stream.record_event())
        return lambda: launch.result().synchronize()  # host-sync: the caller uses host blocks

    def _order_step(self, plan: StepPlan) -> None:
        """Let the next step wait for pending stores and loads of blocks that this plan assigns."""
        used, written = set[int](), set(plan.appended_blocks)
        for row in plan.new_rows:
            used.update(row.block_ids)
            written.update(row.block_ids[row.num_computed // self._block_size :])
        used |= written
        for batch in self._batches:
            is_free = batch.stored_blocks.isdisjoint(written)
            if not (is_free and batch.loaded_blocks.isdisjoint(used)):
                batch.launch.result().wait()

    def _pieces(self, blocks: list[int], places: list[int]) -> Pieces:
        """Split a list of copies into pieces that fit the staging buffer."""
        pieces = (slice(at, at + self._piece) for at in range(0, len(blocks), self._piece))
        return [(blocks[piece], places[piece]) for piece in pieces]

    def _store(self, blocks: list[int], places: list[int]) -> None:
        index = indices(blocks, self._device)
        for cache, staging, host in zip(self._caches, self._staging, self.host, strict=True):
            torch.index_select(cache, 0, index, out=staging[: len(blocks)])
            for rows, to in _find_runs(places):
                host[to].copy_(staging[rows], non_blocking=True)


def view_blocks(caches: list[KvCaches]) -> list[Tensor]:
    """View caches by block: [blocks, layers, words] int64 for each allocation."""
    allocations: dict[int, list[Tensor]] = {}
    for cache in (cache for layer in caches for cache in layer.values()):
        allocations.setdefault(cache.untyped_storage().data_ptr(), []).append(cache)
    views = []
    for layers in allocations.values():
        first = layers[0].view(torch.uint8).flatten(1).view(torch.int64)  # [blocks, 8-byte words]
        stride = (layers[-1].data_ptr() - layers[0].data_ptr()) // 8 // max(1, len(layers) - 1)
        blocks, words = first.shape
        views.append(first.as_strided((blocks, len(layers), words), (words, stride, 1)))
    return views


def _find_runs(places: list[int]) -> Iterator[tuple[slice, slice]]:
    """For each run of consecutive `places`, yield the slice of indices and the slice of blocks."""
    ends = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]
    for first, stop in pairwise(ends):
        yield slice(first, stop), slice(places[first], places[first] + stop - first)
